"""The batch engine: everything that happens to a batch from the arrival of its frames on.

One object on one event loop, without locks. The life of a batch:

    frame -> BatchReceiver (checks, assembly) -> Feeder (order) -> ComputeThread -> OutputSender

Invariants: a batch is in exactly one of these places. It leaves by delivery, by cancellation or by
`BatchFailed`. In each case its payload memory, its staged output and its hold on the partition are
given back exactly once (`_close`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from catenary_agent.engine.batch import Batch, SchedulerClock
from catenary_agent.engine.computing.compute import ComputeThread
from catenary_agent.engine.computing.feeder import (
    ComputeJob,
    Feeder,
    Job,
    run_job,
    run_now,
    unstage,
)
from catenary_agent.engine.emulated_link import EmulatedLink
from catenary_agent.engine.inbound.arrivals import ArrivedFrame, BatchReceiver
from catenary_agent.engine.inbound.assembly import Assembler
from catenary_agent.engine.inbound.memory import HeldBatches
from catenary_agent.engine.meter import BatchMeter
from catenary_agent.engine.outbound import (
    DeliveryError,
    LinkHub,
    OutputSender,
    destinations,
    next_header,
)
from catenary_agent.engine.partitions import LoadedPartition, PartitionTable, key_of_hop
from catenary_agent.engine.reporting import (
    OutgoingMessage,
    batch_failed,
    record_spans,
    stage_begun,
    stage_done,
    transfer_begun,
)
from catenary_agent.supervision.faults import FaultInjector
from catenary_agent.supervision.steps import RunningSteps
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.errors import CatenaryError, InternalError
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_protos.catenary.v1.frame_pb2 import FrameHeader
    from catenary_services.telemetry.tracing import Tracer
    from catenary_services.transport.interface import ReceivedFrame

_log = get_logger("catenary_agent.engine")


_MOST_UNPUSHED_BATCHES = 4
"""Computed batches on their way out; more pause the device."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits on what an engine holds and how long it waits."""

    max_held_bytes: int = 1 << 30
    max_assemblies: int = 256
    push_timeout_s: float = 2.0
    emulated_link_bytes_per_second: int | None = None
    """Speed of an emulated link between agents; None if frames are not delayed."""
    faults: FaultInjector = field(default_factory=partial(FaultInjector, None))
    """Faults that tests inject into steps."""


