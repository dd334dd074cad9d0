"""Questions: how would a model be served by devices of some classes, which need not be there?

Devices of a class that is here are taken to be like the ones that are, in memory, link and all that
these measured. Of a class of the catalogue of data sheets there need not be any. Whoever asks gives
numbers of devices; each is taken to be in a machine of its own.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from catenary_scheduler.planning.even_split import DeployedModel
from catenary_scheduler.planning.live.chains import ChainCluster
from catenary_scheduler.planning.live.generation import GenerationCost, GenerationTimes
from catenary_scheduler.planning.live.generation_estimates import estimated_cost
from catenary_scheduler.planning.live.groups import DeviceGroup, device_groups
from catenary_scheduler.planning.live.problem import LiveCluster
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.search.options import SearchOrder
from catenary_services.devices.catalogue import CATALOGUE, device_class, find_device_class
from catenary_services.domain.decoder import GPU_CHUNK_TOKENS, DecoderRuntime
from catenary_services.domain.ids import AgentId, PartitionKey, ServerId
from catenary_services.domain.plan import Agent
from catenary_services.errors import InvalidInput

MOST_GPUS = 64
"""Largest number of devices that one question is about."""
_LINK_BYTES_PER_S = 1_250_000_000
"""Rate of a link of a device that is not here, if no other agent is: 10 Gbit/s."""
_FIELD = "gpus"
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_Cost = TypeVar("_Cost")


@dataclass(frozen=True, slots=True)
class ChainQuestion:
    """A question about a model that generates text."""

    cluster: ChainCluster
    """The devices, and the one model with its load."""
    order: SearchOrder
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolQuestion:
    """A question about a model that does not.

    Attributes:
        cluster: The devices and the one model.
        problem: The same as a planning task.
        order: What decides between options that keep the objective.
        rate_per_s: Load in requests per second; 0 for as much as there can be.
        survival_first: True if what survives the loss of an agent goes before what serves more.
        notes: Sentences for whoever asked.
    """

    cluster: LiveCluster
    problem: PoolingProblem
    order: SearchOrder
    rate_per_s: float
    survival_first: bool
    notes: tuple[str, ...] = ()

    @property
    def deployed(self) -> DeployedModel:
        return self.cluster.models[0].deployed


PlanQuestion = ChainQuestion | PoolQuestion


@dataclass(frozen=True, slots=True)
class QuestionDevices:
    """The devices of a question, as agents, and the agents that they are taken to be like."""

    agents: tuple[Agent, ...]
    like: Mapping[AgentId, AgentId]
    """The agent that is here, by the one it stands for; devices of no agent are missing."""

    def measured(
        self, times: Mapping[tuple[AgentId, PartitionKey], _Cost]
    ) -> dict[tuple[AgentId, PartitionKey], _Cost]:
        """Returns what was measured, by the devices that it stands for."""
        by_agent: dict[AgentId, list[tuple[PartitionKey, _Cost]]] = {}
        for (agent, key), cost in times.items():
            by_agent.setdefault(agent, []).append((key, cost))
        return {
            (each, key): cost
            for each, agent in self.like.items()
            for key, cost in by_agent.get(agent, ())
        }


def asked_devices(counts: Mapping[str, int], present: Sequence[Agent]) -> QuestionDevices:
    """Returns the devices of a question.

    Args:
        counts: Number of devices by their class: one that is here, by its name, or one of the
            catalogue.
        present: The agents that are here.

    Raises:
        InvalidInput: A class is not known, or there are none or too many devices.
    """
    asked = sum(counts.values())
    if not 0 < asked <= MOST_GPUS or min(counts.values()) < 1:
        raise InvalidInput(
            _FIELD, f"ask for 1 to {MOST_GPUS} GPUs in all, of each class one or more"
        )
    groups = device_groups(present)
    agents: list[Agent] = []
    like: dict[AgentId, AgentId] = {}
    numbers: Counter[str] = Counter()
    for name, count in counts.items():
        members = _members(name, groups)
        for number in range(count):
            base = _NO_NAME.sub("-", name).strip("-._") or "gpu"
            numbers[base] += 1
            own = AgentId(f"{base}-{numbers[base]}")
            if members is None:
                agents.append(_of_catalogue(name, own, present))
            else:
                source = members.agents[number % len(members.agents)]
                like[own] = source.agent_id
                agents.append(
                    replace(source, agent_id=own, server=ServerId(str(own)), device_id="")
                )
    return QuestionDevices(tuple(agents), like)


def with_estimates(
    model: DeployedModel, devices: QuestionDevices, measured: GenerationTimes
) -> tuple[GenerationTimes, tuple[str, ...]]:
    """Returns what is known of text generation on devices, and sentences on where it comes from.

    A class of which no agent measured the model gets estimates from its data sheet, if it has one.
    """
    found: dict[tuple[AgentId, PartitionKey], GenerationCost] = {
        (agent, key): cost
        for (agent, key), cost in devices.measured(measured).items()
        if key.model == model.key and cost.decode(1) > 0
    }
    measuring = {agent for agent, _ in found}
    notes = []
    for group in device_groups(devices.agents):
        sheet = find_device_class(group.device_class)
        if any(agent.agent_id in measuring for agent in group.agents):
            notes.append(f"times of {model.key} on {group.name} are what agents measured")
        elif sheet is not None and model.decoder is not None:
            whole = PartitionKey(model.key, 0, model.decoder.blocks)
            for agent in group.agents:
                found[agent.agent_id, whole] = estimated_cost(model.held_by(agent), sheet)
            notes.append(
                f"times of {model.key} on {group.name} are estimates from the data sheet of"
                f" {sheet.name}"
            )
        else:
            notes.append(
                f"nobody has measured {model.key} on {group.name}, which has no data sheet here; it"
                " is taken to be as slow as the slowest of the others"
            )
    return found, tuple(notes)


def _members(name: str, groups: Sequence[DeviceGroup]) -> DeviceGroup | None:
    """Returns the agents of a class that is here; None for one of the catalogue."""
    alike = [group for group in groups if group.name.casefold() == name.casefold()]
    if alike:
        return next((group for group in alike if group.name == name), alike[0])
    if name.upper() in CATALOGUE:
        return None
    known = list(dict.fromkeys([*(group.name for group in groups), *CATALOGUE]))
    by_letters = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), by_letters, n=1)
    meant = f"; did you mean {by_letters[close[0]]}?" if close else ""
    raise InvalidInput(
        _FIELD, f"{name!r} is no class of devices that is known: {', '.join(known)}{meant}"
    )


def _of_catalogue(name: str, agent: AgentId, present: Sequence[Agent]) -> Agent:
    sheet = device_class(name)
    rates = [each.link_bytes_per_second for each in present if each.link_bytes_per_second]
    return Agent(
        agent,
        sheet.name,
        ServerId(str(agent)),
        sheet.memory_bytes,
        min(rates, default=_LINK_BYTES_PER_S),
        runtime=DecoderRuntime.TORCH_FLOAT16,
        prefill_chunk_tokens=GPU_CHUNK_TOKENS,
    )
