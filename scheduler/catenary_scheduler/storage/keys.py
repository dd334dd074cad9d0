"""The Redis keys of one cluster or group. `docs/redis.md` explains them to operators.

Every key of a cluster carries the hash tag `{<cluster>}`, so that one fenced script may touch all
of them also on Redis Cluster. A cluster that outgrows one scheduler is divided into groups of
agents. Each group has all of the keys below, under the hash tag `{<cluster>/<group>}`: its leader
writes nothing else, and different groups may lie on different servers of a Redis Cluster. No name
of a cluster contains a slash.

    catenary:{main}:lease             string, PX   token of the leader, e.g. "scheduler-0/5f..a1"
    catenary:{main}:epoch             string       fencing epoch; only ever grows
    catenary:{main}:clock             hash         scheduler_ns, redis_us, epoch of the last batch
    catenary:{main}:deployments       hash         "name:version" -> how it is to be served (JSON)
    catenary:{main}:plan              hash         target / active -> placement document (JSON)
    catenary:{main}:measured          hash         "agent|name:version[a,b)" -> times per batch
                                                   ("link|source|target" -> bytes per second)
    catenary:{main}:agents            hash         agent -> device, server, state (JSON)
    catenary:{main}:draining          hash         agent that is to go -> its incarnation
    catenary:{main}:peers             hash         agent or gateway -> where frames reach it (Peer)
    catenary:{main}:resources         hash         every resource that has a reservation table
    catenary:{main}:book:<resource>   hash         "batch:position" -> "start end expires done"
                                                   (caches: "session:0" -> "... done slots")
    catenary:{main}:batches           hash         batch -> path, slices, expected finish (JSON)
    catenary:{main}:sessions          hash         session -> request, chain, hops (JSON)
    catenary:{main}:lengths           hash         "name:version" -> lengths of answers (JSON)
    catenary:{main}:events            stream       what happened, newest few thousand entries
    catenary:{main}:quarantine        stream       what could not be read, newest 512 entries
    catenary:{main/1}:wanted          string, PX   token of a standby that wants this group, which
                                                   is led by a process that leads several

Nothing but `lease` and `wanted` expires, so the server must run with `maxmemory-policy noeviction`:
an evicted reservation would be a double booking after a fail-over. Sizes are bounded by what is
live: `book:*`, `batches` and `sessions` by what is in flight, `events` and `quarantine` by
`MAXLEN`, the rest by the cluster. `tables` says how each table is written and read.
"""

from __future__ import annotations

import re
from enum import StrEnum

from catenary_services.domain.ids import ResourceId
from catenary_services.errors import InvalidInput

_CLUSTER = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RedisTable(StrEnum):
    """The fixed hashes that the journal writes; the value is the last part of the key."""

    DEPLOYMENTS = "deployments"
    PLAN = "plan"
    MEASURED = "measured"
    AGENTS = "agents"
    PEERS = "peers"
    DRAINING = "draining"
    RESOURCES = "resources"
    BATCHES = "batches"
    SESSIONS = "sessions"
    LENGTHS = "lengths"


def book_table(resource: ResourceId) -> str:
    """Returns the table that holds one resource's reservations."""
    return f"book:{resource}"


class RedisKeys:
    """Names of the keys of one cluster, or of one of its groups if it has several.

    Attributes:
        group: The group's number; 0 if there is only one.
        groups: Number of groups.
        prefix: The part that all keys begin with; the key of a table is `prefix` and its name.
        lease: Key of the leader's token, which is there while it leads.
        wanted: Key of the token of a standby that wants to lead this group.
        epoch: Key of the fencing epoch.
        clock: Key of the last pair of equal moments on the leader's and on Redis' clock.
        events: Stream of what happened.
        quarantine: Stream of the records that could not be read.
    """

    def __init__(self, cluster: str, group: int = 0, groups: int = 1) -> None:
        if not _CLUSTER.fullmatch(cluster):
            raise InvalidInput("cluster", "use 1 to 64 letters, digits, dots, dashes, underscores")
        self.group = group
        self.groups = groups
        tag = cluster if groups == 1 else f"{cluster}/{group}"
        self.prefix = f"catenary:{{{tag}}}:"
        self.lease = self.prefix + "lease"
        self.wanted = self.prefix + "wanted"
        self.epoch = self.prefix + "epoch"
        self.clock = self.prefix + "clock"
        self.events = self.prefix + "events"
        self.quarantine = self.prefix + "quarantine"

    def table(self, table: str) -> str:
        """Returns the key of one hash: a `RedisTable` or a `book_table`."""
        return self.prefix + table
