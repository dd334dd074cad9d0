"""Shares: whole GPUs and pipelines on them with which a model reaches a rate, cheapest first.

At given prices of GPUs a pipeline at rate x *loses* its price minus what x is worth at the best
price per request. A share that is cheap loses little in each of its pipelines, so only the few
pipelines that lose less than the best known share are put together. What is left out is counted at
the least it could lose, so that the cost of the cheapest share is bounded from below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints
from catenary_scheduler.planning.pooled.columns.selection import (
    ChosenPipeline,
    gpus_for_rate,
    used_gpus,
)
from catenary_scheduler.planning.pooled.columns.tables import TOLERANCE

_MOST_COLUMNS = 200
"""Number of columns that are looked at, those that lose least."""
_MOST_STEPS = 10_000
"""Number of pools' sizes of all pipelines that are looked at."""
_MOST_PARTS = 150
"""Number of parts of shares, pipelines or pairs of them, that are combined with others."""
_FEW_PIPELINES = 3
"""Number of pipelines of a share; beyond that each is counted at what it loses at least."""
_MOST_SHARES = 25
"""Number of shares of each kind that are returned."""

Gpus = tuple[int, ...]
"""Number of GPUs of each class."""


@dataclass(frozen=True, slots=True)
class ModelShare:
    """Pipelines of one model on whole GPUs."""

    gpus: Gpus
    rate: float
    """Requests per second of all its pipelines."""
    pipelines: tuple[tuple[int, float], ...]
    """Columns, with the requests per second for which each has GPUs."""

    def chosen(self, columns: PipelineColumns) -> list[ChosenPipeline]:
        """Returns the pipelines of the share."""
        vgpus: dict[int, Ints] = {}
        for at, rate in self.pipelines:
            here = gpus_for_rate(columns.take(np.array([at])), rate)[0].clip(1)
            here = np.where(columns.gpu_class[at] >= 0, here * columns.level[at], 0)
            vgpus[at] = vgpus.get(at, 0) + here
        return [ChosenPipeline(columns, at, tuple(size.tolist())) for at, size in vgpus.items()]


def share_of(chosen: Sequence[ChosenPipeline], classes: int) -> ModelShare:
    """Returns the share that pipelines on whole GPUs make up."""
    return ModelShare(
        tuple(used_gpus([chosen], classes)),
        sum(pipeline.throughput_rps for pipeline in chosen),
        tuple((pipeline.index, pipeline.throughput_rps) for pipeline in chosen),
    )


@dataclass(frozen=True, slots=True)
class SharesFound:
    """The cheapest shares that were found, and a bound for all others."""

    least_cost: float
    """Cost that no share falls below."""
    shares: tuple[ModelShare, ...]


def cheapest_shares(
    columns: PipelineColumns, counts: Ints, prices: Floats, rate: float, effort: int = 1
) -> SharesFound:
    """Returns the cheapest shares of a model that reach a rate.

    Args:
        columns: The model's pipelines.
        counts: Number of GPUs of each class in the cluster.
        prices: Price of a GPU of each class; not all are 0.
        rate: Requests per second that the share must reach.
        effort: The larger, the closer is the bound, and the longer it takes; with 0 each share is a
            single pipeline.
    """
    price = np.where(columns.gpu_class >= 0, prices[columns.gpu_class], 0.0)
    per_request = (price / columns.rate_per_gpu).sum(axis=1)
    worth = float(per_request.min()) * rate
    whole = _Parts.at_rates(columns, np.arange(len(columns)), np.full(len(columns), rate), prices)
    whole = whole.take(np.flatnonzero(whole.fit(counts)))
    total = float(prices @ counts)
    best = min(float(whole.cost.min(initial=np.inf)), total)
    room = max(best - worth, 0.0) + total / max(int(counts.sum()), 1)
    least_loss = _least_loss(columns, price, float(per_request.min()), rate)
    by_loss = np.argsort(least_loss, kind="stable")
    kept = by_loss[: min(int((least_loss <= room).sum()), _MOST_COLUMNS) if effort else 0]
    finder = _Finder(columns, kept, counts, prices, rate, worth, room, effort * _MOST_PARTS)
    singles, left_out = finder.singles(least_loss, per_request)
    left_out = min(left_out, room, float(least_loss[by_loss[len(kept) :]].min(initial=np.inf)))
    shares = finder.shares(whole)
    least, parts = best, singles
    for pipelines in range(2, _FEW_PIPELINES + effort):
        found, least_here = finder.completed(parts)
        shares |= found
        least = min(least, least_here)
        # Two pipelines of one column are one with larger pools, so their columns are different.
        beyond = float(least_loss[by_loss[: pipelines + 1]].sum())
        if pipelines == len(least_loss) or beyond >= least - worth or not len(parts.rate):
            beyond = np.inf
            break
        parts, dropped = finder.sums(parts, singles, least - worth if pipelines > 2 else room)
        left_out = min(left_out, dropped)
    least = min(least, worth + min(left_out, beyond))
    return SharesFound(max(least, worth) * (1 - TOLERANCE), tuple(shares.values()))


