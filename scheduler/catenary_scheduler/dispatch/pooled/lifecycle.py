"""The way from arrival to answer: what each event does to requests, batches and bookings."""

from __future__ import annotations

from catenary_scheduler.book.book import gpu_of
from catenary_scheduler.dispatch.breaker import AGENTS_OF_A_VERDICT, is_of_device
from catenary_scheduler.dispatch.events import (
    AdoptedRows,
    AgentJoined,
    AgentLost,
    BatchFailed,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
    StageReported,
    StageStarted,
    WindowReported,
)
from catenary_scheduler.dispatch.pooled.ledger import PooledLedger
from catenary_scheduler.dispatch.pooled.row_queue import RowQueue
from catenary_scheduler.dispatch.pooled.text_batches import least_size
from catenary_scheduler.dispatch.pooled.tracking import Batch, Request, RowRange
from catenary_scheduler.dispatch.pooled.windows import GrantedWindow
from catenary_services.domain.ids import AgentId, Nanoseconds, PartitionKey
from catenary_services.errors import (
    ComputeFailed,
    DeadlineExceeded,
    InvalidInput,
    NoActivePlan,
    Overloaded,
    PartitionLost,
    SloUnattainable,
    Unavailable,
)
from catenary_services.errors import RequestCancelled as CallerGone


