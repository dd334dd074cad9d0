"""The agents that a leader knows, connected or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.planning.live import GenerationCost
from catenary_scheduler.planning.requirements import CacheRequirement, PartitionRequirement
from catenary_scheduler.storage.journal import Fields
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.stored import StoredAgent
from catenary_scheduler.wire.streams import PeerStream
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.plan import Agent
from catenary_services.telemetry.metrics import Metrics

AgentStream = PeerStream[scheduler_pb2.SchedulerToAgentMessage]


@dataclass(frozen=True, slots=True)
class LoadedPartition:
    """A partition an agent hosts."""

    memory_bytes: int
    compute_ns: tuple[int, ...]
    """Compute times in nanoseconds, measured at batch 1, 2, .. of rows or units."""
    generation: GenerationCost | None = None
    """Cost of text generation in decoder blocks, which have no `compute_ns`; else None."""
    cache: CacheRequirement | None = None
    """Room for key-value caches, as far as the agent reported it."""
    content: str = ""
    """Digest of the model's content; empty if the agent reported none."""
    max_batch: int = 0
    """Largest batch it takes, in rows or in texts of full length; 0 for decoder blocks."""


class FetchProgress(NamedTuple):
    """The progress of an agent that fetches the files of a model."""

    model: ModelKey
    wanted_bytes: int
    fetched_bytes: int
    bytes_per_second: int


@dataclass(slots=True)
class AgentState:
    """State of one agent process.

    Invariants: `session` is None while it is not connected; `complete` implies a session.
    """

    agent: Agent
    incarnation: int
    peer: common_pb2.Peer
    device: str
    since_s: float
    """Moment at which it connected or was lost, on `time.monotonic`."""
    session: AgentStream | None = None
    complete: bool = False
    """True if it hosts all that the plan in force wants of it. It serves what it has before
    that."""
    loaded: dict[PartitionKey, LoadedPartition] = field(default_factory=dict)
    layouts: dict[PartitionKey, CacheRequirement] = field(default_factory=dict)
    """Cache layouts last ordered for its decoder blocks."""
    software_version: str = ""
    """The release that it runs; empty if it did not say."""
    device_facts: common_pb2.DeviceFacts | None = None
    """The facts about its device, as it told them; None if it told none."""
    fetches: tuple[FetchProgress, ...] = ()
    """The models whose files it is fetching, as its last heartbeat said."""
    is_stopping: bool = False
    """True once it has said that it is about to stop by itself."""

    def state(self, availability: Availability) -> str:
        """Returns "joining", "ready", "draining" or "lost", for people."""
        if self.session is None:
            return "lost"
        if is_draining(self.agent.agent_id, availability):
            return "draining"
        return "ready" if self.complete else "joining"

    def hosts(self, partition: PartitionKey, requirement: PartitionRequirement) -> bool:
        """True if it has `partition` loaded in the form that is needed."""
        loaded = self.loaded.get(partition)
        if loaded is None:
            return False
        if requirement.cache is None:
            return loaded.max_batch >= requirement.batch
        return loaded.cache is not None and loaded.cache.includes(requirement.cache)

    def stored(self, availability: Availability) -> StoredAgent:
        """Returns the record that Redis keeps, for people and dashboards."""
        agent = self.agent
        return StoredAgent(
            server=agent.server,
            device=self.device,
            device_class=agent.device_class,
            memory_bytes=agent.memory_bytes,
            link_bytes_per_second=agent.link_bytes_per_second,
            virtual_level=agent.virtual_level,
            device_id=agent.device_id,
            incarnation=self.incarnation,
            state=self.state(availability),
            partitions=[str(key) for key in self.loaded],
        )


AgentRegistry = dict[AgentId, AgentState]


def address_of(peer: common_pb2.Peer) -> str:
    """Returns the host that other machines connect to for a peer's frames, without a port."""
    for each in peer.addresses:
        if each.transport in ("tcp", "grpc"):
            return each.address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return ""


def servers_of(registry: AgentRegistry) -> dict[AgentId, ServerId]:
    return {agent: record.agent.server for agent, record in registry.items()}


def is_draining(agent: AgentId, availability: Availability) -> bool:
    return availability.mark_of(agent, Impairment.DRAINING) is not None


def staying(registry: AgentRegistry, availability: Availability) -> list[AgentState]:
    """Returns the agents that are connected and not draining."""
    return [
        record
        for agent, record in registry.items()
        if record.session is not None and not is_draining(agent, availability)
    ]


def hosts_in(
    registry: AgentRegistry,
) -> Callable[[AgentId, PartitionKey, PartitionRequirement], bool]:
    """Returns a predicate: an agent is connected and hosts a partition as it is needed."""

    def hosts(agent: AgentId, partition: PartitionKey, requirement: PartitionRequirement) -> bool:
        record = registry.get(agent)
        return (
            record is not None
            and record.session is not None
            and record.hosts(partition, requirement)
        )

    return hosts


class StoredAgents:
    """The records of a registry, which Redis keeps for people; each agent says what it holds."""

    table = RedisTable.AGENTS

    def __init__(self, registry: AgentRegistry, availability: Availability) -> None:
        self._registry = registry
        self._availability = availability

    def records(self) -> Fields:
        return {
            agent: encode_document(record.stored(self._availability))
            for agent, record in self._registry.items()
        }


class AgentMetrics:
    """Exports the number of agents in each state, and with each impairment."""

    def __init__(self, registry: AgentRegistry, availability: Availability) -> None:
        self._registry = registry
        self._availability = availability

    def export(self, metrics: Metrics) -> None:
        """Sets the gauges of agents by state and by impairment."""
        availability = self._availability
        counts = dict.fromkeys(("joining", "ready", "draining", "lost"), 0)
        for record in self._registry.values():
            counts[record.state(availability)] += 1
        for state, count in counts.items():
            metrics.agents.labels(state).set(count)
        for impairment in Impairment:
            impaired = availability.impaired_by(impairment) & availability.connected_agents
            metrics.impaired_agents.labels(impairment.name.lower()).set(len(impaired))
        metrics.stragglers.set(len(availability.impaired_by(Impairment.STRAGGLING)))


class AgentSender:
    """Sends to the agents of a registry that are connected; nobody waits until it has left."""

    def __init__(self, registry: AgentRegistry) -> None:
        self._registry = registry

    def send(self, agent: AgentId, message: scheduler_pb2.SchedulerToAgentMessage) -> None:
        record = self._registry.get(agent)
        if record is not None and record.session is not None:
            record.session.send(message)

    def broadcast(self, message: scheduler_pb2.SchedulerToAgentMessage) -> None:
        records = self._registry.values()
        PeerStream.send_all(message, [r.session for r in records if r.session is not None])