class _Parts(NamedTuple):
    """Parts of shares: some pipelines each, at rates below that of the share."""

    rate: Floats
    cost: Floats
    gpus: Ints
    """GPUs of each class, shape (parts, classes)."""
    columns: Ints
    """Columns of the pipelines, shape (parts, pipelines)."""
    rates: Floats
    """Requests per second that each of them is asked for, in the same shape."""
    reached: Floats
    """Requests per second that each of them reaches, in the same shape."""

    @classmethod
    def at_rates(
        cls, columns: PipelineColumns, index: Ints, rates: Floats, prices: Floats
    ) -> _Parts:
        """Returns one part for each column in `index`, at its rate."""
        of_class, per_gpu = columns.gpu_class[index], columns.rate_per_gpu[index]
        present = of_class >= 0
        sizes = np.where(present, np.maximum(np.ceil(rates[:, None] / per_gpu - TOLERANCE), 1), 0.0)
        reached = np.where(present, sizes, 1.0) * per_gpu
        gpus = np.stack(
            [(sizes * (of_class == axis)).sum(axis=1) for axis in range(len(prices))], axis=1
        )
        return cls(
            rates,
            gpus @ prices,
            gpus.astype(np.int64),
            index[:, None],
            rates[:, None],
            reached.min(axis=1)[:, None],
        )

    def plus(self, others: _Parts) -> _Parts:
        """Returns the sum of each part and another one."""
        return _Parts(
            self.rate + others.rate,
            self.cost + others.cost,
            self.gpus + others.gpus,
            np.concatenate([self.columns, others.columns], axis=1),
            np.concatenate([self.rates, others.rates], axis=1),
            np.concatenate([self.reached, others.reached], axis=1),
        )

    def take(self, index: Ints) -> _Parts:
        return _Parts(
            self.rate[index],
            self.cost[index],
            self.gpus[index],
            self.columns[index],
            self.rates[index],
            self.reached[index],
        )

    def fit(self, counts: Ints) -> npt.NDArray[np.bool_]:
        """Returns a mask of the parts that the cluster has enough GPUs for."""
        fits = np.ones(len(self.rate), dtype=np.bool_)
        for gpus, count in zip(self.gpus.T, counts.tolist(), strict=True):
            fits &= gpus <= count
        return fits


