"""The load of a live scenario: requests of one row, from a process of their own.

A request is in time if its result arrives within the SLO, counted from the moment it was due.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import catenary
from catenary_lab.live.emulation import FEATURES, INPUT
from catenary_lab.live.generator import run_load
from catenary_lab.scenarios.cells import percentile

Moments = dict[str, list[float]]
"""Arrival times by model, in seconds from the start, ascending."""

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ModelOutcome:
    """The outcome of one model's requests."""

    requests: int
    on_time: int
    late: int
    refused: dict[str, int]
    """Number of requests that ended without a result, by reason."""
    latencies_ms: tuple[float, ...]
    """Latencies of the requests that were answered, ascending."""

    @property
    def attainment(self) -> float:
        """Share of the requests whose result came in time."""
        return self.on_time / self.requests if self.requests else 1.0

    def percentile_ms(self, percent: float) -> float | None:
        """Returns a percentile of the latencies; None if nothing was answered."""
        return percentile(self.latencies_ms, percent)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The outcome of all requests."""

    models: dict[str, ModelOutcome]
    send_lag_p99_ms: float
    """Delay of sending by the generator itself, 99th percentile; it counts against the servers."""


@dataclass(frozen=True, slots=True)
class _Inferences:
    """The requests of a load: one per model, and the model of each number."""

    requests: Mapping[str, catenary.InferRequest]
    names: Sequence[str]

    async def send(self, client: catenary.AsyncClient, number: int, due: float) -> float | str:
        """Returns a request's latency in milliseconds, or the reason why it has no result."""
        try:
            await client.send(self.requests[self.names[number]], timeout_s=_TIMEOUT_S)
        except catenary.CatenaryError as error:
            return error.reason
        return (time.monotonic() - due) * 1e3


async def infer_all(
    target: str,
    moments: Moments,
    slo_ms: Mapping[str, float],
    reply_allowance_ms: float,
    folder: Path,
) -> LoadOutcome:
    """Returns the outcome of requests that arrive at the given times.

    Args:
        target: Address of the gateway.
        moments: Arrival times by model.
        slo_ms: SLO of each model that requests are measured against.
        reply_allowance_ms: Difference between that SLO and the shorter one that they name.
        folder: Folder for the generator's files.

    Raises:
        Unavailable: The generator's process did not end well.
    """
    row = np.zeros((1, FEATURES), np.float32)
    requests = {
        name: catenary.InferRequest(name, {INPUT: row}, slo_ms=slo - reply_allowance_ms)
        for name, slo in slo_ms.items()
    }
    sequence = sorted((at, name) for name, times in moments.items() for at in times)
    names = [name for _, name in sequence]
    send = _Inferences(requests, names).send
    ended, lag_s = await run_load(target, [at for at, _ in sequence], send, folder)
    models = {
        name: _outcome([end for of, end in zip(names, ended, strict=True) if of == name], slo)
        for name, slo in slo_ms.items()
    }
    return LoadOutcome(models, lag_s * 1e3)


def _outcome(ended: Sequence[float | str], slo_ms: float) -> ModelOutcome:
    latencies = sorted(each for each in ended if not isinstance(each, str))
    refused = Counter(each for each in ended if isinstance(each, str))
    on_time = sum(each <= slo_ms for each in latencies)
    late = len(latencies) - on_time
    return ModelOutcome(len(ended), on_time, late, dict(refused), tuple(latencies))
