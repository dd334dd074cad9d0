"""Latency lines of this machine's decoder, fitted on one sample and tried on another (Figs. 6-8).

The model is SmolLM2-135M in the CPU executor with one thread. Eq. 2 is fitted to prompts of some
lengths, eq. 3 to steps of some batches with some contexts, eq. 1 to the memory that caches of some
lengths take. The errors are those of other lengths, batches and contexts. Limits are what the paper
states for its own models: means below 4, 5 and 1 %, no error above 10 %.

Times are the least of a few rounds in CPU time (with one thread the wall time of an otherwise idle
core). All points take turns, so that a slow minute affects all of them. Caches are filled by
importing rows, which takes no time; their content does not affect how long attention takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from catenary_agent.decoders.base import CacheLayout, StepItem, Want
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_agent.kv.span import CacheSpan
from catenary_lab.limits import Figure, at_most
from catenary_scheduler.planning.latency import (
    CacheSample,
    DecodeSample,
    ErrorWindow,
    HopCost,
    PrefillSample,
    chain_lines,
    fit_cache,
    fit_decode,
    fit_prefill,
)
from catenary_scheduler.planning.live import GenerationCost
from catenary_services.domain.ids import PartitionKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model

MODELS = Path(".catenary/bench-generation/models")
NAME = "smollm2-135m"
SESSIONS = 8
SESSION_TOKENS = 2048
CHUNK_TOKENS = 64
PROMPT = 8
"""Id of the session that runs prompts."""

# One sample to fit, another to try; within the range of the first, as a profile is used.
PREFILL = ((4, 8, 16, 32, 64, 128, 192), (6, 12, 24, 48, 96, 160))
CHUNKED = (40, 64, 100, 160)
"""Lengths of prompts computed in chunks of 64, predicted by a line fitted to single chunks."""
DECODE = tuple(
    tuple((sessions, depth) for sessions in range(2, SESSIONS + 1) for depth in depths)
    for depths in ((16, 450), (60, 250))
)
"""Numbers of sessions, and tokens of context of each. Batches of every size are in both samples:
products of odd numbers of rows have tiles of their own, and a line through even batches is 7 % off
at the odd ones."""
CACHE = ((256, 512, 1024, 1536, 2048), (300, 413, 700, 901, 1290, 1777, 1999))

Points = Mapping[tuple[int, int], float]


class Worker:
    """The whole model in one executor."""

    def __init__(self) -> None:
        repository = ModelRepository(MODELS)
        key = ensure_model(MODELS, NAME)
        self.blocks = repository.decoder_table(key).blocks
        self.table = repository.decoder_table(key)
        layout = CacheLayout((SESSIONS + 1) * self.blocks, SESSION_TOKENS, (0,))
        self._executor = load_decoder(
            repository, PartitionKey(key, 0, self.blocks), Device.parse("cpu"), layout
        )
        random = np.random.default_rng(0)
        shape = (self.blocks, 2, SESSION_TOKENS, self.table.key_value_heads, self.table.head_size)
        self._rows = random.standard_normal(shape, np.float32)
        self._tokens = random.integers(1000, 40_000, SESSION_TOKENS)

    def prefill(self, tokens: int, chunk: int = SESSION_TOKENS) -> None:
        """Runs a prompt in a session of its own."""
        self._executor.open_session(PROMPT, 0)
        try:
            for at in range(0, tokens, chunk):
                part = self._tokens[at : min(at + chunk, tokens)]
                want: Want = "logits" if at + len(part) == tokens else "nothing"
                self._executor.step([StepItem(PROMPT, at, part, want)])
        finally:
            self._executor.close_session(PROMPT)

    def open(self, sessions: int, depth: int) -> None:
        """Opens sessions with `depth` tokens of context each."""
        span = CacheSpan(0, self.blocks, 0, depth)
        for session in range(sessions):
            self._executor.open_session(session, 0)
            self._executor.import_cache(session, span, self._rows[:, :, :depth])

    def decode(self, sessions: int, depth: int) -> None:
        """Runs a step of sessions that were opened."""
        items = [StepItem(s, depth, self._tokens[s : s + 1], "logits") for s in range(sessions)]
        self._executor.step(items)

    def close(self) -> None:
        """Closes all sessions."""
        for session in range(SESSIONS):
            self._executor.close_session(session)

    def cache_bytes(self, depth: int) -> float:
        """Returns the bytes that a session of `depth` tokens commits."""
        process = psutil.Process()
        before = process.memory_info().rss
        self.open(1, depth)
        taken = process.memory_info().rss - before
        self.close()
        return float(taken)


def run(quick: bool) -> list[Figure]:
    """Returns the errors of all three lines with the paper's limits."""
    worker = Worker()
    rounds = 2 if quick else 10
    figures = _prefill(worker, rounds)
    figures += _decode(worker, rounds)
    return figures + _cache(worker)


