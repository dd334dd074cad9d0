"""The load generator of a live scenario: a process of its own, open loop, over real gRPC.

A request is in time if its result arrives within the SLO, counted from the moment it was due.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import catenary
from catenary_lab.live.emulation import FEATURES, INPUT
from catenary_lab.live.generator import generate_load, run_generator, send_all

Moments = Mapping[str, Sequence[float]]
"""Arrival times by model, in seconds from the start, ascending."""

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """The order of a load: the requests to send, and where to."""

    target: str
    slo_ms: dict[str, float]
    reply_allowance_ms: float
    """Difference between the SLO that requests are measured against and the shorter one that they
    name."""
    moments: Moments


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
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else None


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The outcome of all requests."""

    models: dict[str, ModelOutcome]
    send_lag_p99_ms: float
    """Delay of sending by the generator itself, 99th percentile; it counts against the servers."""


async def run_load(order: LoadOrder, folder: Path) -> LoadOutcome:
    """Returns the outcome of a load made by a process of its own.

    Raises:
        Unavailable: The process did not end well.
    """
    document = await generate_load("catenary_lab.live.load", asdict(order), folder)
    models = {name: ModelOutcome(**entry) for name, entry in document["models"].items()}
    return LoadOutcome(models, document["send_lag_p99_ms"])


class _Generator:
    def __init__(self, client: catenary.AsyncClient, order: LoadOrder) -> None:
        self._client = client
        self._order = order
        row = np.zeros((1, FEATURES), np.float32)
        self._requests = {
            name: catenary.InferRequest(name, {INPUT: row}, slo_ms=slo - order.reply_allowance_ms)
            for name, slo in order.slo_ms.items()
        }
        self._latencies: dict[str, list[float]] = {name: [] for name in order.slo_ms}
        self._refused: dict[str, Counter[str]] = {name: Counter() for name in order.slo_ms}
        moments = order.moments.items()
        self._sequence = sorted((at, name) for name, times in moments for at in times)

    async def run(self) -> LoadOutcome:
        _, lag_s = await send_all([at for at, _ in self._sequence], self._call)
        return LoadOutcome({name: self._outcome(name) for name in self._order.slo_ms}, lag_s * 1e3)

    async def _call(self, number: int, due: float) -> None:
        name = self._sequence[number][1]
        try:
            await self._client.send(self._requests[name], timeout_s=_TIMEOUT_S)
        except catenary.CatenaryError as error:
            self._refused[name][error.reason] += 1
        else:
            self._latencies[name].append((time.monotonic() - due) * 1e3)

    def _outcome(self, name: str) -> ModelOutcome:
        latencies, refused = sorted(self._latencies[name]), self._refused[name]
        on_time = sum(each <= self._order.slo_ms[name] for each in latencies)
        return ModelOutcome(
            len(latencies) + refused.total(),
            on_time,
            len(latencies) - on_time,
            dict(refused),
            tuple(latencies),
        )


async def _generate(document: dict[str, Any]) -> LoadOutcome:
    order = LoadOrder(**document)
    async with catenary.AsyncClient(order.target) as client:
        await client.ready()  # the connection is open before the first request is due
        return await _Generator(client, order).run()


if __name__ == "__main__":
    run_generator(_generate)
