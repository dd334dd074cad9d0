"""The sampler against the logits processors of `transformers`, and its own promises."""

import time

import numpy as np
import pytest

from gpu_agent.decoders.sampling import Choice, Sampler, choose
from gpu_agent.decoders.token_filters import filtered
from services.domain.sampling import SamplingParameters

VOCABULARY = 49_152


def logits_of(seed: int, rows: int = 1, vocabulary: int = VOCABULARY) -> np.ndarray:
    """Logits of many different values, with a few likely tokens as a language model has them."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocabulary)) * 2.5
    for row in logits:
        likely = rng.choice(vocabulary, 40, replace=False)
        row[likely] += rng.exponential(6.0, 40)
    return logits.astype(np.float32)


def sampler_of(
    token_ids: tuple[int, ...] = (1, 2, 3), prompt: int = 3, **values: object
) -> Sampler:
    return Sampler(SamplingParameters(**values), token_ids, prompt, (2,))  # type: ignore[arg-type]


def reference_probabilities(logits: np.ndarray, values: dict[str, float]) -> np.ndarray:
    """What `transformers` makes of the logits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    scores = torch.tensor(logits)[None]
    processors = []
    if "temperature" in values:
        processors.append(transformers.TemperatureLogitsWarper(float(values["temperature"])))
    if values.get("top_k"):
        processors.append(transformers.TopKLogitsWarper(int(values["top_k"])))
    if values.get("top_p", 1) < 1:
        processors.append(transformers.TopPLogitsWarper(float(values["top_p"])))
    ids = torch.tensor([[0]])
    for processor in processors:
        scores = processor(ids, scores)
    return torch.softmax(scores.double(), -1)[0].numpy()


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 1000, 50_257])
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.8},
        {"temperature": 0.7, "top_k": 50},
        {"temperature": 1.3, "top_k": 400},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 0.999},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 0.3, "top_p": 0.01},
        {"temperature": 1.0, "top_k": 100_000, "top_p": 0.5},
    ],
)
def test_filters_leave_what_those_of_transformers_leave(
    values: dict[str, float], vocabulary: int
) -> None:
    for seed in range(3):
        logits = logits_of(seed, 1, vocabulary)[0]
        bounded = dict(values)
        bounded["top_k"] = min(int(values.get("top_k", 0)), vocabulary)
        expected = reference_probabilities(logits, bounded)
        ids, weights = filtered(logits, SamplingParameters(**values))  # type: ignore[arg-type]
        ours = np.zeros(vocabulary)
        ours[ids] = weights / weights.sum(dtype=np.float64)
        # float32 sums differ a little: a token on the edge of the nucleus may fall on either side.
        assert np.count_nonzero((ours > 0) != (expected > 0)) <= 1
        np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=1e-5)


def test_equal_logits_at_the_end_of_top_k_all_stay() -> None:
    logits = np.zeros(2000, np.float32)
    logits[[5, 9, 11]] = (4, 3, 3)
    ids, _ = filtered(logits, SamplingParameters(temperature=1.0, top_k=2))
    assert ids.tolist() == [5, 9, 11]


def test_penalties_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = logits_of(4)[0]
    history = (7, 7, 9, int(logits.argmax()), 12)
    ids = torch.tensor([history])
    scores = transformers.RepetitionPenaltyLogitsProcessor(1.8)(ids, torch.tensor(logits)[None])
    scores = transformers.MinNewTokensLengthLogitsProcessor(2, 6, torch.tensor([2, 40]))(
        ids, scores
    )
    parameters = SamplingParameters(repetition_penalty=1.8, min_tokens=6)
    sampler = Sampler(parameters, history, 2, (2, 40))
    np.testing.assert_array_equal(sampler._adjusted(logits), scores[0].numpy())
    assert sampler.choose(logits) == int(scores.argmax())


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = np.full(100, 1.0, np.float32)
    sampler = sampler_of((5, 6, 6, 7, 6), prompt=2, presence_penalty=0.5, frequency_penalty=0.25)
    sampler.accept(7)
    adjusted = sampler._adjusted(logits)
    assert adjusted[[5, 6, 7, 8]].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert logits.min() == 1.0


