"""Engines as child processes: started, asked, found out, and never outliving their agent."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.engines.child import EngineChild
from catenary_agent.engines.executor import EngineExecutor
from catenary_agent.engines.loading import EngineHost, load_engine
from catenary_agent.engines.requests import EngineCommand, EngineRequest
from catenary_agent.engines.streams import EngineStream
from catenary_agent.executors.device import Device
from catenary_agent.supervision.steps import RunningSteps
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.model import ENGINE_OF
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import (
    CatenaryError,
    DeviceLost,
    InternalError,
    InvalidInput,
    NotSupported,
    PartitionLost,
    PlanInfeasible,
    Unavailable,
)
from catenary_services.models.model_repository import ModelRepository
from engines.engine_models import BLOCKS, SESSION_TOKENS, engine_model
from engines.fake_engine import fake_python, fake_vllm, token_at
from small_models.tiny_tokenizer import END, MORE

LAYOUT = CacheLayout(4 * BLOCKS, SESSION_TOKENS, (0,))


class Place:
    """An agent's part that starts engines, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = RunningSteps()
        self.lost: list[BaseException] = []
        self.steps.lost = self.lost.append
        self.python = fake_python(folder)
        self.stopping = threading.Event()

    def load(
        self,
        platform: str = "llama_server",
        *arguments: str,
        layout: CacheLayout = LAYOUT,
        silence_s: float = 20.0,
        min_version: str = "",
        config: Mapping[str, object] | None = None,
    ) -> EngineExecutor:
        root = self.folder / "models" / str(len(list(self.folder.glob("models/*"))))
        key = engine_model(root, platform=platform, arguments=arguments, min_version=min_version)
        if config is not None:
            (root / key.name / key.version / "config.json").write_text(json.dumps(config))
        host = EngineHost(
            ENGINE_OF[platform],
            self.python,
            Device.parse("cpu"),
            1,
            self.folder / "run",
            silence_s,
            self.steps,
            lambda session, error: None,
            self.stopping,
        )
        return load_engine(ModelRepository(root), PartitionKey(key, 0, BLOCKS), layout, host)

    @contextmanager
    def loaded(self, platform: str, *arguments: str) -> Iterator[EngineExecutor]:
        executor = self.load(platform, *arguments)
        try:
            yield executor
        finally:
            executor.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class Answer:
    """Takes the tokens of one stream, as the executor does."""

    def __init__(self) -> None:
        self.error: CatenaryError | None = None
        self.is_over = threading.Event()

    def asked(self, stream: EngineStream) -> None:
        pass

    def came(self, stream: EngineStream, delta: object, now_ns: int) -> None:
        pass

    def over(self, stream: EngineStream, error: CatenaryError | None) -> None:
        self.error = error
        self.is_over.set()


def ask(
    executor: EngineExecutor, tokens: int = 10, **asked: object
) -> tuple[list[int], CatenaryError | None]:
    request = EngineRequest([5, 6, 7], 3, tokens, SamplingParameters(**asked), 77)
    stream, answer = EngineStream(9, request), Answer()
    executor._client.begin(stream, executor._protocol.body(request), answer)
    assert answer.is_over.wait(30)
    return [token for token, _ in stream.tokens], answer.error


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_paths_of_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (Path("run"), Path("far" * 40)):
        child = EngineChild(Path("python"), EngineCommand("vllm", (), {}), folder)
        assert child.socket.is_absolute()
        assert len(os.fsencode(child.socket)) <= 107
        assert child.socket.is_relative_to(folder.absolute()) == (folder.name == "run")
        child.close()
        assert not child.socket.parent.exists()


