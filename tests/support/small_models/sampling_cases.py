"""Random sessions and logits for tests of sampling, and a sampler that does it token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from catenary_agent.decoders.sampling.sampling import NOT_FINITE, NOTHING_ALLOWED, SessionSampler
from catenary_services.domain.sampling import SamplingParameters

ENDS = (2, 11)
_WORD = (1 << 64) - 1


def random_sampler(rng: np.random.Generator, vocabulary: int) -> SessionSampler:
    """Returns a session with any parameters, often none, and some history."""

    def sometimes(values: Sequence[float], share: float = 0.4) -> float | None:
        return float(rng.choice(values)) if rng.random() < share else None

    drawn: dict[str, object] = {
        "temperature": sometimes([0.3, 0.7, 0.9, 1.0, 1.3, 2.0], 0.8),
        "top_p": sometimes([0.01, 0.5, 0.9, 0.95, 0.999]),
        "top_k": sometimes([1, 2, 5, 40, 400, 10_000]),
        "min_p": sometimes([1e-4, 0.02, 0.1, 0.5, 1.0], 0.3),
        "repetition_penalty": sometimes([0.7, 1.1, 1.8], 0.3),
        "presence_penalty": sometimes([-1.0, 0.5, 2.0], 0.2),
        "frequency_penalty": sometimes([-0.5, 0.25, 1.5], 0.2),
        "min_tokens": sometimes([3, 50], 0.2),
    }
    values = {name: value for name, value in drawn.items() if value is not None}
    for name in {"top_k", "min_tokens"} & values.keys():
        values[name] = int(values[name])  # type: ignore[call-overload]
    if rng.random() < 0.2:
        tokens = rng.choice(vocabulary, int(rng.integers(1, min(30, vocabulary))), replace=False)
        biases = rng.choice([-100.0, -1.5, 0.25, 3.0], len(tokens))
        values["logit_bias"] = tuple(zip(tokens.tolist(), biases.tolist(), strict=True))
    if rng.random() < 0.15:
        listed = rng.choice(vocabulary, int(rng.integers(1, vocabulary)), replace=True)
        values["allowed_token_ids"] = tuple(listed[:1000].tolist())
    if rng.random() < 0.15:
        values["bad_token_ids"] = tuple(
            tuple(rng.integers(0, vocabulary, int(rng.integers(1, 3))).tolist()) for _ in range(5)
        )
    if rng.random() < 0.2:
        values["stop_token_ids"] = tuple(rng.integers(0, vocabulary, 3).tolist())
    history = rng.integers(0, vocabulary, int(rng.integers(1, 60))).tolist()
    seed = int(rng.integers(0, _WORD, dtype=np.uint64))
    parameters = SamplingParameters(seed=seed, **values)  # type: ignore[arg-type]
    made = SessionSampler(parameters, history, int(rng.integers(1, len(history) + 1)), ENDS)
    if rng.random() < 0.1:
        made.allowed = rng.random(vocabulary) < rng.choice([0.01, 0.5, 0.99])
    return made


def random_logits(rng: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Returns float32 [rows, vocabulary] as models make them: peaked, flat, or with equal values."""
    logits = rng.standard_normal((rows, vocabulary)) * rng.choice([0.1, 1.0, 2.5], (rows, 1))
    for row in logits:
        likely = rng.choice(vocabulary, min(40, vocabulary), replace=False)
        row[likely] += rng.exponential(rng.choice([0.1, 3.0, 6.0]), len(likely))
        kind = rng.random()
        if kind < 0.2:
            row[:] = np.round(row * 8) / 8  # bfloat16 leaves that few values
        elif kind < 0.25:
            row[rng.random(vocabulary) < 0.3] = -np.inf
        elif kind < 0.27:
            row[rng.integers(vocabulary)] = rng.choice([np.nan, np.inf])
    return logits.astype(np.float32)


def chosen_one_by_one(logits: np.ndarray, sampler: SessionSampler) -> int:
    """Returns the token by the definition: every token's key, in Python's numbers."""
    p, count = sampler.parameters, np.float32
    row = [count(value) for value in logits]
    if any(math.isnan(x) for x in row) or not math.isfinite(max(row)):
        return NOT_FINITE
    for token, bias in p.logit_bias:
        row[token] += count(bias)
    said = sampler.said
    for token in said.ids.tolist() if said is not None else ():
        times = count(said.answer.count(token))
        x = row[token]
        x = x * count(p.repetition_penalty) if x < 0 else x / count(p.repetition_penalty)
        if times:
            x -= count(p.frequency_penalty) * times + count(p.presence_penalty)
        row[token] = x
    banned = sampler.banned
    for token, x in enumerate(row):
        may_be = not p.allowed_token_ids or token in p.allowed_token_ids
        may_be &= sampler.allowed is None or bool(sampler.allowed[token])
        if token in banned or not may_be:
            row[token] = x * 0 - count(math.inf) if math.isfinite(x) else count(-math.inf)
    highest = max(row)
    if not math.isfinite(highest):
        return NOTHING_ALLOWED
    if p.greedy:
        return row.index(highest)
    scaled = [(x - highest) / count(p.temperature) for x in row]
    order = sorted(range(len(row)), key=lambda token: -scaled[token])
    kept = [x for x in scaled if x > -math.inf]
    if 0 < p.top_k < len(row):
        kept = [x for x in kept if x >= scaled[order[p.top_k - 1]]]
    if p.top_p < 1:
        bound, passed = 0.0, 0.0
        whole = math.fsum(math.exp(x) for x in kept)
        for x in sorted(kept, reverse=True):
            if passed >= p.top_p * whole:
                break
            bound, passed = float(x), passed + math.exp(x)
        kept = [x for x in kept if x >= bound]
    if p.min_p:
        kept = [x for x in kept if x >= count(math.log(p.min_p))]
    least = min(kept)
    keys = {
        token: float(x) + noise(p.seed or 0, sampler.position, token)
        for token, x in enumerate(scaled)
        if x >= least and x > -math.inf
    }
    return max(keys, key=lambda token: (keys[token], -token))


def noise(seed: int, position: int, token: int) -> float:
    """Returns the Gumbel noise of one token: SplitMix64 of SplitMix64, 31 bits of one half."""

    def mixed(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
        return z ^ z >> 31

    step = 0x9E3779B97F4A7C15
    stream = mixed(mixed(seed + step & _WORD) + position * step & _WORD)
    both = mixed(stream + (token // 2 + 1) * step & _WORD)
    bits = both >> 32 * (token % 2) & 0x7FFFFFFF
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))
