"""Agents and links as they would behave, which execute dispatched batches and report them.

* A device computes one batch at a time. Of the batches whose data has arrived it takes the one
  whose reservation starts first, at the earliest when its window opens (as the real agents do).
* A transfer needs the uplink of the sender's server and the downlink of the receiver's, both to
  itself. Links serve the most urgent transfer that can go, by its reservation, in its window too.
* What begins at another moment than booked is reported at once, what ends always.
* The gateway dispatches by windows that it is granted, as the real one does, and says so at once.
* Reports reach the dispatcher `report_delay_ns` later, with the clock error of their server.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush

from catenary_scheduler.dispatch.events import (
    AdoptedRows,
    BatchSlice,
    CancelBatch,
    Command,
    DispatchBatch,
    Dispatcher,
    Event,
    ExtendWindow,
    GrantWindow,
    PlannedHop,
    Reject,
    RequestArrived,
    RequestCompleted,
    RevokeWindow,
    StageReported,
    StageStarted,
    WindowReported,
)
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    Nanoseconds,
    RequestId,
)
from catenary_services.domain.windows.window import DispatchWindow
from catenary_services.domain.windows.window_queue import (
    WindowOrder,
    WindowQueue,
    WindowRows,
    WindowUse,
)
from catenary_simulator.core.devices import (
    BatchHop,
    BatchTransfer,
    SimulatedBatch,
    SimulatedDevice,
    SimulatedLink,
)
from catenary_simulator.core.noise import Noise
from catenary_simulator.core.requests import SimulatedRequests
from catenary_simulator.kernel import GATEWAY, NEVER, Kernel

_LATER = 1
"""Order of the looks of devices and links: after the ends of the same moment."""


class _WindowWakeup:
    """Entry of the heap: the moment at which the gateway looks at its windows."""


class SimulatedCluster(Kernel):
    """Devices, links and the batches on them.

    Args:
        dispatcher: The dispatcher, with its agents and its plan.
        devices: The devices by the names of their agents.
        requests: The requests of the run, whose states are kept up to date.
        noise: Differences between real and profiled durations.
        duration_ns: Time after which computing no longer counts as use of a device.
    """

    __slots__ = (
        "_compute_noise",
        "_delay",
        "_duration",
        "_jobs",
        "_located",
        "_numbers",
        "_transfer_noise",
        "_window_batches",
        "_window_wakeup",
        "_windows",
        "batches",
        "devices",
        "ends",
        "requests",
        "rows_of",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        devices: dict[AgentId, SimulatedDevice],
        requests: SimulatedRequests,
        noise: Noise,
        duration_ns: Nanoseconds,
    ) -> None:
        super().__init__(dispatcher, requests.arrived)
        self.devices = devices
        self.requests = requests
        self.ends = 0
        """Number of transfers and computes that have ended."""
        self.batches: list[int] = [0] * len(requests.models)
        self.rows_of: list[int] = [0] * len(requests.models)
        self._compute_noise = noise.compute
        self._transfer_noise = noise.transfer
        self._delay = noise.report_delay_ns
        self._duration = duration_ns
        self._numbers = 0
        self._jobs: dict[int, SimulatedBatch] = {}
        self._located: dict[int, SimulatedDevice] = {}
        self._windows = WindowQueue()
        self._window_batches: dict[int, AdoptedRows] = {}
        """Batch of each request that went by a window and is not the dispatcher's."""
        self._window_wakeup: Nanoseconds = NEVER

    # The kernel's methods

    def arrive(self, number: int) -> None:
        """Tells the dispatcher of a request of one row."""
        requests = self.requests
        model = requests.models[requests.model_of[number]]
        deadline, texts = requests.deadlines[number], requests.texts
        if not self._windows.is_idle:
            if self._windows.offer(model, WindowRows(number, 1, deadline), self.now):
                self._look_at_windows()
                return
            self._look_at_windows()
        length = texts[number] if texts is not None else None
        request = RequestId(GATEWAY, number)
        self.tell(RequestArrived(request, model, 1, deadline, 0, (), length, texts is None))

    def happen(self, order: int, what: object) -> None:
        """Handles the end of a transfer or a compute, or the delivery of a report."""
        if isinstance(what, SimulatedBatch):
            self.ends += 1
            self._computed(what, self.now)
        elif isinstance(what, BatchTransfer):
            self.ends += 1
            self._transferred(what, self.now)
        elif isinstance(what, (StageStarted, StageReported, RequestCompleted)):
            self.tell(what)
        elif isinstance(what, SimulatedDevice):
            if what.running is None:
                self._compute_next(what, self.now)
        elif isinstance(what, SimulatedLink):
            if not what.busy:
                self._next_on(what, self.now)
        elif isinstance(what, _WindowWakeup):
            self._look_at_windows()

    def carry_out(self, commands: list[Command]) -> None:
        """Starts batches, and has requests rejected and batches forgotten."""
        for command in commands:
            if isinstance(command, DispatchBatch):
                self._dispatch(command, self.now)
            elif isinstance(command, Reject):
                self.requests.rejected(command.request.number, command.reason)
            elif isinstance(command, CancelBatch):
                self._cancel(command)
            elif isinstance(command, (GrantWindow, ExtendWindow, RevokeWindow)):
                self._take_window(command)

    def unanswered(self) -> int:
        return len(self.requests) - self.requests.ended

    def is_over(self) -> bool:
        """Returns whether every request has ended and no batch is under way."""
        return self.requests.ended == len(self.requests) and self.is_empty()

    # Orders

    def _dispatch(self, order: DispatchBatch, now: Nanoseconds) -> None:
        numbers: list[int] = []
        for part in order.slices:
            numbers.append(part.request.number)
            self.requests.dispatched(part.request.number)
        hops: list[BatchHop] = []
        for planned in order.path:
            device = self.devices[planned.agent]
            hops.append(BatchHop(device, device.costs[planned.partition], planned))
        job = SimulatedBatch(order.batch, [part.request for part in order.slices], hops, order.size)
        self._jobs[order.batch] = job
        cost = hops[0].cost
        if cost.first:
            model = self.requests.model_of[numbers[0]]
            self.batches[model] += 1
            self.rows_of[model] += len(numbers)
            self._ready(job, now)
        else:
            self._gather(job, numbers, now)

    def _cancel(self, order: CancelBatch) -> None:
        """Has a batch forgotten by the agents it has not reached."""
        job = self._jobs.pop(order.batch, None)
        if job is not None:
            job.cancelled = True

    # Windows, as the gateway uses them

    def _take_window(self, command: GrantWindow | ExtendWindow | RevokeWindow) -> None:
        windows, now = self._windows, self.now
        if isinstance(command, GrantWindow):
            batches = (command.first_batch, command.batches)
            window = DispatchWindow(
                command.window, command.model, command.hops, batches, command.most_wait_ns
            )
            windows.granted(window, now)
        elif isinstance(command, ExtendWindow):
            windows.extended(command.window, command.number, command.ends_ns, now)
        else:
            windows.revoked(command.window, command.lost, now)
        self._look_at_windows()

    def _look_at_windows(self) -> None:
        """Does what the gateway's windows ask for now."""
        now = self.now
        actions = self._windows.look(now)
        for order in actions.orders:
            self._send_by_window(order)
        for number in actions.submissions:
            adopted = self._window_batches.pop(number, None)
            if self.requests.finished_at[number] == 0:
                model = self.requests.models[self.requests.model_of[number]]
                in_flight = (adopted,) if adopted is not None else ()
                request = RequestId(GATEWAY, number)
                deadline = self.requests.deadlines[number]
                self.tell(RequestArrived(request, model, 1, deadline, 0, in_flight, None, True))
        for use in actions.reports:
            self._report_window(use)
        wakeup = self._windows.next_wakeup()
        if wakeup is None:
            self._window_wakeup = NEVER
        elif wakeup < self._window_wakeup or self._window_wakeup <= now:
            self._window_wakeup = max(wakeup, now + 1)
            self.at(self._window_wakeup, 0, _WindowWakeup())

    def _send_by_window(self, order: WindowOrder) -> None:
        batch, window = order.batch, order.window
        path = []
        for start, hop in zip(batch.starts_ns, window.hops, strict=True):
            compute = hop.compute_ns[batch.rows - 1]
            path.append(PlannedHop(hop.agent, hop.partition, start, compute))
        slices = []
        for row, each in enumerate(order.requests):
            slices.append(BatchSlice(RequestId(GATEWAY, each.request), 0, 1, row))
            adopted = AdoptedRows(batch.batch, 0, 1, batch.finish_ns)
            self._window_batches[each.request] = adopted
        self._dispatch(
            DispatchBatch(batch.batch, batch.rows, tuple(slices), tuple(path), batch.finish_ns),
            self.now,
        )

    def _report_window(self, use: WindowUse) -> None:
        self.tell(
            WindowReported(
                GATEWAY,
                use.model,
                use.window,
                use.number,
                use.first_batch,
                use.rows,
                use.requests,
                use.renew,
                use.busy_ns,
            )
        )

    # Transfers

    def _gather(self, job: SimulatedBatch, numbers: list[int], now: Nanoseconds) -> None:
        """Sends rows from where they are to the first hop of a batch without a reserved path."""
        senders: dict[SimulatedDevice, int] = {}
        for number in numbers:
            sender = self._located.pop(number)
            senders[sender] = senders.get(sender, 0) + 1
        receiver = job.hops[0].device
        job.transfers_left = len(senders)
        for sender, rows in senders.items():
            self._transfer(job, sender, receiver, rows * job.hops[0].cost.row_bytes, now)

    def _transfer(
        self,
        job: SimulatedBatch,
        sender: SimulatedDevice,
        receiver: SimulatedDevice,
        size: int,
        now: Nanoseconds,
    ) -> None:
        if sender is receiver or size == 0:
            self._arrived(job, now)
            return
        self._numbers += 1
        transfer = BatchTransfer(job, sender, receiver, size, self._numbers)
        up, down = sender.uplink, receiver.downlink
        entry = (transfer.urgency, self._numbers, transfer)
        insort(up.waiting, entry)
        insort(down.waiting, entry)
        if not (up.busy or down.busy):
            self._next_on(up, now)

    def _send(self, transfer: BatchTransfer, now: Nanoseconds) -> None:
        sender, receiver, job = transfer.sender, transfer.receiver, transfer.job
        sender.uplink.busy = receiver.downlink.busy = True
        length = transfer.length_ns
        if not self._transfer_noise.constant:
            length = max(1, int(length * self._transfer_noise.next()))
        if job.transfer_start < 0:
            job.transfer_start = now
        if 0 <= transfer.booked_ns != now:
            start = now + receiver.clock_error_ns
            self._report(StageStarted(job.batch, job.position, start, True), now)
        self.at(now + length, 0, transfer)

    def _transferred(self, transfer: BatchTransfer, now: Nanoseconds) -> None:
        up, down = transfer.sender.uplink, transfer.receiver.downlink
        up.busy = down.busy = False
        transfer.job.transfer_end = now
        self._next_on(up, now)
        if not down.busy:
            self._next_on(down, now)
        self._arrived(transfer.job, now)

    def _next_on(self, link: SimulatedLink, now: Nanoseconds) -> None:
        """Starts the most urgent transfer that can go by this link and delays none before it."""
        at = 0
        while at < len(link.waiting):
            entry = link.waiting[at]
            transfer = entry[2]
            up, down = transfer.sender.uplink, transfer.receiver.downlink
            if transfer.job.cancelled:
                self._remove(entry)
                continue
            at += 1
            if up.busy or down.busy:
                continue
            if transfer.earliest_ns > now:
                self._look_later(link, transfer.earliest_ns, now)
            elif self._delays_none(entry, now):
                self._remove(entry)
                self._send(transfer, now)
                return
            else:
                self._look_later(link, transfer.booked_ns, now)

    def _remove(self, entry: tuple[Nanoseconds, int, BatchTransfer]) -> None:
        transfer = entry[2]
        for link in (transfer.sender.uplink, transfer.receiver.downlink):
            del link.waiting[bisect_left(link.waiting, entry)]

    def _look_later(self, link: SimulatedLink, moment: Nanoseconds, now: Nanoseconds) -> None:
        if link.looks_at <= now or moment < link.looks_at:
            link.looks_at = moment
            self.at(moment, _LATER, link)

    def _delays_none(self, entry: tuple[Nanoseconds, int, BatchTransfer], now: Nanoseconds) -> bool:
        """Returns whether a transfer ends before those start that are booked before it."""
        transfer = entry[2]
        if transfer.booked_ns <= now:  # its own time has come, or it has none
            return True
        end = now + transfer.length_ns
        for link in (transfer.sender.uplink, transfer.receiver.downlink):
            for ahead in link.waiting:
                if ahead is entry:
                    break
                if not ahead[2].job.cancelled and now < ahead[2].booked_ns < end:
                    return False
        return True

    def _arrived(self, job: SimulatedBatch, now: Nanoseconds) -> None:
        job.transfers_left -= 1
        if job.transfers_left == 0 and not job.cancelled:
            self._ready(job, now)

    # Computing

    def _ready(self, job: SimulatedBatch, now: Nanoseconds) -> None:
        hop = job.hops[job.position]
        device = hop.device
        self._numbers += 1
        heappush(device.ready, (hop.reserved_ns, self._numbers, job))
        if device.running is None:
            self._compute_next(device, now)

    def _compute_next(self, device: SimulatedDevice, now: Nanoseconds) -> None:
        while device.ready:
            job = device.ready[0][2]
            hop = job.hops[job.position]
            if hop.earliest_ns > now and not job.cancelled and self._is_ahead(hop.behind, device):
                if device.looks_at <= now or hop.earliest_ns < device.looks_at:
                    device.looks_at = hop.earliest_ns
                    self.at(hop.earliest_ns, _LATER, device)
                return
            heappop(device.ready)
            if job.cancelled:
                continue
            length = job.hops[job.position].cost.compute_ns[job.size - 1]
            if not self._compute_noise.constant:
                length = max(1, int(length * self._compute_noise.next()))
            device.running = job
            job.compute_start = now
            if hop.reserved_ns != now:
                start = now + device.clock_error_ns
                self._report(StageStarted(job.batch, job.position, start, False), now)
            inside = min(now + length, self._duration) - now
            if inside > 0:
                device.busy_ns += inside
            self.at(now + length, 0, job)
            return

    def _is_ahead(self, batch: BatchId, device: SimulatedDevice) -> bool:
        """Returns whether a batch has yet to be computed on a device."""
        job = self._jobs.get(batch)
        if job is None:
            return False
        return any(hop.device is device for hop in job.hops[job.position :])

    def _computed(self, job: SimulatedBatch, now: Nanoseconds) -> None:
        hop = job.hops[job.position]
        device = hop.device
        device.running = None
        if job.cancelled:
            self._compute_next(device, now)
            return
        error = device.clock_error_ns
        sent = job.transfer_start >= 0
        report = StageReported(
            job.batch,
            job.position,
            job.compute_start + error,
            now + error,
            job.transfer_start + error if sent else None,
            job.transfer_end + error if sent else None,
        )
        self._report(report, now)
        if job.position + 1 < len(job.hops):
            job.position += 1
            job.transfer_start = job.transfer_end = -1
            job.transfers_left = 1
            following = job.hops[job.position]
            size = following.cost.row_bytes * job.size
            self._transfer(job, device, following.device, size, now)
        else:
            self._left(job, device, hop.cost.final, now)
        self._compute_next(device, now)

    def _left(
        self, job: SimulatedBatch, device: SimulatedDevice, final: bool, now: Nanoseconds
    ) -> None:
        """Ends a batch's path: its rows are answers, or wait on the device for another order."""
        self._jobs.pop(job.batch, None)
        for request in job.requests:
            if not final:
                self._located[request.number] = device
            elif self.requests.computed(request.number, now):
                by_window = self._window_batches.pop(request.number, None)
                if by_window is None:
                    self._report(RequestCompleted(request), now)
        if not self._windows.is_idle:
            self._windows.answered(job.batch, now)
            self._look_at_windows()

    def _report(self, event: Event, now: Nanoseconds) -> None:
        if self._delay:
            self.at(now + self._delay, 0, event)
        else:
            self.tell(event)