@pytest.mark.parametrize("platform", ["llama_server", "vllm"])
def test_an_engine_answers_over_a_socket_of_its_own(place: Place, platform: str) -> None:
    with place.loaded(platform) as executor:
        tokens, error = ask(executor)
        assert error is None
        assert tokens == [token_at(3 + each, MORE, END) for each in range(10)]
        assert executor.cost is not None
        assert executor.cost.decode(1, 0) > 0
        process = psutil.Process(executor.child.pid)
        assert not process.net_connections("inet")
        assert executor.child.socket.parent.stat().st_mode & 0o077 == 0
    until(lambda: not process.is_running(), "the engine ends with its executor")
    assert not executor.child.socket.parent.exists()
    assert not place.lost


@pytest.mark.parametrize("platform", ["llama_server", "vllm"])
def test_paths_may_be_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    with Place(Path("here")).loaded(platform) as executor:
        assert ask(executor)[1] is None


def test_an_engine_is_found_by_the_name_of_its_package(place: Place) -> None:
    place.python = fake_vllm(place.folder)
    with place.loaded("vllm") as executor:
        assert executor.child.version == "1.2.3"
        assert ask(executor) == ([token_at(3 + each, MORE, END) for each in range(10)], None)


def test_an_engine_that_ends_by_itself_costs_the_agent_its_device(place: Place) -> None:
    with place.loaded("llama_server") as executor:
        told: list[tuple[Sequence[int], CatenaryError | None]] = []
        executor.tell = lambda sessions, error: told.append((sessions, error))
        executor._streams[7] = EngineStream(7, None)
        os.kill(executor.child.pid, signal.SIGKILL)
        until(lambda: bool(place.lost), "it is noticed")
        assert isinstance(place.lost[0], DeviceLost)
        assert [list(each) for each, error in told if isinstance(error, DeviceLost)] == [[7]]


def test_the_end_of_an_engine_is_noticed_though_its_workers_live_on(place: Place) -> None:
    with place.loaded("llama_server", "fake.fault=worker") as executor:
        server = psutil.Process(executor.child.pid)
        (worker,) = server.children()
        server.kill()
        until(lambda: bool(place.lost), "it is noticed")
        assert isinstance(place.lost[0], DeviceLost)
        until(lambda: not worker.is_running() or worker.status() == "zombie", "the worker ends")


def test_an_engine_ends_when_its_agent_is_gone(place: Place) -> None:
    with place.loaded("llama_server") as executor:
        process = psutil.Process(executor.child.pid)
        # What the kernel does when the agent is killed: its end of the pipe is closed.
        executor.child._process.stdin.close()
        until(lambda: not process.is_running() or process.status() == "zombie", "it ends")


def test_an_engine_gets_no_secret_of_the_agent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATENARY_REDIS_URL", "redis://hunter2")
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    with place.loaded("llama_server") as executor:
        given = psutil.Process(executor.child.pid).environ()
        assert "hunter2" not in "".join(given.values())
        assert "PYTHONPATH" not in given
        assert given["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("garbage", "cannot be read"),
        ("long_line", ""),
        ("breaks_off", "early"),
        ("other_vocabulary", "no token"),
    ],
)
def test_what_an_engine_says_wrongly_costs_one_session(
    place: Place, fault: str, words: str
) -> None:
    with place.loaded("llama_server", f"fake.fault={fault}") as executor:
        tokens, error = ask(executor)
        assert isinstance(error, PartitionLost)
        assert words in error.message
        assert len(tokens) == 2
        assert not place.lost


def test_what_an_engine_refuses_is_the_callers_to_change(place: Place) -> None:
    with place.loaded("llama_server", "fake.fault=refuses") as executor:
        _, error = ask(executor)
        assert isinstance(error, InvalidInput)
        assert "no such thing" in error.message


@pytest.mark.parametrize("platform", ["llama_server", "vllm"])
def test_an_engine_has_loaded_all_it_needs_before_it_serves(place: Place, platform: str) -> None:
    fault = "fake.fault=lazy" if platform == "llama_server" else "--fake-fault=lazy"
    with place.loaded(platform, fault) as executor:
        tokens, error = ask(executor, grammar='start: "a"')
        assert (len(tokens), error) == (10, None)


