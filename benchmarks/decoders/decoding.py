"""Cost of one decoding step in the CPU executor alone, compared with the floor that memory sets.

There are no processes and no network: a chain of executors in one thread, SmolLM2-135M, 64 tokens
of context. A step reads every weight once, so it cannot be faster than reading as many bytes. That
is the floor, measured in the same run. Everything takes turns for a few rounds and the best of each
counts, in milliseconds of CPU time: with one thread that is the wall time of an otherwise idle
core.

A cut costs 0.07 ms of book-keeping. Three parts are up to a tenth faster or slower than one because
of where the allocator happens to put the weights, anew with each load.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from catenary_agent.decoders.base import CacheLayout, DecoderExecutor, StepItem, Want
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_lab.limits import Figure, at_least, at_most
from catenary_services.domain.ids import PartitionKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model

MODELS = Path(".catenary/bench-generation/models")
NAMES = {"fp32": "smollm2-135m", "int8": "smollm2-135m-int8", "int4": "smollm2-135m-int4"}
THIRDS = (10, 20)
CONTEXT_TOKENS = 64
SESSION_TOKENS = 512
SESSIONS = 8
CHUNK_TOKENS = 64


class Chain:
    """Executors one behind the other, with eight sessions of some context."""

    def __init__(self, precision: str, cuts: tuple[int, ...]) -> None:
        repository = ModelRepository(MODELS)
        key = ensure_model(MODELS, NAMES[precision])
        blocks = repository.decoder_table(key).blocks
        self._executors: list[DecoderExecutor] = [
            load_decoder(
                repository,
                PartitionKey(key, first, last),
                Device.parse("cpu"),
                CacheLayout((SESSIONS + 1) * (last - first), SESSION_TOKENS, (first,)),
            )
            for first, last in itertools.pairwise((0, *cuts, blocks))
        ]
        self.weight_bytes = sum(executor.memory_bytes for executor in self._executors)
        self._lengths = dict.fromkeys(range(SESSIONS), 0)
        self._prompt = np.arange(1000, 1000 + CONTEXT_TOKENS)
        for session in self._lengths:
            self._open(session)
            self._run({session: self._prompt})

    def decode(self, sessions: int) -> None:
        """Runs one step of `sessions` sessions."""
        self._run({session: np.array([77]) for session in range(sessions)})

    def prefill(self) -> None:
        """Runs one chunk of a new session."""
        self._open(SESSIONS)
        self._run({SESSIONS: self._prompt[:CHUNK_TOKENS]})
        for executor in self._executors:
            executor.close_session(SESSIONS)

    def _open(self, session: int) -> None:
        self._lengths[session] = 0
        for executor in self._executors:
            executor.open_session(session, executor.key.first_block)

    def _run(self, rows: dict[int, np.ndarray]) -> None:
        positions = {session: self._lengths[session] for session in rows}
        for session, array in rows.items():
            self._lengths[session] += len(array)
        for executor in self._executors:
            want: Want = "logits" if executor is self._executors[-1] else "hidden"
            made = executor.step(
                [StepItem(session, positions[session], rows[session], want) for session in rows]
            )
            rows = {s: row for s, row in zip(rows, made, strict=True) if row is not None}


def run(quick: bool) -> list[Figure]:
    chains = {name: Chain(name, ()) for name in NAMES}
    chains["fp32, 3 parts"] = Chain("fp32", THIRDS)
    chains["int4, 3 parts"] = Chain("int4", THIRDS)
    memory = np.ones(chains["fp32"].weight_bytes // 4, np.float32)
    jobs: dict[str, Callable[[], object]] = {"floor": memory.max}
    for name, chain in chains.items():
        jobs[f"{name}, 1 session"] = lambda chain=chain: chain.decode(1)  # type: ignore[misc]
        jobs[f"{name}, 8 sessions"] = lambda chain=chain: chain.decode(8)  # type: ignore[misc]
    for name in NAMES:
        jobs[f"{name}, prefill"] = chains[name].prefill
    best = _best(jobs, 4 if quick else 12)
    figures = [
        at_most(f"decoding step, {name}" if name != "floor" else "reading fp32 weights", ms, "ms")
        for name, ms in best.items()
    ]
    one, eight, floor = (best[n] for n in ("fp32, 1 session", "fp32, 8 sessions", "floor"))
    parts = "fp32, 3 parts, 1 session"
    figures += [
        at_most("fp32 step / reading its weights", one / floor, "x", 1.25),
        at_least("8 sessions / 1 session, tokens per second, fp32", 8 * one / eight, "x", 4.5),
        at_least("int4 / fp32, 1 session", one / best["int4, 1 session"], "x", 2.5),
        at_most("3 parts / 1 part, fp32", best[parts] / one, "x", 1.1),
    ]
    return figures


def _best(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the least milliseconds of each job, while they take turns."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            started = time.thread_time()
            job()
            best[name] = min(best[name], 1e3 * (time.thread_time() - started))
    return best