def _prefill(worker: Worker, rounds: int) -> list[Figure]:
    jobs: dict[tuple[int, int], Callable[[], None]] = {
        (tokens, 0): partial(worker.prefill, tokens) for tokens in (*PREFILL[0], *PREFILL[1])
    }
    jobs |= {(tokens, 1): partial(worker.prefill, tokens, CHUNK_TOKENS) for tokens in CHUNKED}
    times = _best(jobs, rounds)
    fit = fit_prefill([PrefillSample(tokens, times[tokens, 0]) for tokens in PREFILL[0]])
    figures = _errors(
        "prefill, a pass", ((times[n, 0], fit.predict((n, 1))) for n in PREFILL[1]), 4.0
    )
    single = [n for n in (*PREFILL[0], *PREFILL[1]) if n <= CHUNK_TOKENS]
    chunk = fit_prefill([PrefillSample(n, times[n, 0]) for n in single])
    cost = GenerationCost(
        round(chunk.coefficients[1]),
        round(chunk.coefficients[0]),
        0,
        0,
        prefill_floor_ns=round(chunk.floor),
        prefill_chunk_tokens=CHUNK_TOKENS,
    )
    lines = chain_lines([HopCost(cost)], hop_ns=0.0)
    chunked = ((times[n, 1], lines.prefill(n)) for n in CHUNKED)
    return figures + _errors("prompts in chunks of 64", chunked, None)


def _decode(worker: Worker, rounds: int) -> list[Figure]:
    times = dict.fromkeys((*DECODE[0], *DECODE[1]), float("inf"))
    for _ in range(rounds):
        for (sessions, depth), least in times.items():
            worker.open(sessions, depth)
            for step in range(2):
                taken = _timed(partial(worker.decode, sessions, depth + step))
                times[sessions, depth] = min(times[sessions, depth], least, taken)
            worker.close()
    fit, _ = fit_decode([DecodeSample(b, b * depth, times[b, depth]) for b, depth in DECODE[0]])
    predicted = ((times[b, depth], fit.predict((b * depth, b, 1))) for b, depth in DECODE[1])
    k2, c2, c3 = fit.coefficients
    return [
        at_most("decode, a context token (k2)", k2 / 1e3, "us"),
        at_most("decode, a session (c2)", c2 / 1e6, "ms"),
        at_most("decode, a step (c3)", c3 / 1e6, "ms"),
        *_errors("decode", predicted, 5.0),
    ]


def _cache(worker: Worker) -> list[Figure]:
    worker.cache_bytes(SESSION_TOKENS)  # the first one also commits the memory of imports
    taken = {depth: worker.cache_bytes(depth) for depth in (*CACHE[0], *CACHE[1])}
    fit = fit_cache([CacheSample(depth, taken[depth]) for depth in CACHE[0]])
    predicted = ((taken[depth], fit.predict((depth, 1))) for depth in CACHE[1])
    per_token = worker.blocks * worker.table.cache_bytes_per_token
    return [
        at_most(
            "cache, a token (h) / keys and values of a token", fit.coefficients[0] / per_token, "x"
        ),
        *_errors("cache", predicted, 1.0),
    ]


def _best(jobs: Mapping[tuple[int, int], Callable[[], None]], rounds: int) -> Points:
    """Returns the least nanoseconds of each job, while they take turns."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            best[name] = min(best[name], _timed(job))
    return best


def _timed(job: Callable[[], None]) -> float:
    started = time.thread_time_ns()
    job()
    return float(time.thread_time_ns() - started)


def _errors(
    name: str, pairs: Iterable[tuple[float, float]], limit_percent: float | None
) -> list[Figure]:
    window = ErrorWindow()
    for measured, predicted in pairs:
        window.add(measured, predicted)
    largest = None if limit_percent is None else 10.0
    return [
        at_most(f"{name}: mean error", 100 * window.mean, "%", limit_percent),
        at_most(f"{name}: largest error", 100 * window.maximum, "%", largest),
    ]