def test_an_engine_without_grammars_serves_whoever_asks_for_none(place: Place) -> None:
    with place.loaded("vllm", "--fake-fault=plain") as executor:
        assert ask(executor)[1] is None
        _, error = ask(executor, grammar='start: "a"')
        assert isinstance(error, InvalidInput)
        assert "no grammars here" in error.message


def test_an_end_that_the_model_does_not_know_by_that_token_is_one(place: Place) -> None:
    with place.loaded("llama_server", "fake.end_at=6") as executor:
        tokens, error = ask(executor)
        assert error is None
        assert tokens[-1] == END
        assert len(tokens) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("fake.fault=ends",), InternalError, "cannot find the weights"),
        (("fake.fault=never_ready",), InternalError, "said nothing"),
        (("fake.fault=small",), PlanInfeasible, "are booked"),
    ],
)
def test_an_engine_that_does_not_come_up_says_why(
    place: Place, arguments: tuple[str, ...], error: type[CatenaryError], words: str
) -> None:
    with pytest.raises(error, match=words):
        place.load("llama_server", *arguments, silence_s=1.5)
    assert not list((place.folder / "run").iterdir())


def test_an_agent_that_stops_waits_for_no_engine(place: Place) -> None:
    place.stopping.set()
    with pytest.raises(Unavailable):
        place.load("llama_server", "fake.fault=never_ready")


def test_an_agent_that_stops_waits_for_no_measurement(place: Place) -> None:
    threading.Timer(1.0, place.stopping.set).start()
    with pytest.raises(Unavailable):
        place.load("llama_server", "fake.token_s=60")
    assert not list((place.folder / "run").iterdir())


def test_a_model_may_ask_for_a_newer_engine(place: Place) -> None:
    with pytest.raises(NotSupported, match=r"1\.10"):
        place.load(min_version="1.10")
    place.load(min_version="1.2.3").close()


def test_codes_that_were_kept_of_a_gguf_file_are_not_for_vllm(place: Place) -> None:
    config = {"quantization_config": {"quant_method": "catenary", "bits": 4, "group_size": 32}}
    with pytest.raises(NotSupported, match="codes that were kept of a GGUF file"):
        place.load("vllm", config=config)


def test_an_engine_serves_whole_models_only(place: Place) -> None:
    key = engine_model(place.folder / "part")
    host = EngineHost(
        ENGINE_OF["llama_server"],
        place.python,
        Device.parse("cpu"),
        1,
        None,
        1.0,
        place.steps,
        lambda session, error: None,
    )
    repository = ModelRepository(place.folder / "part")
    with pytest.raises(InvalidInput, match="whole"):
        load_engine(repository, PartitionKey(key, 0, 1), CacheLayout(4, 512, (0,)), host)


def test_no_interpreter_and_no_engine_are_told_apart(place: Place) -> None:
    place.python = place.folder / "nowhere"
    with pytest.raises(NotSupported, match="cannot be run"):
        place.load()
    place.python = Path(psutil.Process().exe())
    with pytest.raises(NotSupported, match="installed"):
        place.load(silence_s=20)


def test_a_layout_may_shrink_but_not_grow(place: Place) -> None:
    with place.loaded("llama_server") as executor:
        weights = executor.sizes.weight_bytes(0, BLOCKS)
        assert executor.memory_bytes == weights
        smaller = CacheLayout(2 * BLOCKS, SESSION_TOKENS, (0,))
        executor.apply_layout(executor.prepare_layout(smaller))
        assert executor.free_block_slots == 2 * BLOCKS
        # The engine keeps what it has.
        assert executor.memory_bytes == weights + executor.sizes.slot_bytes(
            2 * BLOCKS * SESSION_TOKENS
        )
        with pytest.raises(PlanInfeasible):
            executor.prepare_layout(CacheLayout(5 * BLOCKS, SESSION_TOKENS, (0,)))
