"""How long partitions take on agents: measured when loaded, remembered across schedulers.

What generating costs is also reported all the time; the cost of decoder blocks follows that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields

from scheduler.measured_links import MeasuredLinks
from scheduler.planning import Placement
from scheduler.planning.latency import Observed, WorkDone
from scheduler.planning.live import GenerationCost
from scheduler.targets import partition_of, stages_of
from services.domain.ids import AgentId, ModelKey, Nanoseconds, PartitionKey

_FIELD = re.compile(r"(.+)\|(.+):([^:]+)\[(\d+),(\d+)\)")
_KEPT = 10_000
_GENERATION = "generation "
"""Before the numbers of a `GenerationCost`."""
_NUMBERS = len(fields(GenerationCost))
_BY_NOW = " by now "
"""Between what was measured at load and what it has become."""

Times = tuple[Nanoseconds, ...]
Place = tuple[AgentId, PartitionKey]


class Measured:
    """Compute times at batch 1, 2, .. by agent and partition; the oldest are forgotten."""

    def __init__(self) -> None:
        self._times: dict[Place, Times] = {}
        self._generation: dict[Place, Observed] = {}
        self.links = MeasuredLinks()

    def put(self, agent: AgentId, partition: PartitionKey, times: Sequence[Nanoseconds]) -> None:
        """Remembers a measurement; an empty one tells nothing."""
        if times:
            self._times[agent, partition] = tuple(times)
        while len(self._times) > _KEPT:
            del self._times[next(iter(self._times))]

    def put_generation(self, agent: AgentId, partition: PartitionKey, cost: GenerationCost) -> None:
        """Remembers what text generation costs in a range of decoder blocks.

        The same cost again (an agent says hello with all it has loaded) changes nothing.
        """
        known = self._generation.get((agent, partition))
        if known is None or known.measured != cost:
            self._enter(agent, partition, Observed(cost))

    def observe(self, agent: AgentId, partition: PartitionKey, work: WorkDone) -> bool:
        """Takes in what an agent says it did; True if its cost is notably another than was told."""
        known = self._generation.get((agent, partition))
        if known is None:  # it never said what it costs: of another version, or in a strange order
            return False
        known.add(work)
        return known.take_change()

    def generation(self) -> dict[Place, GenerationCost]:
        """Returns what all decoder blocks cost by now."""
        return {place: observed.cost for place, observed in self._generation.items()}

    def observed_at(self, agent: AgentId, partition: PartitionKey) -> Observed | None:
        """Returns what is known of one range of decoder blocks on one agent."""
        return self._generation.get((agent, partition))

    def observed(self) -> Iterator[tuple[AgentId, PartitionKey, Observed]]:
        """Yields every measurement of decoder blocks, with what was reported since."""
        for (agent, partition), observed in self._generation.items():
            yield agent, partition, observed

    def everything(self) -> dict[Place, Times]:
        """Returns every measurement there is."""
        return dict(self._times)

    def for_placement(self, placement: Placement) -> dict[Place, Times]:
        """Returns times for every agent of every stage.

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
        """Returns what Redis keeps."""
        records: dict[str, str | None] = {
            f"{agent}|{key}": " ".join(map(str, times))
            for (agent, key), times in self._times.items()
        }
        for (agent, key), observed in self._generation.items():
            text = _GENERATION + _numbers_of(observed.measured)
            if observed.told != observed.measured:
                text += _BY_NOW + _numbers_of(observed.told)
            records[f"{agent}|{key}"] = text
        return {**records, **self.links.records()}

    def restore(self, records: Mapping[str, str]) -> None:
        """Reads `records`; what cannot be read is measured again some day."""
        self.links.restore(records)
        for name, value in records.items():
            match = _FIELD.fullmatch(name)
            if match is None:
                continue
            agent, model, version, first, last = match.groups()
            key = PartitionKey(ModelKey(model, version), int(first), int(last))
            if value.startswith(_GENERATION):
                at_load, _, by_now = value.removeprefix(_GENERATION).partition(_BY_NOW)
                cost, told = _cost_of(at_load), _cost_of(by_now)
                if cost is not None:
                    self._enter(AgentId(agent), key, Observed(cost, told=told))
            elif value.replace(" ", "").isdigit():
                self.put(AgentId(agent), key, [int(part) for part in value.split()])

    def _enter(self, agent: AgentId, partition: PartitionKey, observed: Observed) -> None:
        self._generation[agent, partition] = observed
        while len(self._generation) > _KEPT:
            del self._generation[next(iter(self._generation))]


def _numbers_of(cost: GenerationCost) -> str:
    return " ".join(map(str, astuple(cost)))


def _cost_of(text: str) -> GenerationCost | None:
    """Returns the cost of some numbers; the last of them may be missing: they were added later."""
    parts = text.split()
    if not 4 <= len(parts) <= _NUMBERS:
        return None
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        return None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        return None
    numbers += [0.0] * (_NUMBERS - len(numbers))
    prompt, prompt_token, step, session, context_token, lone, floor, chunk = numbers
    return GenerationCost(
        round(prompt), round(prompt_token), round(step), round(session), context_token,
        round(lone), round(floor), round(chunk),
    )  # fmt: skip
