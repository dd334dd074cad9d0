"""Simulated devices and links, and the batches on them."""

from __future__ import annotations

from catenary_scheduler.dispatch.events import PlannedHop
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    BatchId,
    Nanoseconds,
    PartitionKey,
    RequestId,
)


class StageCost:
    """The cost of a partition on a device, equal for every device of a pool."""

    __slots__ = ("compute_ns", "final", "first", "row_bytes")

    def __init__(
        self, compute_ns: tuple[Nanoseconds, ...], row_bytes: int, first: bool, final: bool
    ) -> None:
        self.compute_ns = compute_ns
        """Time of a batch by its size in rows or units; index 0 is a batch of one."""
        self.row_bytes = row_bytes
        """Bytes of one row, or one unit, of the partition's input."""
        self.first = first
        """Whether the partition is the first, whose input comes from the gateway."""
        self.final = final
        """Whether the partition is the last, whose output is the model's."""


class SimulatedLink:
    """One direction of a server's network connection, which carries one transfer at a time."""

    __slots__ = ("busy", "looks_at", "waiting")

    def __init__(self) -> None:
        self.busy = False
        self.looks_at: Nanoseconds = 0
        """Moment at which it next looks for a transfer whose time has come."""
        self.waiting: list[tuple[Nanoseconds, int, BatchTransfer]] = []
        """Waiting transfers, most urgent first; each waits at both of its links."""


class SimulatedDevice:
    """A virtual GPU, which computes one batch at a time, the earliest reservation first."""

    __slots__ = (
        "busy_ns",
        "bytes_per_second",
        "clock_error_ns",
        "costs",
        "downlink",
        "group",
        "looks_at",
        "ready",
        "running",
        "share",
        "uplink",
    )

    def __init__(
        self,
        group: str,
        share: float,
        uplink: SimulatedLink,
        downlink: SimulatedLink,
        bytes_per_second: int,
        clock_error_ns: Nanoseconds,
    ) -> None:
        self.group = group
        """Name of its GPU class."""
        self.share = share
        """Part of a physical GPU that it is, 0 to 1."""
        self.uplink = uplink
        self.downlink = downlink
        self.bytes_per_second = bytes_per_second
        self.clock_error_ns = clock_error_ns
        """Error of its clock, added to every time it reports."""
        self.costs: dict[PartitionKey, StageCost] = {}
        self.ready: list[tuple[Nanoseconds, int, SimulatedBatch]] = []
        self.running: SimulatedBatch | None = None
        self.looks_at: Nanoseconds = 0
        """Moment at which it next looks for a batch whose time has come."""
        self.busy_ns: Nanoseconds = 0


class BatchHop:
    """One stop of a batch: a device, the cost there, and what is reserved."""

    __slots__ = (
        "behind",
        "cost",
        "device",
        "earliest_ns",
        "reserved_ns",
        "transfer_earliest_ns",
        "transfer_ns",
    )

    def __init__(self, device: SimulatedDevice, cost: StageCost, planned: PlannedHop) -> None:
        self.device = device
        self.cost = cost
        self.reserved_ns = planned.start_ns
        """Start of its reservation; the earliest goes first on a device."""
        self.earliest_ns = planned.earliest_ns
        """Moment from which the device may start it."""
        self.behind = planned.behind
        """Batch whose end that is."""
        self.transfer_ns = planned.transfer_start_ns if planned.transfer_ns else -1
        """Start of the transfer's reservation; -1 if none is booked."""
        self.transfer_earliest_ns = planned.transfer_earliest_ns
        """Moment from which the links may start its transfer."""


class SimulatedBatch:
    """A batch on its way along its hops."""

    __slots__ = (
        "batch",
        "cancelled",
        "compute_start",
        "hops",
        "position",
        "requests",
        "size",
        "transfer_end",
        "transfer_start",
        "transfers_left",
    )

    def __init__(
        self, batch: BatchId, requests: list[RequestId], hops: list[BatchHop], size: int
    ) -> None:
        self.batch = batch
        self.requests = requests
        """The request of each row."""
        self.size = size
        """The size of the batch in rows, or in units."""
        self.hops = hops
        self.position = 0
        self.transfers_left = 0
        self.transfer_start: Nanoseconds = -1
        """Start of the transfer to the present hop; -1 before it begins."""
        self.transfer_end: Nanoseconds = -1
        self.compute_start: Nanoseconds = 0
        self.cancelled = False


class BatchTransfer:
    """A transfer of a batch's rows from one device to the next."""

    __slots__ = (
        "booked_ns",
        "earliest_ns",
        "job",
        "length_ns",
        "number",
        "receiver",
        "sender",
        "size",
    )

    def __init__(
        self,
        job: SimulatedBatch,
        sender: SimulatedDevice,
        receiver: SimulatedDevice,
        size: int,
        number: int,
    ) -> None:
        self.job = job
        self.sender = sender
        self.receiver = receiver
        self.size = size
        """Size of the transfer in bytes."""
        self.number = number
        hop = job.hops[job.position]
        self.booked_ns = hop.transfer_ns
        """Start of its reservation; -1 if none is booked."""
        self.earliest_ns = hop.transfer_earliest_ns
        """Moment from which the links may start it."""
        speed = min(sender.bytes_per_second, receiver.bytes_per_second)
        self.length_ns: Nanoseconds = -(-size * NANOSECONDS_PER_SECOND // speed)
        """Duration as profiled."""

    @property
    def urgency(self) -> Nanoseconds:
        """Start of the reservation that it is for; the earliest goes first on a link."""
        return (
            self.booked_ns if self.booked_ns >= 0 else self.job.hops[self.job.position].reserved_ns
        )
