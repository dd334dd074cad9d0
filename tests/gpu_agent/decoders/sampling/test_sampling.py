"""Choosing tokens: against `transformers`, against the definition, and its own promises."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest

from catenary_agent.decoders.sampling.gumbel import (
    counters,
    exact_noise,
    random_bits,
    random_bits_of,
    stream_of,
)
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.sampling import NOT_FINITE, NOTHING_ALLOWED, SessionSampler
from catenary_services.domain.sampling import SamplingParameters
from small_models.sampling_cases import chosen_one_by_one, noise, random_logits, random_sampler

VOCABULARY = 49_152
Choose = Callable[[np.ndarray, list[SessionSampler]], list[int]]


def in_numpy(logits: np.ndarray, samplers: list[SessionSampler]) -> list[int]:
    return numpy_chooser(logits.shape[1]).choose(
        logits, list(enumerate(samplers)), range(len(samplers))
    )


def in_torch(logits: np.ndarray, samplers: list[SessionSampler]) -> list[int]:
    torch = pytest.importorskip("torch")
    from catenary_agent.decoders.sampling.kernel_sampler import torch_chooser

    torch.set_num_threads(1)  # two on cores that others use are slower than one
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chooser = torch_chooser(device, logits.shape[1])
    rows = torch.from_numpy(logits).to(device)
    return chooser.choose(rows, list(enumerate(samplers)), range(len(samplers)))


@pytest.fixture(params=[in_numpy, in_torch])
def choose(request: pytest.FixtureRequest) -> Choose:
    return request.param


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
) -> SessionSampler:
    return SessionSampler(SamplingParameters(**values), token_ids, prompt, (2,))  # type: ignore[arg-type]


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
    if values.get("min_p"):
        processors.append(transformers.MinPLogitsWarper(float(values["min_p"])))
    ids = torch.tensor([[0]])
    for processor in processors:
        scores = processor(ids, scores)
    return torch.softmax(scores.double(), -1)[0].numpy()


def left(logits: np.ndarray, few: bool, **values: object) -> np.ndarray:
    """Returns the probabilities that our filters leave, zero for what they do not."""
    chooser, sampler = numpy_chooser(len(logits)), sampler_of(**values)
    scaled = logits[None].copy()
    chooser._scale(scaled, scaled.max(1, keepdims=True), [sampler])
    found = chooser._arrays.likeliest(scaled, min(len(logits), sampler.parameters.top_k + 64))
    ordered = found.ordered if few else chooser._arrays.descending(scaled)
    bound, is_sure = chooser._bound(scaled, ordered, found.floor if few else -np.inf, [sampler])
    if few and not is_sure.all():
        return left(logits, False, **values)
    weights = np.exp(scaled[0], dtype=np.float64) * (scaled[0] >= bound[0])
    return weights / weights.sum()


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
        {"temperature": 1.2, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.97, "min_p": 0.02},
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
        for few in (True, False):
            ours = left(logits, few, **values)
            # float32 sums differ a little: a token on the edge may fall on either side.
            assert np.count_nonzero((ours > 0) != (expected > 0)) <= 1
            np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=1e-5)


def test_equal_logits_at_the_end_of_a_filter_all_stay() -> None:
    logits = np.zeros(2000, np.float32)
    logits[[5, 9, 11]] = (4, 3, 3)
    for few in (True, False):
        for values in ({"top_k": 2}, {"top_p": 0.03}, {"top_k": 2, "top_p": 0.9}):
            kept = np.flatnonzero(left(logits, few, temperature=1.0, **values))
            assert kept.tolist() == [5, 9, 11]


def test_penalties_are_those_of_transformers(choose: Choose) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = logits_of(4)[0]
    history = (7, 7, 9, int(logits.argmax()), 12)
    ids = torch.tensor([history])
    scores = torch.tensor(logits)[None]
    bias = {(5,): 4.0, (9,): -2.0}
    scores = transformers.SequenceBiasLogitsProcessor(bias)(ids, scores)
    scores = transformers.RepetitionPenaltyLogitsProcessor(1.8)(ids, scores)
    scores = transformers.MinNewTokensLengthLogitsProcessor(2, 6, torch.tensor([2, 40]))(
        ids, scores
    )
    parameters = SamplingParameters(
        repetition_penalty=1.8, min_tokens=6, logit_bias=((5, 4.0), (9, -2.0))
    )
    sampler = SessionSampler(parameters, history, 2, (2, 40))
    edited = logits[None].copy()
    numpy_chooser(VOCABULARY)._edit(edited, [(1, sampler)])
    np.testing.assert_array_equal(edited[0], scores[0].numpy())
    assert choose(logits[None], [sampler]) == [int(scores.argmax())]


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = np.full((1, 100), 1.0, np.float32)
    sampler = sampler_of((5, 6, 6, 7, 6), prompt=2, presence_penalty=0.5, frequency_penalty=0.25)
    sampler.accept(7)
    numpy_chooser(100)._edit(logits, [(1, sampler)])
    assert logits[0, [5, 6, 7, 8]].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_the_definition_token_by_token_gives_the_same() -> None:
    rng = np.random.default_rng(31)
    for vocabulary in (16, 300, 1000):
        logits = random_logits(rng, 60, vocabulary)
        samplers = [random_sampler(rng, vocabulary) for _ in logits]
        before = logits.copy()
        chosen = in_numpy(logits, samplers)
        expected = [chosen_one_by_one(*each) for each in zip(logits, samplers, strict=True)]
        assert chosen == expected
        np.testing.assert_array_equal(logits, before)
        assert len(set(expected)) > 12


def test_numpy_and_torch_choose_the_same_in_two_thousand_cases() -> None:
    rng, cases = np.random.default_rng(32), 0
    while cases < 2000:
        vocabulary = int(rng.choice([16, 999, 4096, 50_257]))
        rows = int(rng.integers(1, 80 if vocabulary < 9999 else 12))
        logits = random_logits(rng, rows, vocabulary)
        samplers = [random_sampler(rng, vocabulary) for _ in logits]
        assert in_numpy(logits, samplers) == in_torch(logits, samplers)
        cases += rows


def test_a_row_does_not_depend_on_the_other_rows(choose: Choose) -> None:
    rng = np.random.default_rng(33)
    for vocabulary in (700, 40_000):
        logits = random_logits(rng, 24, vocabulary)
        samplers = [random_sampler(rng, vocabulary) for _ in logits]
        together = choose(logits, samplers)
        order = rng.permutation(24)
        assert choose(logits[order], [samplers[i] for i in order]) == [together[i] for i in order]
        alone = [choose(logits[i : i + 1], [samplers[i]])[0] for i in range(24)]
        assert alone == together


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"frequency_penalty": 1.0}])
def test_a_session_that_moves_goes_on_identically(
    choose: Choose, filters: dict[str, float]
) -> None:
    steps = logits_of(21, 30)
    values = {"temperature": 1.2, "seed": 77, **filters}
    whole = sampler_of((1, 2, 3), **values)
    tokens = go_on(choose, steps, whole)
    for cut in (1, 17):
        moved = sampler_of((1, 2, 3, *tokens[:cut]), **values)
        assert go_on(choose, steps[cut:], moved) == tokens[cut:]
    other = sampler_of((1, 2, 3), **{**values, "seed": 78})
    assert go_on(choose, steps, other) != tokens


def go_on(choose: Choose, steps: np.ndarray, sampler: SessionSampler) -> list[int]:
    tokens = []
    for step in steps:
        tokens += choose(step[None], [sampler])
        sampler.accept(tokens[-1])
    return tokens


def test_counts_kept_on_a_device_follow_their_sessions() -> None:
    torch = pytest.importorskip("torch")
    from catenary_agent.decoders.sampling.kernel_sampler import torch_chooser

    chooser = torch_chooser(torch.device("cpu"), 200)
    rng = np.random.default_rng(34)

    def session(number: int) -> SessionSampler:
        history = tuple(rng.integers(0, 200, 20).tolist())
        return sampler_of(
            history,
            12,
            temperature=1.0,
            seed=number,
            repetition_penalty=1.4,
            presence_penalty=0.5,
            frequency_penalty=1.5,
        )

    open_sessions = {number: session(number) for number in range(3)}
    for number in range(3, 40):
        logits = logits_of(number, len(open_sessions), 200)
        asked = list(open_sessions.items())
        chosen = chooser.choose(torch.from_numpy(logits), asked, range(len(asked)))
        assert chosen == in_numpy(logits, list(open_sessions.values()))
        for token, sampler in zip(chosen, open_sessions.values(), strict=True):
            sampler.accept(token)
        if number % 2:  # some end, and their numbers may come back
            gone = int(rng.choice(list(open_sessions)))
            chooser.forget(gone)
            del open_sessions[gone]
            open_sessions[gone if number % 3 else number] = session(number)
        if number % 5 == 0:
            open_sessions[number] = session(number)
    assert len(chooser._arrays._counts._pages) <= 2


def test_counts_that_could_not_be_made_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from catenary_agent.decoders.sampling.kernel_sampler import torch_chooser

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    chooser = torch_chooser(torch.device("cpu"), 200)
    samplers = [
        sampler_of((1, 7, 7, 9), 2, repetition_penalty=1.4, frequency_penalty=1.5) for _ in range(3)
    ]
    asked = list(enumerate(samplers))
    for number in range(6):
        logits = logits_of(number, 3, 200)
        if number in (0, 3):
            with monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "index_put_", fails)
                with pytest.raises(torch.OutOfMemoryError):
                    chooser.choose(torch.from_numpy(logits), asked, range(len(asked)))
        chosen = chooser.choose(torch.from_numpy(logits), asked, range(len(asked)))
        assert chosen == in_numpy(logits, samplers)
        for token, sampler in zip(chosen, samplers, strict=True):
            sampler.accept(token)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.03},
    ],
)
@pytest.mark.parametrize("draws", ["seeds", "positions"])
def test_tokens_are_drawn_as_often_as_they_are_likely(values: dict[str, float], draws: str) -> None:
    logits = np.full(600, -6.0, np.float32)
    logits[[3, 70, 71, 599, 400, 401, 402, 403]] = (2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5)
    expected = reference_probabilities(logits, values)
    count, rows = 20_000, 2000
    drawn = np.zeros(len(logits), np.int64)
    for start in range(0, count, rows):
        samplers = []
        for number in range(start, start + rows):
            sampler = sampler_of((0,), 1, seed=number if draws == "seeds" else 5, **values)
            sampler.position += number if draws == "positions" else 0
            samplers.append(sampler)
        batch = np.broadcast_to(logits, (rows, len(logits)))
        drawn += np.bincount(in_numpy(batch, samplers), minlength=len(logits))
    assert drawn[expected == 0].sum() == 0
    # Pearson's statistic, unlikely tokens taken together so that none is expected too rarely.
    rare = expected * count < 20
    observed = np.append(drawn[~rare], drawn[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * count
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    # The 99.9th percentile, by Wilson and Hilferty; seeds are fixed, so this holds or does not.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_noise_is_that_of_the_definition_and_the_same_for_few_tokens_as_for_all() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 7), (123_456_789, 131_071)]
    streams = np.array([stream_of(*key) for key in keys])
    bits = random_bits(np, streams, counters(np, 999))
    ids = np.tile(np.arange(998, -1, -3), (len(keys), 1))
    np.testing.assert_array_equal(np.take_along_axis(bits, ids, 1), random_bits_of(streams, ids))
    expected = [[noise(*key, token) for token in range(999)] for key in keys]
    made = exact_noise(np, bits[:, :999])
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-13)
    # Mean and variance of a Gumbel distribution, within five times their error.
    assert abs(made.mean() - 0.5772) < 5 * 1.28 / math.sqrt(made.size)
    assert abs(made.var() - math.pi**2 / 6) < 5 * 3.3 / math.sqrt(made.size)


def test_noise_of_the_outermost_bits_is_finite_and_equal_everywhere() -> None:
    torch = pytest.importorskip("torch")
    bits = np.array([0, 1, 2**30, 2**31 - 2, 2**31 - 1], np.int32)
    made = exact_noise(np, bits)
    assert made.tolist() == exact_noise(torch, torch.from_numpy(bits)).tolist()
    np.testing.assert_allclose(made[[0, -1]], [22.180_709_78, -3.099_222_98], atol=1e-8)


def test_only_allowed_tokens_are_chosen(choose: Choose) -> None:
    logits = logits_of(5, 4, 500)
    samplers = [sampler_of(temperature=t, seed=1) for t in (0.0, 1.0, 1.0, 1.0)]
    allowed = np.zeros(500, bool)
    allowed[[17, 44, 300]] = True
    for sampler in samplers[:3]:
        sampler.allowed = allowed
    samplers[2].allowed = np.zeros(500, bool)
    chosen = choose(logits, samplers)
    assert chosen[0] == max((17, 44, 300), key=lambda token: logits[0, token])
    assert chosen[1] in (17, 44, 300)
    assert chosen[2] == NOTHING_ALLOWED
    assert chosen[3] >= 0


def test_the_answer_ends_at_an_end_token_or_at_its_length(choose: Choose) -> None:
    end = np.zeros((1, 50), np.float32)
    end[0, 2], end[0, 9] = 5.0, 4.0

    def next_of(sampler: SessionSampler) -> tuple[int, str]:
        (token,) = choose(end, [sampler])
        return token, sampler.accept(token)

    assert next_of(sampler_of(max_tokens=3)) == (2, "stop")
    ignoring = sampler_of(max_tokens=2, ignore_eos=True)
    assert next_of(ignoring) == (2, "")
    assert next_of(ignoring) == (2, "length")
    late = sampler_of(max_tokens=5, min_tokens=2)
    assert [next_of(late) for _ in range(3)] == [(9, ""), (9, ""), (2, "stop")]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_logits_that_are_not_finite_fail_their_row_only(
    choose: Choose, value: float, values: dict[str, float]
) -> None:
    logits = logits_of(1, 3)
    logits[0] = value
    logits[1, 77] = value if value > 0 or math.isnan(value) else 0.0
    samplers = [sampler_of(**values), sampler_of(**values), sampler_of()]
    chosen = choose(logits, samplers)
    assert chosen[0] == NOT_FINITE
    assert (chosen[1] == NOT_FINITE) == (value != -np.inf)
    assert chosen[2] == int(logits[2].argmax())


def test_choosing_for_eight_sessions_costs_a_few_passes_over_their_logits() -> None:
    logits = logits_of(2, 8)
    kinds: dict[str, tuple[float, dict[str, float]]] = {
        "greedy": (1, {}),
        "top_k": (6, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
        "top_p": (6, {"temperature": 0.8, "top_p": 0.95}),
    }
    chooser = numpy_chooser(VOCABULARY)
    for name, (most_passes, values) in kinds.items():
        samplers = [sampler_of(max_tokens=10**6, **values) for _ in range(8)]
        entries = list(enumerate(samplers))
        passes, choices = [], []
        for _ in range(40):  # in turns, so that both see the same machine
            passes.append(_cpu_ns(_softmax, logits))
            choices.append(_cpu_ns(chooser.choose, logits, entries, range(len(entries))))
        assert min(choices) < most_passes * min(passes), (name, min(choices), min(passes))


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _cpu_ns(work: Callable[..., object], *arguments: object) -> int:
    before = time.process_time_ns()
    work(*arguments)
    return time.process_time_ns() - before