def test_a_batch_chooses_what_each_session_chooses_alone() -> None:
    logits = logits_of(11, 6)
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.9, "top_k": 30, "seed": 5},
        {"temperature": 1.1, "top_p": 0.9, "seed": 5},
        {"repetition_penalty": 1.5},
        {"temperature": 0.0, "min_tokens": 9},
    ]
    together = choose(logits, [sampler_of(**kind) for kind in kinds])
    alone = [choose(logits[i : i + 1], [sampler_of(**kind)])[0] for i, kind in enumerate(kinds)]
    assert together == alone
    assert together[0].token_id == int(logits[0].argmax())


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"frequency_penalty": 1.0}])
def test_a_session_that_moves_goes_on_identically(filters: dict[str, float]) -> None:
    steps = logits_of(21, 30)
    values = {"temperature": 1.2, "seed": 77, **filters}
    whole = sampler_of((1, 2, 3), **values)
    tokens = [choose(step[None], [whole])[0].token_id for step in steps]
    for cut in (1, 17):
        moved = sampler_of((1, 2, 3, *tokens[:cut]), **values)
        rest = [choose(step[None], [moved])[0].token_id for step in steps[cut:]]
        assert rest == tokens[cut:]
    other = sampler_of((1, 2, 3), **{**values, "seed": 78})
    assert [choose(step[None], [other])[0].token_id for step in steps] != tokens


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}])
def test_tokens_are_drawn_as_often_as_they_are_likely(filters: dict[str, float]) -> None:
    logits = np.full(8192, -20.0, np.float32)
    logits[[3, 70, 4000, 8191, 8000]] = (2.0, 1.5, 1.0, 0.5, 0.0)
    expected = reference_probabilities(logits, {"temperature": 1.0, **filters})
    draws = 4000
    drawn = np.zeros(len(logits))
    sampler = sampler_of((0,), 1, temperature=1.0, seed=3, max_tokens=draws, **filters)
    for _ in range(draws):
        drawn[choose(logits[None], [sampler])[0].token_id] += 1
    likely = expected > 1e-3
    assert drawn[~likely].sum() <= 5
    spread = 5 * np.sqrt(expected[likely] * (1 - expected[likely]) / draws)
    assert (np.abs(drawn[likely] / draws - expected[likely]) <= spread).all()


def test_the_answer_ends_at_an_end_token_or_at_its_length() -> None:
    end = np.zeros((1, 50), np.float32)
    end[0, 2], end[0, 9] = 5.0, 4.0
    assert choose(end, [sampler_of(max_tokens=3)]) == [Choice(2, "stop")]
    ignoring = sampler_of(max_tokens=2, ignore_eos=True)
    assert choose(end, [ignoring]) == [Choice(2, "")]
    assert choose(end, [ignoring]) == [Choice(2, "length")]
    late = sampler_of(max_tokens=5, min_tokens=2)
    assert [choose(end, [late])[0] for _ in range(3)] == [(9, "", ""), (9, "", ""), (2, "stop", "")]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail_their_row_only(value: float) -> None:
    logits = logits_of(1, 2)
    logits[0] = value
    failed, good = choose(logits, [sampler_of(), sampler_of()])
    assert (failed.token_id, good.error) == (-1, "")
    assert "not finite" in failed.error
    assert good.token_id == int(logits[1].argmax())


def test_choosing_for_eight_sessions_costs_little() -> None:
    logits = logits_of(2, 8)
    limits_ms = {"greedy": 0.8, "top_k": 3.0, "top_p": 3.0}
    kinds: dict[str, dict[str, float]] = {
        "greedy": {},
        "top_k": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        "top_p": {"temperature": 0.8, "top_p": 0.95},
    }
    for name, values in kinds.items():
        samplers = [sampler_of(max_tokens=10**6, **values) for _ in range(8)]
        best_ns = min(_timed_ns(logits, samplers) for _ in range(40))
        assert best_ns < limits_ms[name] * 1e6, f"{name}: {best_ns / 1e6:.2f} ms"


def _timed_ns(logits: np.ndarray, samplers: list[Sampler]) -> int:
    before = time.process_time_ns()
    choose(logits, samplers)
    return time.process_time_ns() - before
