"""Log probabilities: those of `transformers`, in both libraries, of answers and of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnxruntime_genai")

import torch

from catenary_agent.decoders.base import CacheLayout, DecoderExecutor, StepItem, StepScores
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.decoders.sampling.choosing import TokenSampler
from catenary_agent.decoders.sampling.kernel_sampler import torch_chooser
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.sampling import BadWords, SessionSampler
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.logprobs import LOWEST_LOGPROB, TokenLogprobs
from catenary_services.domain.sampling import SamplingParameters
from tiny_language_models import LAYERS, PROMPTS, imported_llama

MOST = 20
NUMBERS = st.floats(-50, 50, width=32) | st.just(float("-inf")) | st.sampled_from([0.0, 1.5])


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[int], int]:
    """Logits with at least one finite value a row, some of the rows with tokens, and a top."""
    rows, vocabulary = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    logits = draw(arrays.arrays(np.float32, (rows, vocabulary), elements=NUMBERS))
    logits[:, draw(st.integers(0, vocabulary - 1))] = 1.0
    chosen = sorted(draw(st.sets(st.integers(0, rows - 1), min_size=1)))
    tokens = [draw(st.integers(0, vocabulary - 1)) for _ in chosen]
    return logits, chosen, tokens, draw(st.integers(0, MOST))


def in_torch(logits: np.ndarray) -> tuple[TokenSampler, torch.Tensor]:
    return torch_chooser(torch.device("cpu"), logits.shape[1]), torch.from_numpy(logits)


@given(cases())
@example((np.array([[1.3543763e-11, 1.0, 0.0]], np.float32), [0], [2], 0))
@settings(max_examples=300, deadline=None)
def test_both_libraries_compute_the_log_softmax(
    case: tuple[np.ndarray, list[int], list[int], int],
) -> None:
    logits, rows, tokens, top = case
    before = logits.copy()
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 1).numpy()
    expected = np.maximum(expected, LOWEST_LOGPROB)
    for chooser, given_logits in ((numpy_chooser(logits.shape[1]), logits), in_torch(logits)):
        scored = chooser.score(given_logits, rows, tokens, top)
        for row, token, one in zip(rows, tokens, scored, strict=True):
            agrees(one, logits[row], expected[row], token, top)
    np.testing.assert_array_equal(logits, before)


def agrees(
    one: TokenLogprobs, logits: np.ndarray, expected: np.ndarray, token: int, top: int
) -> None:
    """Compares one token's log probabilities with its whole row: its logits, and what is expected.

    Log probabilities round off small differences of logits, by which tokens are ranked.
    """
    assert one.token_id == token
    assert one.logprob == pytest.approx(expected[token], abs=1e-4)
    assert one.rank == 1 + np.count_nonzero(logits > logits[token])
    assert len(one.top) == min(top, len(expected))
    named = [expected[each] for each, _ in one.top]
    assert [value for _, value in one.top] == pytest.approx(named, abs=1e-4)
    assert named == pytest.approx(sorted(expected, reverse=True)[: len(named)])
    assert len({each for each, _ in one.top}) == len(named)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=12),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_bad_words_ban_what_would_complete_one(
    sequences: list[list[int]], answer: list[int], data: st.DataObject
) -> None:
    known = data.draw(st.integers(0, len(answer)))
    words = BadWords(sequences, answer[:known])
    for token in answer[known:]:
        words.add(token)
    expected = {
        last
        for *first, last in sequences
        if len(answer) >= len(first) and answer[len(answer) - len(first) :] == first
    }
    assert words.banned.tolist() == sorted(expected)


def sampler_of(ends: Sequence[int] = (2,), **values: object) -> SessionSampler:
    return SessionSampler(SamplingParameters(**values), [5, 6], 2, ends)  # type: ignore[arg-type]


def test_stop_tokens_end_an_answer_also_where_ends_do_not() -> None:
    for values in ({}, {"ignore_eos": True}):
        sampler = sampler_of(stop_token_ids=(7,), **values)
        assert sampler.accept(2) == ("" if values else "stop")
        assert sampler.accept(7) == "stop"


def test_no_stop_token_is_chosen_too_early() -> None:
    logits = np.zeros((1, 10), np.float32)
    logits[0, [7, 2, 4]] = 9, 8, 7
    sampler = sampler_of(stop_token_ids=(7,), min_tokens=1)
    assert numpy_chooser(10).choose(logits, [(1, sampler)], [0]) == [4]
    sampler.accept(4)
    assert numpy_chooser(10).choose(logits, [(1, sampler)], [0]) == [7]


def test_a_mask_and_listed_tokens_hold_together() -> None:
    logits = np.arange(10, dtype=np.float32)[None]
    sampler = sampler_of(allowed_token_ids=(3, 8, 9), bad_token_ids=((9,),))
    for chooser, given_logits in ((numpy_chooser(10), logits), in_torch(logits)):
        sampler.allowed = None
        assert chooser.choose(given_logits, [(1, sampler)], [0]) == [8]
        sampler.allowed = np.arange(10) < 5
        assert chooser.choose(given_logits, [(1, sampler)], [0]) == [3]


@pytest.fixture(params=["onnx", "torch"])
def executor(request: pytest.FixtureRequest) -> Iterator[DecoderExecutor]:
    repository, key, _ = imported_llama()
    layout = CacheLayout(20 * LAYERS, 96, (0,))
    made = load_decoder(
        repository, PartitionKey(key, 0, LAYERS), Device("cpu"), layout, library=request.param
    )
    yield made
    made.close()


def test_steps_score_prompts_and_tokens_as_transformers_does(executor: DecoderExecutor) -> None:
    """Prompts in chunks, several sessions a step; one asks for nothing."""
    _, _, whole = imported_llama()
    # What changes the choice of a token changes none of its log probabilities.
    ways: dict[str, object] = {"temperature": 1.2, "presence_penalty": 1.5, "seed": 3}
    known = {session: list(prompt) for session, prompt in PROMPTS.items()}
    samplers = {}
    for session, prompt in PROMPTS.items():
        parameters = SamplingParameters(**ways)  # type: ignore[arg-type]
        samplers[session] = SessionSampler(parameters, prompt, len(prompt), ())
        executor.open_session(session, 0)
    prompts: dict[int, list[TokenLogprobs]] = {session: [] for session in PROMPTS}
    tokens: dict[int, list[TokenLogprobs]] = {session: [] for session in PROMPTS}
    cached = dict.fromkeys(PROMPTS, 0)
    for _ in range(12):
        items = []
        for session, prompt in PROMPTS.items():
            at = cached[session]
            new = known[session][at : at + 3]
            is_end = at + len(new) == len(known[session])
            scores = None
            if session > 1:
                following = prompt[at + 1 : at + 1 + len(new)]
                scores = StepScores(following, 2, session if is_end else None)
            want = "token" if is_end else "nothing"
            inputs = np.array(new, np.int64)
            items.append(StepItem(session, at, inputs, want, samplers[session], scores))
        for item, result in zip(items, executor.step(items), strict=True):
            cached[item.session] += len(item.inputs)
            if item.scores is not None:
                prompts[item.session] += item.scores.prompt
            if item.want != "token":
                continue
            assert result is not None
            known[item.session].append(int(result[0]))
            samplers[item.session].accept(int(result[0]))
            if item.scores is not None:
                assert item.scores.token is not None
                tokens[item.session].append(item.scores.token)
    for session, prompt in PROMPTS.items():
        with torch.inference_mode():
            logits = whole(torch.tensor([known[session]]), use_cache=False).logits[0]
        expected = torch.log_softmax(logits.double(), 1).numpy()
        got = [*prompts[session], *tokens[session]]
        assert len(got) == (len(known[session]) - 1 if session > 1 else 0)
        for at, one in enumerate(got, 1):
            top = 2 if at < len(prompt) else session
            agrees(one, expected[at - 1], expected[at - 1], known[session][at], top)
