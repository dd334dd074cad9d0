"""The agents a leader knows, whether they are there or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from scheduler.sessions import Session
from services.domain.ids import AgentId, PartitionKey
from services.domain.plan import Agent

AgentSession = Session[scheduler_pb2.SchedulerToAgentMessage]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A partition an agent hosts."""

    memory_bytes: int
    compute_ns: tuple[int, ...]
    """Measured at batch 1, 2, .."""


@dataclass(slots=True)
class AgentRecord:
    """One agent process.

    Invariants: `session` is None while it is not connected; `joined` implies a session, and that
    the dispatcher was told `AgentJoined` and not yet `AgentLost`.
    """

    agent: Agent
    incarnation: int
    peer: common_pb2.Peer
    device: str
    since_s: float
    """When it connected or was lost, on `time.monotonic`."""
    session: AgentSession | None = None
    joined: bool = False
    draining: bool = False
    loaded: dict[PartitionKey, Loaded] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """For people: "joining", "ready", "draining" or "lost"."""
        if self.session is None:
            return "lost"
        if self.draining:
            return "draining"
        return "ready" if self.joined else "joining"

    def hosts(self, partition: PartitionKey, batch: int) -> bool:
        """True if it has `partition` loaded and measured up to `batch` rows."""
        loaded = self.loaded.get(partition)
        return loaded is not None and len(loaded.compute_ns) >= batch

    def as_record(self) -> str:
        """Returns what Redis keeps for people and dashboards, as JSON."""
        return json.dumps(
            {
                "device": self.device,
                "device_class": self.agent.device_class,
                "server": self.agent.server,
                "memory_bytes": self.agent.memory_bytes,
                "link_bytes_per_second": self.agent.link_bytes_per_second,
                "virtual_level": self.agent.virtual_level,
                "device_id": self.agent.device_id,
                "incarnation": self.incarnation,
                "state": self.state,
                "partitions": [str(key) for key in self.loaded],
            },
            separators=(",", ":"),
        )


Roster = dict[AgentId, AgentRecord]


def present(roster: Roster) -> list[AgentRecord]:
    """Returns the agents that can be planned on: connected and not draining."""
    return [agent for agent in roster.values() if agent.session is not None and not agent.draining]


def hosts_in(roster: Roster) -> Callable[[AgentId, PartitionKey, int], bool]:
    """Returns a test: is an agent there and hosts a partition for batches of that size."""

    def hosts(agent: AgentId, partition: PartitionKey, batch: int) -> bool:
        record = roster.get(agent)
        return record is not None and record.session is not None and record.hosts(partition, batch)

    return hosts


def is_joined_in(roster: Roster) -> Callable[[AgentId], bool]:
    """Returns a test: may the dispatcher use an agent."""

    def is_joined(agent: AgentId) -> bool:
        record = roster.get(agent)
        return record is not None and record.joined

    return is_joined