class BatchEngine:
    """Runs partitions on batches in the order of their reservations."""

    def __init__(
        self,
        agent_id: str,
        hub: LinkHub,
        tell: Callable[[OutgoingMessage], None],
        limits: EngineLimits | None = None,
        tracer: Tracer | None = None,
        meter: BatchMeter | None = None,
    ) -> None:
        """Sends messages to the scheduler through `tell`, which must neither block nor raise."""
        limits = limits or EngineLimits()
        self.agent_id = agent_id
        self.partitions = PartitionTable(self._close_partition)
        self.steps = RunningSteps(limits.faults)
        """The steps that are being computed, also those of generation."""
        self._tell = tell
        self._tracer = tracer if tracer is not None and tracer.enabled else None
        self._meter = meter or BatchMeter()
        self._held = HeldBatches(limits.max_held_bytes)
        speed = limits.emulated_link_bytes_per_second
        self._link = None if speed is None else EmulatedLink(speed)
        self._outbound = OutputSender(hub, agent_id, limits.push_timeout_s, self._link)
        self._feeder = Feeder(self._outbound.stage, self._failed, _MOST_UNPUSHED_BATCHES, deque())
        self._feeder.begins = self._begins
        self._outbound.begins = self._sends
        self.clock = SchedulerClock()
        """The clock on which the times of batches are booked."""
        if not limits.faults.is_armed:  # a step that hangs must not hang the event loop
            self._feeder.compute_here = self._compute_here
        self._arrivals = BatchReceiver(
            agent_id,
            self.partitions,
            self._held,
            Assembler(limits.max_assemblies),
            (self._complete, self._failed),
        )
        self._arrivals.on_refused = self._meter.frame_refused
        self._thread: ComputeThread[Job] = ComputeThread(
            f"compute-{agent_id}", partial(run_job, steps=self.steps), self._computed
        )
        self.received_frames = 0
        """Number of frames that transports have delivered so far."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._crashed: asyncio.Future[None] | None = None
        self._closed = False

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the compute thread. Frames may arrive from now on."""
        self._thread.start()
        self._crashed = self._feeder.start(self._thread)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stops at once and drops all batches without a report. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._arrivals.close()
        self._feeder.close()
        if self._crashed is not None:
            self._crashed.cancel()
        if self._link is not None:
            self._link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if await self._thread.stop(timeout_s):
            await asyncio.sleep(0)  # lets the completions run that the thread has posted
            for batch in self._held:
                self._close(batch)
            for loaded in list(self.partitions):
                self.partitions.retire(loaded.key)
        else:
            # The memory of a running computation is never released; instead the process ends.
            _log.error("compute_thread_stuck", timeout_s=timeout_s)
        self._outbound.close()

    async def failed(self) -> None:
        """Raises if the engine has crashed, which is a bug; returns when it was closed."""
        assert self._crashed is not None
        await asyncio.wait([self._crashed])
        if not self._crashed.cancelled():
            self._crashed.result()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Returns True as soon as no batch is held, False after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._held.empty.wait()
        except TimeoutError:
            return False
        return True

    # -- what others see -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The highest epoch seen."""
        return self._arrivals.epoch

    def raise_epoch(self, epoch: int) -> None:
        """Refuses from now on first hops that schedulers before `epoch` have planned."""
        self._arrivals.epoch = max(self._arrivals.epoch, epoch)

    def forget_epoch(self) -> None:
        """Accepts first hops of any scheduler until the next epoch is raised."""
        self._arrivals.epoch = 0

    @property
    def held(self) -> HeldBatches:
        """The counter of received tensor bytes, shared by the whole agent."""
        return self._held

    @property
    def link(self) -> EmulatedLink | None:
        """The emulated network card; None if there is none."""
        return self._link

    @property
    def held_batches(self) -> int:
        """Number of batches in this agent."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes of received tensors that were not given back yet."""
        return self._held.nbytes

    @property
    def queued_batches(self) -> int:
        """Number of complete batches that wait for the device."""
        return len(self._feeder)

    @property
    def refused_frames(self) -> int:
        """Number of frames whose sender is not the one that their route names."""
        return self._arrivals.refused

    @property
    def ignored_frames(self) -> int:
        """Number of frames that were malformed, late duplicates, or of cancelled batches."""
        return self._arrivals.ignored

    def snapshot(self, *, computed: bool = False) -> list[scheduler_pb2.BatchInAgent]:
        """Returns descriptions of the batches that are not computed yet, for a new scheduler.

        Args:
            computed: Whether to include batches that are computed but have not left yet.
        """
        now = time.monotonic_ns()
        described = []
        for batch in self._held:
            if batch.ended_ns and not batch.computing and not computed:
                continue
            elapsed = now - batch.started_ns if batch.computing else 0
            described.append(
                scheduler_pb2.BatchInAgent(
                    batch_id=batch.batch_id,
                    position=batch.position,
                    running=batch.computing,
                    remaining_ns=max(0, batch.hop.reserved_duration_ns - elapsed),
                    route=batch.header.route,
                )
            )
        return described

    # -- orders ----------------------------------------------------------------------------------

    def hand_frames_to(
        self, handler: Callable[[FrameHeader, ReceivedFrame], None], kinds: Iterable[int]
    ) -> None:
        """Passes frames of these kinds, with their decoded headers, to `handler` from now on."""
        self._arrivals.others.update(dict.fromkeys(kinds, handler))

    def on_frame(self, frame: ReceivedFrame) -> None:
        """Handles a frame from a transport (a `FrameHandler`)."""
        if self._closed:
            frame.release()
            return
        self.received_frames += 1
        self._meter.received(frame.capabilities.transport, len(frame.payload))
        if self._link is None:
            self._arrivals.on_frame(frame)
        else:
            self._link.on_frame(frame, self._arrivals.on_frame)

    def cancel(self, batch_id: int) -> None:
        """Drops a batch and ignores rows of it that come later; a running computation continues."""
        self._held.remember_cancelled(batch_id)
        self._arrivals.cancel(batch_id)
        for batch in self._held.of(batch_id):
            batch.cancelled = True
            if batch.ended_ns == 0 and self._feeder.withdraw(batch):
                self._close(batch)
        self._feeder.passed(batch_id)

    def on_compute_thread(self, work: Callable[[], int]) -> asyncio.Future[int]:
        """Queues `work` for the compute thread, and returns the future of its result.

        It runs between two batches, after all work that was queued before.
        """
        step = ComputeJob(work, asyncio.get_running_loop().create_future())
        self._feeder.add_step(step)
        return step.done

    # -- the life of a batch ---------------------------------------------------------------------

    def _complete(self, batch: Batch) -> None:
        """Queues a batch of which every row has arrived."""
        batch.take_windows(self.clock)
        self._feeder.add(batch)

    def _begins(self, batch: Batch) -> None:
        begun = stage_begun(batch, time.monotonic_ns())
        if begun is not None:
            self._tell(begun)

    def _sends(self, batch: Batch) -> None:
        begun = transfer_begun(batch, time.monotonic_ns())
        if begun is not None:
            self._tell(begun)

    def _compute_here(self, batch: Batch) -> bool:
        """Computes and delivers a short batch, unless a step of sessions has the device."""
        turns = self.steps.turns
        if not turns.try_take():
            return False
        try:
            run_now(batch, self.steps)
        finally:
            turns.give_back()
        self._computed(batch)
        return True

    def _computed(self, job: Job) -> None:
        """Called on the event loop when a job is done."""
        self._feeder.finished(job)
        if isinstance(job, ComputeJob):
            if job.done.done():  # cancelled meanwhile
                return
            if job.error is not None:
                job.done.set_exception(job.error)
            else:
                job.done.set_result(job.result)
            return
        job.computing = False
        if self._closed:
            return
        self._held.give_back(job.release_inputs())
        if job.cancelled or job.error is not None:
            self._feeder.pushed()
            if job.error is not None and not job.cancelled:
                self._failed(job, job.error)
            else:
                self._close(job)
            return
        self._tell(stage_done(job))
        self._leave(job)

    def _leave(self, batch: Batch) -> None:
        """Delivers a computed batch, by a task of its own only if that has to wait."""
        try:
            if not self._outbound.try_deliver(batch):
                self._spawn(self._deliver(batch))
                return
            self._delivered(batch)
        except CatenaryError as error:
            self._report(batch.header, error, destinations(batch)[0].peer_id)
        except Exception:
            self._delivery_failed(batch)
        self._feeder.pushed()
        self._close(batch)

    async def _deliver(self, batch: Batch) -> None:
        """Delivers a computed batch, and reports the receivers that did not get their rows."""
        try:
            receiver = destinations(batch)[0]
            if receiver.slices is None and receiver.peer_id == self.agent_id:
                self._arrivals.on_outputs(next_header(batch, self.agent_id), batch.outputs)
            else:
                await self._outbound.deliver(batch)
            self._delivered(batch)
        except DeliveryError as error:
            for peer, cause in error.failures:
                self._report(batch.header, cause, peer)
        except Exception:
            self._delivery_failed(batch)
        finally:
            self._feeder.pushed()
            self._close(batch)

    def _delivered(self, batch: Batch) -> None:
        self._meter.delivered(batch, sent_ns := time.monotonic_ns())
        if self._tracer is not None:
            record_spans(self._tracer, batch, self.agent_id, sent_ns)

    def _delivery_failed(self, batch: Batch) -> None:
        _log.exception("delivery_failed", batch_id=batch.batch_id)
        cause = InternalError("the outputs could not be delivered")
        self._report(batch.header, cause, self.agent_id)

    def _failed(self, subject: Batch | ArrivedFrame, error: CatenaryError) -> None:
        """Ends a batch without a result."""
        header = subject.header
        if isinstance(subject, Batch):
            self._close(subject)
        else:
            self._held.remember_gone((header.batch_id, header.position))
        self._report(header, error, self.agent_id)

    def _report(self, header: FrameHeader, error: CatenaryError, blamed: str) -> None:
        known = (
            self.partitions.get(key_of_hop(header.route[header.position]))
            if (header.position < len(header.route))
            else None
        )
        _log.warning(
            "batch_failed",
            batch_id=header.batch_id,
            position=header.position,
            reason=error.reason,
            error=error.message,
            blamed=blamed,
        )
        # Only names of loaded models become labels, so wrong frames cannot create endless labels.
        self._meter.failed(known.key.model.name if known else "", error.reason)
        self._tell(batch_failed(header.batch_id, header.position, error, blamed))

    def _close(self, batch: Batch) -> None:
        """Releases everything a batch holds."""
        if batch.payloads:
            self._held.give_back(batch.release_inputs())
        batch.outputs = ()
        unstage(batch)
        if batch.identity in self._held:
            self._held.remove(batch)
            self.partitions.let_go(batch.partition)

    def _close_partition(self, loaded: LoadedPartition) -> None:
        _log.info("partition_unloaded", partition=str(loaded.key))
        try:
            loaded.executor.close()
        except Exception:
            _log.exception("partition_close_failed", partition=str(loaded.key))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
