"""Compute times of partitions on agents: measured when loaded and while serving, and kept.

Agents also report the work of text generation continuously, and the cost of decoder blocks follows
these reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple

from msgspec.structs import astuple as astuple_of

from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.observed.cache_rates import CacheRates
from catenary_scheduler.observed.links import MeasuredLinks
from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.latency import ObservedCost, WorkTotals
from catenary_scheduler.planning.live import GenerationCost
from catenary_scheduler.planning.requirements import partition_of, stages_of
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.stored import (
    Place,
    StoredComputeTimes,
    StoredCost,
    StoredGeneration,
    StoredMeasurements,
)
from catenary_scheduler.storage.values.tables import cost_text, place_name, times_text
from catenary_services.domain.ids import AgentId, Nanoseconds, PartitionKey

_KEPT = 10_000

Times = tuple[Nanoseconds, ...]


class MeasuredProfiles:
    """Compute times at batch 1, 2, .. by agent and partition; the oldest are forgotten."""

    table = RedisTable.MEASURED

    def __init__(self) -> None:
        self._times: dict[Place, Times] = {}
        self._by_now: dict[Place, Times] = {}
        """Times by what an earlier scheduler saw being served; the others are those of loading."""
        self._serving = BookedTimes()
        """Times that batches took. Unlike those that are booked, they never fade."""
        self._generation: dict[Place, ObservedCost] = {}
        self._served: set[Place] = set()
        self.cache_rates = CacheRates()
        self.links = MeasuredLinks()

    def put(self, agent: AgentId, partition: PartitionKey, times: Sequence[Nanoseconds]) -> None:
        """Remembers compute times in nanoseconds at batch 1, 2, ..; ignores an empty sequence.

        The same times again (an agent says hello with all it has loaded) change nothing. Others
        come from a process that was started anew, of which nothing was seen yet.
        """
        known = self._times.get((agent, partition))
        if times and known != tuple(times):
            self._times[agent, partition] = tuple(times)
            self._by_now.pop((agent, partition), None)
            if known is not None:
                self._serving.forget(agent)
                self._served = {place for place in self._served if place[0] != agent}
        while len(self._times) > _KEPT:
            oldest = next(iter(self._times))
            del self._times[oldest]
            self._by_now.pop(oldest, None)

    def served(
        self,
        agent: AgentId,
        partition: PartitionKey,
        rows: int,
        real_ns: Nanoseconds,
        now: Nanoseconds,
    ) -> None:
        """Takes in how long a batch took that was served."""
        if (agent, partition) in self._times:
            self._serving.reported(agent, partition, rows, real_ns, now)
            self._served.add((agent, partition))

    def served_places(self) -> set[Place]:
        """Returns the places of which batches were seen, now or by an earlier scheduler."""
        return self._served | self._by_now.keys()

    def put_generation(self, agent: AgentId, partition: PartitionKey, cost: GenerationCost) -> None:
        """Remembers what text generation costs in a range of decoder blocks.

        The same cost again (an agent says hello with all it has loaded) changes nothing.
        """
        known = self._generation.get((agent, partition))
        if known is None or known.measured != cost:
            self._enter(agent, partition, ObservedCost(cost))

    def observe(self, agent: AgentId, partition: PartitionKey, work: WorkTotals) -> bool:
        """Adds reported work to a cost; True if the cost changed notably since it was told."""
        known = self._generation.get((agent, partition))
        if known is None:  # an older release, or reports out of order
            return False
        known.add(work)
        return known.take_change()

    def generation(self) -> dict[Place, GenerationCost]:
        """Returns the present cost of every range of decoder blocks, by agent and partition."""
        return {place: observed.cost for place, observed in self._generation.items()}

    def observed_at(self, agent: AgentId, partition: PartitionKey) -> ObservedCost | None:
        """Returns the observed cost of decoder blocks on an agent; None if there is none."""
        return self._generation.get((agent, partition))

    def observed(self) -> Iterator[tuple[AgentId, PartitionKey, ObservedCost]]:
        """Yields every measurement of decoder blocks, with what was reported since."""
        for (agent, partition), observed in self._generation.items():
            yield agent, partition, observed

    def everything(self) -> dict[Place, Times]:
        """Returns all compute times, in nanoseconds at batch 1, 2, .., by agent and partition.

        They are those of loading, corrected by what batches took since.
        """
        return {place: self._present(place) for place in self._times}

    def _present(self, place: Place) -> Times:
        agent, partition = place
        base = self._by_now.get(place, self._times[place])
        return self._serving.booked((agent,), partition, base) if place in self._served else base

    def for_placement(self, placement: Placement) -> dict[Place, Times]:
        """Returns compute times for every agent of every stage of a placement.

        An agent that is away and was never measured is assumed to be as slow as the slowest of its
        pool, until it comes and is measured.
        """
        found: dict[Place, Times] = {}
        for model, _, stage in stages_of(placement):
            key = partition_of(model, stage)
            known = {a: self._times[a, key] for a in stage.agents if (a, key) in self._times}
            slowest = max(known.values(), key=lambda times: times[-1], default=())
            for agent in stage.agents:
                found[agent, key] = known.get(agent, slowest)
        return found

    def records(self) -> dict[str, str | None]:
        """Returns the fields that Redis keeps: times, generation costs, cache rates and links."""
        records: dict[str, str | None] = {
            place_name(*place): times_text(StoredComputeTimes(list(times), self._changed(place)))
            for place, times in self._times.items()
        }
        for place, observed in self._generation.items():
            by_now = observed.told if observed.told != observed.measured else None
            cost = StoredCost(
                _stored(observed.measured), None if by_now is None else _stored(by_now)
            )
            records[place_name(*place)] = cost_text(cost)
        return {**records, **self.cache_rates.records(), **self.links.records()}

    def _changed(self, place: Place) -> list[int] | None:
        present = self._present(place)
        return None if present == self._times[place] else list(present)

    def restore(self, stored: StoredMeasurements) -> None:
        """Takes over what an earlier scheduler measured."""
        self.cache_rates.restore(stored.links)
        self.links.restore(stored.server_links)
        for (agent, partition), times in stored.times.items():
            self.put(agent, partition, times.at_load)
            if times.by_now is not None and len(times.by_now) == len(times.at_load):
                self._by_now[agent, partition] = tuple(times.by_now)
        for (agent, partition), cost in stored.costs.items():
            told = _cost(cost.by_now) if cost.by_now is not None else None
            self._enter(agent, partition, ObservedCost(_cost(cost.at_load), told=told))

    def _enter(self, agent: AgentId, partition: PartitionKey, observed: ObservedCost) -> None:
        self._generation[agent, partition] = observed
        while len(self._generation) > _KEPT:
            del self._generation[next(iter(self._generation))]


def _stored(cost: GenerationCost) -> StoredGeneration:
    return StoredGeneration(*astuple(cost))


def _cost(stored: StoredGeneration) -> GenerationCost:
    prompt, prompt_token, step, session, context_token, lone, floor, chunk = astuple_of(stored)
    return GenerationCost(
        round(prompt),
        round(prompt_token),
        round(step),
        round(session),
        context_token,
        round(lone),
        round(floor),
        round(chunk),
    )
