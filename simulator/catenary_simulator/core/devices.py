"""Devices, links, and the batches on them."""

from __future__ import annotations

from catenary_services.domain.ids import BatchId, Nanoseconds, PartitionKey, RequestId


class StageCost:
    """What a partition costs on a device; every device of a pool has the same one."""

    __slots__ = ("compute_ns", "final", "first", "row_bytes")

    def __init__(
        self, compute_ns: tuple[Nanoseconds, ...], row_bytes: int, first: bool, final: bool
    ) -> None:
        self.compute_ns = compute_ns
        """Index 0 is batch 1."""
        self.row_bytes = row_bytes
        """Bytes of one row that enter."""
        self.first = first
        """Its input comes from the gateway."""
        self.final = final
        """Its output is the model's."""


class SimulatedLink:
    """One direction of a server's network connection: one transfer at a time."""

    __slots__ = ("busy", "waiting")

    def __init__(self) -> None:
        self.busy = False
        self.waiting: list[tuple[Nanoseconds, int, BatchTransfer]] = []
        """Most urgent first; a transfer waits at both of its links."""


class SimulatedDevice:
    """A virtual GPU: one batch at a time, the earliest reservation first."""

    __slots__ = (
        "busy_ns",
        "bytes_per_second",
        "clock_error_ns",
        "costs",
        "downlink",
        "group",
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
        """Its GPU class."""
        self.share = share
        """Part of a physical GPU."""
        self.uplink = uplink
        self.downlink = downlink
        self.bytes_per_second = bytes_per_second
        self.clock_error_ns = clock_error_ns
        """Added to every time it reports."""
        self.costs: dict[PartitionKey, StageCost] = {}
        self.ready: list[tuple[Nanoseconds, int, SimulatedBatch]] = []
        self.running: SimulatedBatch | None = None
        self.busy_ns: Nanoseconds = 0


class BatchHop:
    """One stop of a batch."""

    __slots__ = ("cost", "device", "reserved_ns")

    def __init__(self, device: SimulatedDevice, cost: StageCost, reserved_ns: Nanoseconds) -> None:
        self.device = device
        self.cost = cost
        self.reserved_ns = reserved_ns
        """Start of its reservation: who may go first on a device and on a link."""


class SimulatedBatch:
    """A batch on its way."""

    __slots__ = (
        "batch",
        "cancelled",
        "compute_start",
        "hops",
        "position",
        "requests",
        "transfer_end",
        "transfer_start",
        "transfers_left",
    )

    def __init__(self, batch: BatchId, requests: list[RequestId], hops: list[BatchHop]) -> None:
        self.batch = batch
        self.requests = requests
        """One for each row."""
        self.hops = hops
        self.position = 0
        self.transfers_left = 0
        self.transfer_start: Nanoseconds = -1
        """-1 while nothing was sent to the present hop."""
        self.transfer_end: Nanoseconds = -1
        self.compute_start: Nanoseconds = 0
        self.cancelled = False


class BatchTransfer:
    """Rows of a batch on their way from one device to the next."""

    __slots__ = ("job", "number", "receiver", "sender", "size")

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
        """Bytes."""
        self.number = number