class PooledLifecycle(PooledLedger):
    """Handlers of events, one small method each."""

    # Requests

    def arrived(self, event: RequestArrived) -> None:
        """Admits a request, or answers it at once."""
        self._heed_windows(event)
        known = self.tracker.requests.get(event.request)
        if known is not None:
            self._resubmitted(known, event)
            return
        self.counters["arrived_requests"] += 1
        refusal = self._refusal(event)
        if refusal is not None:
            self.counters["rejected_requests"] += 1
            self.commands.append(refusal)
            return
        self._sequence += 1
        request = Request(event, self.now, self._sequence)
        self.tracker.requests[event.request] = request
        self.tracker.set_timer(request, event.deadline_ns + self.config.deadline_grace_ns)
        row = 0
        for adopted in sorted(event.in_flight, key=lambda part: part.request_row):
            first = max(row, adopted.request_row)
            end = min(event.rows, adopted.request_row + adopted.rows)
            if first < end:
                self.enqueue(RowRange(request, row, first - row))
                self._adopt(RowRange(request, first, end - first), adopted)
                row = end
        self.enqueue(RowRange(request, row, event.rows - row))

    def completed(self, event: RequestCompleted) -> None:
        """Ends a request of which the gateway has every row."""
        request = self.tracker.requests.get(event.request)
        if request is not None:
            self.counters["completed_requests"] += 1
            self.forget(request, delivered=True)

    def cancelled(self, event: RequestCancelled) -> None:
        """Ends a request for which its client does not wait any more."""
        request = self.tracker.requests.get(event.request)
        if request is not None:
            self.counters["cancelled_requests"] += 1
            self.forget(request)

    def drop(self, head: RowRange, earliest_finish: Nanoseconds) -> None:
        """Drops a request of which no batch can meet the deadline (Algorithm 1, line 16)."""
        request = head.request
        late = earliest_finish - request.deadline
        if head.attempt:
            self.reject(
                request, PartitionLost.reason, "the work was lost and cannot be redone in time"
            )
            return
        hopeless = self._never_fits(request)
        self.reject(
            request,
            SloUnattainable.reason,
            f"would finish {late / 1e6:.3f} ms after its deadline",
            retry_after_ns=None if hopeless else max(1, late),
            earliest_finish_ns=earliest_finish,
        )

    def without_route(self, queue: RowQueue) -> bool:
        """Lets a queue wait, as long as that can help, while no pipeline of its model is whole.

        Returns:
            True if the queue waits now, False if its head was answered.
        """
        request = queue.head.request
        until = request.deadline - self.config.safety_margin_ns
        if until > self.now:
            queue.wake = until
            return True
        if self.routes.serves(queue.model):
            reason, message = Unavailable.reason, "no pipeline has an agent for every stage now"
        else:
            reason, message = NoActivePlan.reason, "no plan is active"
        self.reject(request, reason, message, retry_after_ns=self.config.retry_after_ns)
        return not queue

    # Batches

    def stage_reported(self, event: StageReported) -> None:
        """Corrects the book by a hop's real times; the last hop ends the batch's bookings."""
        of_window = self.windows.ids and self.windows.stage_reported(event)
        if of_window and event.batch not in self.tracker.batches:
            return
        last = self.book.last_position(event.batch)
        if event.transfer_start_ns is not None and event.transfer_end_ns is not None:
            self._correct(event, event.transfer_start_ns, event.transfer_end_ns, transfer=True)
        self._correct(event, event.compute_start_ns, event.compute_end_ns, transfer=False)
        batch = self.tracker.batches.get(event.batch)
        if batch is not None and len(self.breakers) and event.position < len(batch.partitions):
            at = event.position
            self.breakers.worked(batch.agents[at], batch.partitions[at], self.now)
        if batch is not None:
            batch.reported = max(batch.reported, event.position)
            if batch.agents:
                last = len(batch.agents) - 1
        if last is not None and event.position >= last:
            self.book.release(event.batch)
            if batch is not None and not batch.final:
                batch.final = True
                self._await_delivery(batch.requests())
        else:
            finish = self.book.finish(event.batch) or self.now
            self.book.confirm(event.batch, self.overdue_at(finish))

    def stage_started(self, event: StageStarted) -> None:
        """Moves what is booked for a transfer or a computation to its real start."""
        correction = self.book.correct(
            event.batch, event.position, event.start_ns, None, transfer=event.is_transfer
        )
        if correction is not None:
            self.counters["displaced_batches"] += len(correction.displaced)

    def batch_failed(self, event: BatchFailed) -> None:
        """Puts the rows of a failed batch back, or answers their requests with the failure."""
        window = self.windows.of_batch(event.batch)
        batch = self.tracker.batches.get(event.batch)
        if window is not None:
            self.windows.failed(window, self.now)
            if batch is None:
                self._device_failed_in(window, event)
        if batch is None:
            self.book.release(event.batch)
            return
        self.counters["failed_batches"] += 1
        if event.retryable:
            if event.agent is not None and is_of_device(event.reason):
                self._device_failed(batch, event.agent, event)
            if event.reason == CallerGone.reason:  # rows of others, which were not sent
                self.retry(batch, None, lost=False)
            else:
                self.retry(batch, event.agent)
            return
        self.cancel_on_agents(batch)
        requests = batch.requests()
        self.tracker.remove_batch(batch)
        self.book.release(batch.batch_id)
        for request in requests:
            self.reject(request, event.reason, event.message)

    def _device_failed_in(self, window: GrantedWindow, event: BatchFailed) -> None:
        """Counts a failure of a batch whose requests the gateway alone knows."""
        if event.agent is None or not is_of_device(event.reason):
            return
        for hop in window.grant.hops:
            if hop.agent == event.agent:
                evidence = event.batch
                self.breakers.failed(hop.agent, hop.partition, evidence, event.reason, self.now)

    def _device_failed(self, batch: Batch, agent: AgentId, event: BatchFailed) -> None:
        """Handles that an agent's device could not compute a batch.

        The agent is to blame, or a request: one that also fails elsewhere, and alone. See
        `RowQueue`.
        """
        evidence = batch.batch_id
        partition = batch.computed_by(agent)
        if partition is not None:
            self.breakers.failed(agent, partition, evidence, event.reason, self.now)
        for part in batch.rows:
            part.failures += ((agent, evidence),)
        for request in batch.requests():
            failures = [
                each for part in batch.rows if part.request is request for each in part.failures
            ]
            agents = sorted({agent for agent, _ in failures})
            if len(agents) >= AGENTS_OF_A_VERDICT:
                self.counters["failed_requests"] += 1
                self.breakers.forgive([each for _, each in failures], self.now)
                names = " and ".join(agents)
                message = f"it made {names} fail: {event.message}"
                self.reject(request, ComputeFailed.reason, message)

    # Windows

    def window_reported(self, event: WindowReported) -> None:
        """Lets a gateway go on with a window, or frees the time of one that it ends."""
        others = self.routes.contenders(event.model)
        may_go_on = (
            not self.queues.get(event.model)
            and not len(self.breakers)
            and all(self.windows.usage.is_quiet(other, self.now) for other in others)
        )
        self.windows.reported(event, may_go_on, self.now)
        if not event.renew:
            self.dirty.update(dict.fromkeys(self.queues))

    def wait_for_windows(self, queue: RowQueue) -> Nanoseconds | None:
        """Revokes the windows in the way of rows that would be late because of them.

        Returns:
            When to decide about the rows again; None if no window is in their way, or no time left.
        """
        deadline = queue.head.request.deadline
        if deadline <= self.now:
            return None
        others = self.routes.contenders(queue.model)
        in_the_way = self.windows.contended(queue.model, None, others, self.now)
        ends = [window.end_ns for window in in_the_way if window.end_ns > self.now]
        return min([deadline, *ends]) if ends else None

    def _heed_windows(self, event: RequestArrived) -> None:
        """Revokes the windows whose time a request may want; its gateway's own stays."""
        if not self.windows.longest_ns:
            return
        gateway = event.request.gateway
        self.windows.usage.arrived(event.model, gateway, self.now)
        if self.windows.active:
            others = self.routes.contenders(event.model)
            asks = None if event.priority else gateway
            self.windows.contended(event.model, asks, others, self.now)

    def on_time(self) -> None:
        """Handles everything whose time has come."""
        if self.windows.ids and self.windows.expire(self.now):
            self.dirty.update(dict.fromkeys(self.queues))
        for batch_id in self.book.expire(self.now):
            batch = self.tracker.batches.get(batch_id)
            if batch is not None:
                self.counters["overdue_batches"] += 1
                last = any(part.attempt + 1 >= self.config.max_attempts for part in batch.rows)
                if not last and self.may_retry_late():
                    self.retry(batch, batch.holder(), lost=False)
                else:
                    self._wait_on(batch)
        for request in self.tracker.due(self.now):
            last_moment = request.deadline + self.config.deadline_grace_ns
            if self.now >= last_moment:
                self.reject(
                    request,
                    DeadlineExceeded.reason,
                    "no result before the deadline",
                    details={"stage": "queue" if request.queued_rows else "in flight"},
                )
            elif request.computed:
                self.counters["undelivered_requests"] += 1
                self._redo(request)
            else:
                self.tracker.set_timer(request, last_moment)

    # Cluster

    def agent_joined(self, event: AgentJoined) -> None:
        """Handles an agent that joined: it serves in its pools once it has loaded their parts."""
        self.agents[event.agent.agent_id] = event.agent
        if not self.availability.is_connected(event.agent.agent_id):
            self.availability.connected(event.agent.agent_id)
        self._rebuild()

    def agent_lost(self, event: AgentLost) -> None:
        """Handles the loss of an agent: the batches it held or was to hold are dispatched again."""
        self.agents.pop(event.agent, None)
        self.windows.agent_lost(event.agent)
        if self.availability.is_connected(event.agent):
            self.availability.disconnected(event.agent)
        adopted = self.book.pending_on(gpu_of(event.agent))
        for batch in list(self.tracker.batches.values()):
            if not batch.rows:  # ended with another batch of its requests
                continue
            if batch.needs(event.agent) or (not batch.agents and batch.batch_id in adopted):
                self.retry(batch, event.agent)
        for batch_id in adopted:
            if batch_id not in self.tracker.batches:
                self.book.release(batch_id)
        self._rebuild()

    def look_around(self) -> None:
        """Makes routes anew if agents can be given other work than before, or take other times."""
        if (
            self.availability.version != self.availability_seen
            or self.times.version != self.times_seen
        ):
            self._rebuild()

    def plan_activated(self, event: PlanActivated) -> None:
        """Takes a plan: batches in flight finish by the old one, waiting rows use the new one."""
        self.plan = event.plan
        self._rebuild()
        for queue in list(self.queues.values()):
            if not self.routes.serves(queue.model):
                for request in queue.requests():
                    self.unserved(request)

    # Inside

    def _refusal(self, event: RequestArrived) -> Reject | None:
        if event.rows < 1:
            return Reject(
                event.request,
                InvalidInput.reason,
                "rows: must be at least 1",
                details={"field": "rows"},
            )
        if event.in_flight:  # an earlier scheduler admitted it
            return None
        config = self.config
        if self.plan is not None and not self.routes.serves(event.model):
            return Reject(
                event.request,
                NoActivePlan.reason,
                f"no plan serves {event.model}",
                retry_after_ns=config.retry_after_ns,
            )
        if event.deadline_ns <= self.now:
            return Reject(
                event.request,
                DeadlineExceeded.reason,
                "the deadline is over already",
                details={"stage": "arrival"},
            )
        queue = self.queues.get(event.model)
        queued = queue.rows if queue is not None else 0
        if (
            queued + event.rows > config.max_queued_rows
            or len(self.tracker.requests) >= config.max_requests
        ):
            return Reject(
                event.request,
                Overloaded.reason,
                f"{queued} rows of {event.model} wait already",
                retry_after_ns=config.retry_after_ns,
            )
        return None

    def _resubmitted(self, request: Request, event: RequestArrived) -> None:
        """Handles a request submitted again: its gateway never had batches it does not name."""
        heard_of = {part.batch for part in event.in_flight}
        for batch in list(request.batches.values()):
            if batch.batch_id not in heard_of and not batch.final:
                rows = self.tracker.detach(request, batch)
                self.drop_if_empty(batch)
                for part in rows:
                    self.enqueue(part)

    def _adopt(self, rows: RowRange, adopted: AdoptedRows) -> None:
        batch = self.tracker.batches.get(adopted.batch)
        if batch is not None:
            self.tracker.add_rows(batch, rows)
            return
        agents: tuple[AgentId, ...] = ()
        partitions: tuple[PartitionKey, ...] = ()
        window = self.windows.of_batch(adopted.batch)
        if window is not None:
            agents = tuple([hop.agent for hop in window.grant.hops])
            partitions = tuple([hop.partition for hop in window.grant.hops])
            if not self.agents.keys() >= set(agents):
                self.enqueue(rows)
                return
        overdue = self.overdue_at(max(adopted.expected_ns, self.now))
        if adopted.batch in self.book:
            self.book.confirm(adopted.batch, overdue)
        else:
            self.book.reserve(adopted.batch, (), overdue)
        self.tracker.add_batch(Batch(adopted.batch, [rows], agents, partitions))

    def _redo(self, request: Request) -> None:
        """Computes a request again whose results were lost on their way to the gateway."""
        rows = []
        for batch in list(request.batches.values()):
            rows += self.tracker.detach(request, batch)
            self.drop_if_empty(batch)
        self.tracker.set_timer(request, request.deadline + self.config.deadline_grace_ns)
        self.again(rows)

    def _wait_on(self, batch: Batch) -> None:
        """Gives a late batch more time, until the deadlines of its requests: late is not lost."""
        latest = max(request.deadline for request in batch.requests())
        self.book.reserve(batch.batch_id, (), latest + self.config.deadline_grace_ns + 1)

    def _await_delivery(self, requests: list[Request]) -> None:
        for request in requests:
            if request.computed:
                hard = request.deadline + self.config.deadline_grace_ns
                soft = self.now + self.config.delivery_grace_ns
                self.tracker.set_timer(request, min(hard, soft))

    def _correct(
        self, event: StageReported, start: Nanoseconds, end: Nanoseconds, *, transfer: bool
    ) -> None:
        correction = self.book.correct(event.batch, event.position, start, end, transfer=transfer)
        if correction is None:
            return
        counters = self.counters
        counters["displaced_batches"] += len(correction.displaced)
        if not transfer:
            drift = abs(correction.drift_ns)
            counters["corrections"] += 1
            counters["late_corrections"] += correction.drift_ns > 0
            counters["drift_ns_sum"] += drift
            counters["drift_ns_max"] = max(counters["drift_ns_max"], drift)

    def _never_fits(self, request: Request) -> bool:
        """True if the request's whole budget is less than the work of its first row."""
        head = RowRange(request, 0, 1)
        least = [
            route.chain.least_work_ns[least_size(head, route.units) - 1]
            for route in self.routes.of(request.model) or self.routes.shared_of(request.model)
        ]
        return request.arrived + min(least) > request.deadline

    def _rebuild(self) -> None:
        self.availability_seen = self.availability.version
        self.times_seen = self.times.version
        self.windows.revoke_all()
        self.routes.rebuild(self.plan, self.agents, self.now)
        self.misplaced = True
        self.dirty.update(dict.fromkeys(self.queues))
