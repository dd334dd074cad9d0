"""Executors choose where their logits are, and all of them what their logits say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnxruntime_genai")

import torch

from catenary_agent.decoders.base import CacheLayout, DecoderExecutor, StepItem
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.sampling import NOT_CHOSEN, NOT_FINITE, SessionSampler
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import InvalidInput
from tiny_language_models import LAYERS, imported_llama

PROMPTS = {n: [(7 * n + 3 * i * i) % 150 + 3 for i in range(2 + 5 * n)] for n in range(1, 6)}
WAYS: dict[int, dict[str, object]] = {
    1: {},
    2: {"temperature": 1.1, "seed": 4},
    3: {"temperature": 0.9, "seed": 4, "top_p": 0.8, "frequency_penalty": 0.7},
    4: {"repetition_penalty": 1.4, "logit_bias": ((9, 3.0),)},
    5: {"temperature": 1.4, "seed": 9, "top_k": 7, "min_p": 0.05, "presence_penalty": 0.4},
}


def load(library: str, first: int = 0) -> DecoderExecutor:
    repository, key, _ = imported_llama()
    layout = CacheLayout(20 * LAYERS, 96, (first,))
    device = Device("cpu")
    made = PartitionKey(key, first, LAYERS)
    return load_decoder(repository, made, device, layout, library=library)  # type: ignore[arg-type]


@pytest.fixture(params=["onnx", "torch"])
def executor(request: pytest.FixtureRequest) -> Iterator[DecoderExecutor]:
    made = load(request.param)
    yield made
    made.close()


def sampler_of(executor: DecoderExecutor, session: int, known: list[int]) -> SessionSampler:
    parameters = SamplingParameters(**WAYS[session])  # type: ignore[arg-type]
    prompt = PROMPTS[session]
    return SessionSampler(parameters, known, len(prompt), executor.table.end_token_ids)


def test_a_step_returns_the_tokens_its_logits_say(executor: DecoderExecutor) -> None:
    chooser = numpy_chooser(executor.table.vocabulary_size)
    known = {session: list(prompt) for session, prompt in PROMPTS.items()}
    samplers = {s: sampler_of(executor, s, tokens) for s, tokens in known.items()}
    for session in PROMPTS:
        executor.open_session(session, 0)
        executor.open_session(-session, 0)  # shows its logits
    for step in range(12):
        items = []
        for session, tokens in known.items():
            position = len(tokens) - 1 if step else 0
            new = np.array(tokens[position:], np.int64)
            items.append(StepItem(session, position, new, "token", samplers[session]))
            items.append(StepItem(-session, position, new, "logits"))
        results = executor.step(items)
        for session, token, logits in zip(known, results[::2], results[1::2], strict=True):
            assert token is not None
            assert logits is not None
            assert (token.shape, token.dtype) == ((1,), np.int64)
            # What was said so far, counted anew: as after a restart.
            fresh = sampler_of(executor, session, known[session])
            assert int(token[0]) == chooser.choose(logits[None], [(session, fresh)], [0])[0]
            samplers[session].accept(int(token[0]))
            known[session].append(int(token[0]))
    assert len({tuple(tokens[-6:]) for tokens in known.values()}) == len(known)


def test_a_session_number_that_comes_back_has_said_nothing(executor: DecoderExecutor) -> None:
    answers = []
    for _ in range(2):
        executor.open_session(3, 0)
        tokens = list(PROMPTS[3])
        sampler = sampler_of(executor, 3, tokens)
        for step in range(8):
            position = len(tokens) - 1 if step else 0
            item = StepItem(3, position, np.array(tokens[position:], np.int64), "token", sampler)
            (made,) = executor.step([item])
            assert made is not None
            tokens.append(int(made[0]))
            sampler.accept(tokens[-1])
        executor.close_session(3)
        answers.append(tokens)
    assert answers[0] == answers[1]


def test_a_token_needs_a_way_to_choose_it(executor: DecoderExecutor) -> None:
    executor.open_session(1, 0)
    with pytest.raises(InvalidInput) as refused:
        executor.step([StepItem(1, 0, np.array([5]), "token")])
    assert refused.value.field == "sampler"


def test_logits_that_are_not_finite_are_said_of_their_session_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = load("torch")
    assert isinstance(executor, TorchDecoder)
    real = executor._model.logits

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        logits = real(hidden)
        logits[1] = torch.nan
        return logits

    monkeypatch.setattr(executor._model, "logits", spoilt)
    items = []
    for session in (1, 2, 3):
        executor.open_session(session, 0)
        sampler = sampler_of(executor, session, PROMPTS[session])
        items.append(StepItem(session, 0, np.array(PROMPTS[session]), "token", sampler))
    tokens = [int(made[0]) for made in executor.step(items) if made is not None]
    assert tokens[1] == NOT_FINITE
    assert min(tokens[0], tokens[2]) >= 0
    executor.close()


def test_a_choice_that_fails_is_its_sessions_and_a_device_that_fails_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = load("onnx")
    samplers = {s: sampler_of(executor, s, PROMPTS[s]) for s in (1, 2)}
    for session in samplers:
        executor.open_session(session, 0)
    items = [
        StepItem(s, 0, np.array(PROMPTS[s]), "token", sampler) for s, sampler in samplers.items()
    ]
    samplers[2].bias = np.zeros(3, np.float32)  # of no tokens
    samplers[2].biased = np.array([10**6])
    good, bad = (int(made[0]) for made in executor.step(items) if made is not None)
    assert good >= 0
    assert bad == NOT_CHOSEN

    def broken(*_: object) -> list[int]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(executor._chooser, "choose", broken)  # type: ignore[attr-defined]
    item = StepItem(1, len(PROMPTS[1]), np.array([5]), "token", samplers[1])
    with pytest.raises(RuntimeError, match="out of memory"):
        executor.step([item])
    executor.close()


def test_another_precision_may_be_asked_for() -> None:
    repository, key, _ = imported_llama()
    made = [
        TorchDecoder(
            repository,
            PartitionKey(key, 0, LAYERS),
            Device("cpu"),
            CacheLayout(12, 64, (0,)),
            1,
            dtype,
        )
        for dtype in ("auto", "bfloat16")
    ]
    # Angles of positions are float32 in both.
    assert [2 * size for size in made[1].sizes.block_bytes] == list(made[0].sizes.block_bytes)
    assert made[1].memory_bytes == made[1].sizes.weight_bytes(0, LAYERS)
    logits = []
    for executor in made:
        executor.open_session(1, 0)
        (row,) = executor.step([StepItem(1, 0, np.array(PROMPTS[4]), "logits")])
        assert row is not None
        logits.append(row)
    assert logits[0].dtype == logits[1].dtype == np.float32
    scale = float(np.abs(logits[0]).max())
    assert 0 < float(np.abs(logits[1] - logits[0]).max()) < 0.1 * scale