@dataclass(frozen=True, slots=True)
class _Finder:
    """A search for the cheapest shares of one model at one rate."""

    columns: PipelineColumns
    kept: Ints
    """Columns that lose little enough at some rate."""
    counts: Ints
    prices: Floats
    rate: float
    worth: float
    """Price of the rate at the best price per request, in fractions of GPUs."""
    room: float
    """Loss that a share may have."""
    most_parts: int

    def singles(self, least_loss: Floats, per_request: Floats) -> tuple[_Parts, float]:
        """Returns pipelines with a pool that is exactly full, and what those left out may lose."""
        per_gpu = self.columns.rate_per_gpu[self.kept]
        extra = per_request[self.kept] - self.worth / self.rate
        most = np.minimum(self.rate, self.room / np.maximum(extra, 1e-300))
        steps = np.floor(most[:, None] / per_gpu + TOLERANCE).astype(np.int64)
        fitting = int(np.searchsorted(np.cumsum(steps.sum(axis=1)), _MOST_STEPS)) + 1
        dropped = float(least_loss[self.kept[fitting:]].min(initial=np.inf))
        index, rates = [], []
        for position in range(per_gpu.shape[1]):
            times = np.minimum(steps[:fitting, position], _MOST_STEPS)
            place = np.repeat(np.arange(len(times)), times)
            first = np.repeat(np.cumsum(times) - times, times)
            size = np.arange(len(place)) - first + 1
            index.append(self.kept[place])
            rates.append(size * per_gpu[place, position])
        parts = _Parts.at_rates(
            self.columns, np.concatenate(index), np.concatenate(rates), self.prices
        )
        found, left_out = self._useful(parts)
        return found, min(dropped, left_out)

    def sums(self, some: _Parts, others: _Parts, room: float) -> tuple[_Parts, float]:
        """Returns sums of two parts each that lose so much, and what those left out may lose."""
        one, other = np.divmod(np.arange(len(some.rate) * len(others.rate)), len(others.rate) or 1)
        inside = self._loss(some)[one] + self._loss(others)[other] <= room
        return self._useful(some.take(one[inside]).plus(others.take(other[inside])))

    def completed(self, parts: _Parts) -> tuple[dict[Gpus, ModelShare], float]:
        """Returns shares of the parts with one more pipeline each, and the least cost of any."""
        if not len(parts.rate) or not len(self.kept):
            return {}, np.inf
        some = self.columns.take(self.kept)
        present = some.gpu_class >= 0
        price = np.where(present, self.prices[some.gpu_class], 0.0)
        rest = self.rate - parts.rate
        cost = np.repeat(parts.cost[:, None], len(some), axis=1)
        for position in range(present.shape[1]):
            here = np.ceil(rest[:, None] / some.rate_per_gpu[:, position] - TOLERANCE)
            cost += np.where(present[:, position], np.maximum(here, 1.0), 0.0) * price[:, position]
        flat = cost.reshape(-1)
        first = np.argpartition(flat, min(4 * _MOST_SHARES, len(flat) - 1))[: 4 * _MOST_SHARES]
        first = first[np.argsort(flat[first], kind="stable")]
        part, last = np.divmod(first, len(some))
        ends = _Parts.at_rates(self.columns, self.kept[last], rest[part], self.prices)
        full = parts.take(part).plus(ends)
        return self.shares(full.take(np.flatnonzero(full.fit(self.counts)))), float(flat.min())

    def shares(self, parts: _Parts) -> dict[Gpus, ModelShare]:
        """Returns the cheapest of some parts that reach the rate, as shares by their GPUs."""
        found: dict[Gpus, ModelShare] = {}
        order = np.argsort(parts.cost, kind="stable")
        for at in order[: 4 * _MOST_SHARES].tolist():
            gpus = tuple(parts.gpus[at].tolist())
            if gpus not in found and len(found) < _MOST_SHARES:
                pipelines = zip(parts.columns[at].tolist(), parts.rates[at].tolist(), strict=True)
                found[gpus] = ModelShare(gpus, float(parts.reached[at].sum()), tuple(pipelines))
        return found

    def _loss(self, parts: _Parts) -> Floats:
        loss: Floats = parts.cost - parts.rate * (self.worth / self.rate)
        return loss

    def _useful(self, parts: _Parts) -> tuple[_Parts, float]:
        """Returns parts that leave a rest and that no other one beats, and what others may lose."""
        useful = (parts.rate < self.rate * (1 - TOLERANCE)) & (self._loss(parts) <= self.room)
        parts = parts.take(np.flatnonzero(useful & parts.fit(self.counts)))
        order = np.lexsort((-parts.rate, parts.cost))
        rate = parts.rate[order]
        before = np.maximum.accumulate(np.concatenate([[0.0], rate[:-1]]))[: len(rate)]
        front = order[rate > before]
        by_loss = front[np.argsort(self._loss(parts)[front], kind="stable")]
        left_out = self._loss(parts)[by_loss[self.most_parts :]].min(initial=np.inf)
        return parts.take(by_loss[: self.most_parts]), float(left_out)


def _least_loss(columns: PipelineColumns, price: Floats, per_request: float, most: float) -> Floats:
    """Returns the least that a pipeline of each column loses at any rate up to the most.

    Every pool has one GPU or more; beyond that it counts with fractions of GPUs. The loss is then
    least where a pool has one GPU that is exactly full, or at the largest rate.
    """
    present = columns.gpu_class >= 0
    loss = np.full(len(columns), np.inf)
    for position in range(present.shape[1]):
        rate = np.where(present[:, position], columns.rate_per_gpu[:, position], 0.0)
        rate = np.minimum(rate, most)
        size = np.maximum(1.0, rate[:, None] / columns.rate_per_gpu)
        here = (price * size).sum(axis=1) - per_request * rate
        np.minimum(loss, np.where(present[:, position], here, np.inf), out=loss)
    return loss
