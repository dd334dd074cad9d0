"""Sessions of an engine in the generation loop: parked, woken, ended, failed, moved here."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.engines.batcher import EngineBatcher
from catenary_agent.engines.executor import EngineExecutor
from catenary_agent.engines.loading import EngineHost, load_engine
from catenary_agent.engines.requests import EngineRequest, EngineTokens
from catenary_agent.engines.streams import EngineStream
from catenary_agent.executors.device import Device
from catenary_agent.generation.context import GenerationLimits
from catenary_agent.generation.loop.generation_loop import GenerationLoop
from catenary_agent.generation.state.events import (
    CloseOrdered,
    EngineAnswered,
    MoveMessage,
    SessionOpened,
    TokenOut,
)
from catenary_agent.generation.state.session import ArrivalTime, SessionSpec
from catenary_agent.generation.state.states import SessionState
from catenary_agent.supervision.steps import RunningSteps
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, generation_pb2
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.model import ENGINE_OF
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.models.model_repository import ModelRepository
from engines.engine_models import BLOCKS, SESSION_TOKENS, engine_model
from engines.fake_engine import fake_python, token_at
from small_models.tiny_tokenizer import END, MORE

FAR = 1 << 62
PROMPT = [5, 6, 7, 8]
LAYOUT = CacheLayout(3 * BLOCKS, SESSION_TOKENS, (0,))


def opening(
    tokens: int, prompt: list[int] = PROMPT, adapter: str = "", **sampling: object
) -> frame_pb2.SessionOpening:
    hop = common_pb2.Hop(agent_id="a", model="tiny", model_version="1", last_block=BLOCKS)
    return frame_pb2.SessionOpening(
        gateway_id="g",
        route=[hop],
        token_ids=prompt,
        prompt_tokens=len(PROMPT),
        sampling=generation_pb2.SamplingParameters(max_tokens=tokens, top_p=1, **sampling),
        budget_ns=FAR,
        adapter=adapter,
    )


class Agent:
    """A generation loop with one engine, whose news a test hands on one by one."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        platform: str = "llama_server",
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.news: queue.Queue[EngineAnswered] = queue.Queue()
        key = engine_model(
            folder / "models", platform=platform, arguments=arguments, adapters=adapters
        )
        host = EngineHost(
            ENGINE_OF[platform],
            fake_python(folder),
            Device.parse("cpu"),
            1,
            None,
            20.0,
            RunningSteps(),
            lambda sessions, error: self.news.put(EngineAnswered(sessions, error)),
        )
        repository = ModelRepository(folder / "models")
        self.engine: EngineExecutor = load_engine(
            repository, PartitionKey(key, 0, BLOCKS), LAYOUT, host
        )
        self.loop = GenerationLoop("a", GenerationLimits(64), lambda: 7, validates=True)
        self.batcher = EngineBatcher(self.engine)
        self.loop.add_batcher(self.batcher)
        self.said: list[TokenOut] = []
        self.messages: list[object] = []

    def open(self, session: int, tokens: int, **facts: object) -> None:
        spec = SessionSpec(session, opening(tokens, **facts), 0, FAR)
        self.loop.handle(SessionOpened(spec, ArrivalTime(7)))
        self.work()

    def work(self) -> None:
        while self.loop.is_ready:
            self.loop.step()
        out = self.loop.take_outflow()
        self.said += out.tokens
        self.messages += [each.message() for each in out.messages]

    def run(self, until_open: int = 0) -> None:
        """Hands on news until no more than so many sessions are open."""
        while len(self.loop.sessions) > until_open:
            self.loop.handle(self.news.get(timeout=30))
            self.work()

    def tokens(self, session: int) -> list[int]:
        return [each.token_id for each in self.said if each.spec.session_id == session]

    def failures(self) -> list[str]:
        told = [each.session_failed for each in self.messages if each.HasField("session_failed")]
        return [each.failure.reason for each in told]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.loop.close()


def expected(first: int, count: int) -> list[int]:
    return [token_at(first + each, MORE, END) for each in range(count)]


def test_answers_of_several_sessions_are_whole_and_end_by_themselves(agent: Agent) -> None:
    for session in (1, 2, 3):
        agent.open(session, 5 + session)
    assert agent.engine.parked == {1, 2, 3}
    assert not agent.batcher.is_ready
    agent.run()
    for session in (1, 2, 3):
        assert agent.tokens(session) == expected(len(PROMPT), 5 + session)
        assert [t.finish_reason for t in agent.said if t.spec.session_id == session][-1] == "length"
    assert agent.engine.free_block_slots == 3 * BLOCKS
    assert not agent.engine.parked
    assert not agent.engine._streams


def test_a_session_that_began_elsewhere_goes_on_behind_its_tokens(agent: Agent) -> None:
    agent.open(1, 10, prompt=[*PROMPT, *expected(len(PROMPT), 4)])
    agent.run()
    assert agent.tokens(1) == expected(len(PROMPT) + 4, 6)


