"""Pool of interchangeable GPUs, kept in order of the moment at which they become free."""

from __future__ import annotations

from bisect import bisect_left, insort

from catenary_scheduler.book.timeline import Timeline, earliest_on
from catenary_services.domain.ids import AgentId, Nanoseconds


class PoolMember:
    """A GPU and the two links of its server."""

    __slots__ = ("agent", "bytes_per_second", "downlink", "gpu", "uplink")

    def __init__(
        self,
        agent: AgentId,
        gpu: Timeline,
        uplink: Timeline,
        downlink: Timeline,
        bytes_per_second: int,
    ) -> None:
        self.agent = agent
        self.gpu = gpu
        self.uplink = uplink
        self.downlink = downlink
        self.bytes_per_second = bytes_per_second


class Pool:
    """A set of members, any of which can run a stage.

    Invariant: `order` holds (busy_until, index) of every member's GPU, sorted. The timelines keep
    it sorted while the pool is attached.

    Attributes:
        sharing: Number of members whose GPU computes steps of language models beside batches.
    """

    __slots__ = ("fastest", "index_of", "members", "order", "ports", "sharing")

    def __init__(self, members: list[PoolMember]) -> None:
        self.members = members
        self.order: list[tuple[Nanoseconds, int]] = []
        self.sharing = 0
        self.index_of: dict[AgentId, int] = {m.agent: i for i, m in enumerate(members)}
        self.fastest = max(member.bytes_per_second for member in members)
        ports: dict[tuple[int, int], tuple[Timeline, int, list[int]]] = {}
        for index, member in enumerate(members):
            key = (id(member.downlink), member.bytes_per_second)
            if key not in ports:
                ports[key] = (member.downlink, member.bytes_per_second, [])
            ports[key][2].append(index)
        self.ports = list(ports.values())
        """Downlink, bytes per second and member indices of each port. Data reaches all members of
        one port at the same moment."""

    def attach(self) -> None:
        """Starts to follow the timelines of the members."""
        self.order = sorted((m.gpu.busy_until, i) for i, m in enumerate(self.members))
        self.sharing = sum(member.gpu.has_steps for member in self.members)
        for index, member in enumerate(self.members):
            member.gpu.watchers.append((self, index))

    def detach(self) -> None:
        """Stops following the timelines; the pool must not be probed any more."""
        for member in self.members:
            member.gpu.watchers = [w for w in member.gpu.watchers if w[0] is not self]

    def free_moments(self) -> list[Nanoseconds]:
        """Returns the moment from which each member's GPU is free, by index of the member."""
        moments = [0] * len(self.members)
        for moment, index in self.order:
            moments[index] = moment
        return moments

    def earliest_start(self, ready: Nanoseconds, duration: Nanoseconds) -> Nanoseconds:
        """Returns when a batch would start if its data were everywhere at the moment `ready`."""
        if self.order[0][0] <= ready:
            return ready
        return min([earliest_on(member.gpu, ready, duration) for member in self.members])

    def shared(self, more: int) -> None:
        """Counts members that began to compute steps, or ended it."""
        self.sharing += more

    def moved(self, index: int, before: Nanoseconds, after: Nanoseconds) -> None:
        """Moves a member to its new place in the order."""
        order = self.order
        del order[bisect_left(order, (before, index))]
        insort(order, (after, index))
