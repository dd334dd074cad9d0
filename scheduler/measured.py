"""How long partitions take on agents: measured once when loaded, remembered across scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields

from scheduler.planning import Placement
from scheduler.planning.live import GenerationCost
from scheduler.targets import partition_of, stages_of
from services.domain.ids import AgentId, ModelKey, Nanoseconds, PartitionKey

_FIELD = re.compile(r"(.+)\|(.+):([^:]+)\[(\d+),(\d+)\)")
_KEPT = 10_000
_GENERATION = "generation "
"""Before the four numbers of a `GenerationCost`."""

Times = tuple[Nanoseconds, ...]


class Measured:
    """Compute times at batch 1, 2, .. by agent and partition; the oldest are forgotten."""

    def __init__(self) -> None:
        self._times: dict[tuple[AgentId, PartitionKey], Times] = {}
        self._generation: dict[tuple[AgentId, PartitionKey], GenerationCost] = {}

    def put(self, agent: AgentId, partition: PartitionKey, times: Sequence[Nanoseconds]) -> None:
        """Remembers a measurement; an empty one tells nothing."""
        if times:
            self._times[agent, partition] = tuple(times)
        while len(self._times) > _KEPT:
            del self._times[next(iter(self._times))]

    def put_generation(self, agent: AgentId, partition: PartitionKey, cost: GenerationCost) -> None:
        """Remembers what text generation costs in a range of decoder blocks."""
        self._generation[agent, partition] = cost
        while len(self._generation) > _KEPT:
            del self._generation[next(iter(self._generation))]

    def generation(self) -> dict[tuple[AgentId, PartitionKey], GenerationCost]:
        """Returns every measurement of decoder blocks there is."""
        return dict(self._generation)

    def everything(self) -> dict[tuple[AgentId, PartitionKey], Times]:
        """Returns every measurement there is."""
        return dict(self._times)

    def for_placement(self, placement: Placement) -> dict[tuple[AgentId, PartitionKey], Times]:
        """Returns times for every agent of every stage.

        An agent that is away and was never measured is assumed to be as slow as the slowest of its
        pool, until it comes and is measured.
        """
        found: dict[tuple[AgentId, PartitionKey], Times] = {}
        for model, _, stage in stages_of(placement):
            key = partition_of(model, stage)
            known = {a: self._times[a, key] for a in stage.agents if (a, key) in self._times}
            slowest = max(known.values(), key=lambda times: times[-1], default=())
            for agent in stage.agents:
                found[agent, key] = known.get(agent, slowest)
        return found

    def records(self) -> dict[str, str | None]:
        """Returns what Redis keeps."""
        records: dict[str, str | None] = {
            f"{agent}|{key}": " ".join(map(str, times))
            for (agent, key), times in self._times.items()
        }
        for (agent, key), cost in self._generation.items():
            records[f"{agent}|{key}"] = _GENERATION + " ".join(map(str, astuple(cost)))
        return records

    def restore(self, records: Mapping[str, str]) -> None:
        """Reads `records`; what cannot be read is measured again some day."""
        for name, value in records.items():
            match = _FIELD.fullmatch(name)
            digits = value.removeprefix(_GENERATION)
            if match is None or not digits.replace(" ", "").isdigit():
                continue
            agent, model, version, first, last = match.groups()
            key = PartitionKey(ModelKey(model, version), int(first), int(last))
            numbers = [int(part) for part in digits.split()]
            if digits == value:
                self.put(AgentId(agent), key, numbers)
            elif len(numbers) == len(fields(GenerationCost)):
                self.put_generation(AgentId(agent), key, GenerationCost(*numbers))