def test_reports_have_the_steps_of_the_engine(agent: Agent) -> None:
    agent.open(1, 20)
    agent.run()
    agent.loop.handle(EngineAnswered((1,), None))  # late news of a session that is over
    agent.loop.sessions.report(agent.batcher)
    (report,) = [
        each.message().generation_report for each in agent.loop.take_outflow().messages
    ] or [each.generation_report for each in agent.messages if each.HasField("generation_report")]
    assert report.prefill_tokens == len(PROMPT)
    assert report.decode_rows >= 17
    assert report.decode_ns > 0


def test_what_an_engine_does_not_have_fails_its_session_only(agent: Agent) -> None:
    agent.open(1, 8, allowed_token_ids=[3])
    agent.open(2, 8)
    agent.run()
    assert agent.failures() == ["INVALID_INPUT"]
    assert agent.tokens(1) == []
    assert len(agent.tokens(2)) == 8


def test_late_news_of_tokens_that_were_taken_wakes_nobody(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "fake.token_s=0.1")
    agent.open(1, 30)
    agent.loop.handle(agent.news.get(timeout=30))
    agent.work()
    assert agent.engine.parked == {1}
    for _ in range(3):
        agent.loop.handle(EngineAnswered((1,), None))
        agent.work()
    assert agent.engine.parked == {1}
    assert not agent.failures()
    agent.loop.close()


def test_tokens_of_a_round_are_told_of_together(agent: Agent) -> None:
    request = EngineRequest(PROMPT, len(PROMPT), 50, SamplingParameters(), 1)
    streams = [EngineStream(session, request) for session in (1, 2, 3)]
    for each in streams:
        agent.engine.asked(each)

    def come(*which: EngineStream) -> None:
        for each in which:
            agent.engine.came(each, EngineTokens((MORE,)), 7)

    on_thread = agent.engine._client._loop.call_soon_threadsafe
    on_thread(come, *streams)  # the first ones are of prompts, which nobody waits for
    on_thread(come, *streams)
    on_thread(come, streams[0], streams[2])  # the engine is late with the second
    told = [agent.news.get(timeout=30).session_ids for _ in range(5)]
    assert [list(each) for each in told] == [[1], [2], [3], [1, 2, 3], [1, 3]]


def test_closed_sessions_are_forgotten_by_the_engine(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "fake.token_s=0.2")
    agent.open(1, 400)
    agent.loop.handle(agent.news.get(timeout=30))
    agent.work()
    (stream,) = agent.engine._streams.values()
    agent.loop.handle(CloseOrdered((1,)))
    assert stream.is_closed
    assert agent.engine.free_block_slots == 3 * BLOCKS
    assert not agent.engine.parked
    agent.loop.close()


def test_an_engine_that_breaks_off_fails_a_session_so_that_it_goes_on_elsewhere(
    tmp_path: Path,
) -> None:
    agent = Agent(tmp_path, "fake.fault=breaks_off")
    agent.open(1, 9)
    agent.run()
    assert agent.failures() == ["PARTITION_LOST"]
    assert agent.tokens(1) in ([], expected(len(PROMPT), 1), expected(len(PROMPT), 2))
    agent.loop.close()


def test_a_session_that_moves_here_is_asked_for_when_it_is_handed_over(agent: Agent) -> None:
    def move(step: int, **facts: object) -> frame_pb2.SessionMove:
        return frame_pb2.SessionMove(
            session_id=2, moved_session_id=1, step=step, by_tokens=True, agent_id="b", **facts
        )

    known = [*PROMPT, *expected(len(PROMPT), 3)]
    made = opening(20, known)
    began = move(frame_pb2.SessionMove.STEP_ROUND, opening=made)
    agent.loop.handle(MoveMessage(began, 1, ArrivalTime(7), SessionSpec(2, made, 0, FAR)))
    agent.work()
    agent.loop.handle(
        MoveMessage(
            move(frame_pb2.SessionMove.STEP_ROUND, tokens=len(known)), 1, ArrivalTime(7), None
        )
    )
    agent.work()
    session = agent.loop.sessions.get(2)
    assert session is not None
    while session.cached < len(known):  # the engine reads them, and so has them in its cache
        agent.loop.handle(agent.news.get(timeout=30))
        agent.work()
    assert agent.tokens(2) == []
    more = expected(len(known), 1)
    over = move(frame_pb2.SessionMove.STEP_HAND_OVER, tokens=len(known), token_ids=more)
    agent.loop.handle(MoveMessage(over, 1, ArrivalTime(7), None))
    agent.work()
    assert session.state is SessionState.QUEUED
    agent.run()
    assert agent.tokens(2) == expected(len(known) + 1, 20 - 4)


def test_sessions_with_adapters_run_beside_those_without(tmp_path: Path) -> None:
    agent = Agent(tmp_path, platform="vllm", adapters=("terse", "rhyming"))
    try:
        for session, adapter in enumerate(("", "terse", "rhyming"), 1):
            agent.open(session, 5, adapter=adapter)
        agent.run()
        for shift, session in enumerate((1, 2, 3)):
            assert agent.tokens(session) == expected(len(PROMPT) + shift, 5)
    finally:
        agent.loop.close()


def test_an_adapter_that_is_not_loaded_fails_its_session_only(agent: Agent) -> None:
    agent.open(1, 5)
    agent.open(2, 5, adapter="terse")
    agent.run()
    assert agent.failures() == ["INVALID_INPUT"]
    assert agent.tokens(1) == expected(len(PROMPT), 5)
