"""Generation on the event loop: frames in and out, orders, and which sessions hold slots here.

    frame -> events -> GenerationLoopThread -> LoopOutput -> frames and messages

Invariants: a session is in `_openings` from the arrival of its opening until the generation loop
reports that it is gone. Every byte claimed for arrived rows is given back when the generation loop
reports it as consumed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from catenary_agent.generation.context import GenerationContext, GenerationLimits
from catenary_agent.generation.frames.cache_wire import CacheFrame
from catenary_agent.generation.frames.loan_wire import LentFrame, LoanFrame
from catenary_agent.generation.frames.members import FrameFilter
from catenary_agent.generation.frames.move_wire import MoveFrame
from catenary_agent.generation.frames.peers import PeerSender
from catenary_agent.generation.frames.receiving import FrameReceiver
from catenary_agent.generation.frames.sent_caches import SentCacheReporter
from catenary_agent.generation.frames.wire import frames_of
from catenary_agent.generation.loop.generation_loop import GenerationLoop
from catenary_agent.generation.loop.table import LoadedDecoder, LoadedDecoders
from catenary_agent.generation.loop.thread import GenerationLoopThread
from catenary_agent.generation.state.events import (
    CachePushed,
    CloseOrdered,
    EngineAnswered,
    EpochRaised,
    Event,
    GrammarCompiled,
    MoveMessage,
    RowsPushed,
    SessionOpened,
    SessionsBroken,
)
from catenary_agent.generation.state.reporting import record_move, record_session
from catenary_agent.generation.state.session import SessionSpec
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2
from catenary_services.errors import CatenaryError, Unavailable
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_agent.generation.frames.peers import SessionFrame
    from catenary_agent.generation.state.events import CacheOut, LoopOutput
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_services.domain.ids import PartitionKey
    from catenary_services.transport.interface import ReceivedFrame

_log = get_logger("catenary_agent.generation")

T = TypeVar("T")


class GenerationEngine:
    """Runs decoder partitions on sessions, one iteration after another."""

    def __init__(
        self, agent_id: str, context: GenerationContext, limits: GenerationLimits | None = None
    ) -> None:
        limits = limits or GenerationLimits()
        self.agent_id = agent_id
        self.chunk_tokens = limits.chunk_tokens
        """The most prompt tokens in one step."""
        self.prompt_pause_ns = limits.prompt_pause_ns
        self.decoders = LoadedDecoders()
        self.epoch = 0
        """The highest epoch seen; sessions of an older one may not begin here."""
        self._around = context
        self._members = FrameFilter()
        self._receiver = FrameReceiver(agent_id, context.held, self._members)
        self._sent = SentCacheReporter(context.tell)
        self._peers = PeerSender(
            context.hub,
            (limits.push_timeout_s, limits.max_waiting_bytes),
            self._header_of,
            self._undeliverable,
            context.uplink,
            self._sent,
        )
        self._peers.narrows = limits.narrows_rows
        links = self._peers.link_bytes
        self._generation_loop = GenerationLoop(
            agent_id,
            replace(limits, link_bytes=links, caches=replace(limits.caches, link_bytes=links)),
            time.monotonic_ns,
            self._batcher_closed,
            context.steps,
            validates=context.validates,
        )
        if context.uplink is None:  # caches in lent memory would pass by an emulated link
            self._generation_loop.migrations.lender.is_local = context.is_local
        self._thread = GenerationLoopThread(self._generation_loop, time.monotonic_ns, self._flush)
        self._openings: dict[int, frame_pb2.SessionOpening] = {}
        self.refused_frames = 0
        """The number of frames refused because their sender is no member of the session's rings."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread. Frames may arrive from now on."""
        self._thread.start()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stops after the current step and drops all sessions without a report. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not await self._thread.stop(timeout_s):
            _log.error("generation_thread_stuck", timeout_s=timeout_s)
        await self._peers.close()
        self._sent.close()

    async def failed(self) -> None:
        """Waits until cancelled; raises if the thread has crashed, which is a bug."""
        assert self._thread.crashed is not None
        await asyncio.shield(self._thread.crashed)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Returns True as soon as no session is held, False after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # -- what others see -------------------------------------------------------------------------

    @property
    def sessions(self) -> int:
        """Number of sessions in this agent."""
        return len(self._openings)

    @property
    def ignored(self) -> int:
        """Number of openings, rows and tokens that came late, twice or for no session."""
        return self._generation_loop.ignored

    @property
    def block_slots(self) -> tuple[int, int]:
        """The number of block slots in use, and the number of all block slots."""
        batchers = [each.batcher for each in self.decoders]
        used = sum(batcher.used_block_slots for batcher in batchers)
        return used, sum(batcher.executor.layout.block_slots for batcher in batchers)

    @property
    def kept_block_tokens(self) -> int:
        """Number of block tokens kept of sessions that are over, for others that begin alike."""
        return sum(each.batcher.kept.size for each in self.decoders)

    def snapshot(self) -> list[scheduler_pb2.SessionInAgent]:
        """Returns the sessions that hold slots here, for the hello to a scheduler."""
        return [
            scheduler_pb2.SessionInAgent(
                session_id=session_id,
                route=self._ring_of(opening),
                gateway_id=opening.gateway_id,
                request_id=opening.request_id,
            )
            for session_id, opening in self._openings.items()
        ]

    def report_holdings(self, number: int) -> None:
        """Sends a `HoldingsAnswer` behind all messages that were queued before."""
        if not self._closed:
            self.add_call(lambda: self._generation_loop.say_holdings(number))

    # -- frames and orders -----------------------------------------------------------------------

    @property
    def frame_kinds(self) -> Iterable[int]:
        """The kinds of frames that `on_frame` handles."""
        return self._receiver.kinds

    def on_frame(self, header: frame_pb2.FrameHeader, frame: ReceivedFrame) -> None:
        """Handles a frame of sessions, given with its decoded header."""
        if self._closed:
            frame.release()
        elif not self._receiver.admits(header, frame.sender):
            self.refused_frames += 1
            self._around.meter.frame_refused()
            _log.warning("frame_refused", sender=frame.sender.name, why="is no member of the ring")
            frame.release()
        else:
            self._post(self._receiver.events(header, frame, self.epoch))

    def _post(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, SessionOpened | MoveMessage) and isinstance(
                event.spec, SessionSpec
            ):
                self._note_opening(event.spec)
            self._thread.post(event)

    def _note_opening(self, spec: SessionSpec) -> None:
        self._openings.setdefault(spec.session_id, spec.opening)
        self._members.note(spec.session_id, spec.opening)
        self._idle.clear()

    def close_sessions(self, session_ids: Sequence[int]) -> None:
        """Ends sessions before the next step; the answer is a `SessionsClosed` message."""
        self._thread.post(CloseOrdered(tuple(session_ids)))

    def raise_epoch(self, epoch: int) -> None:
        """Refuses from now on sessions that schedulers before `epoch` begin here."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._thread.post(EpochRaised(epoch))

    def forget_epoch(self) -> None:
        """Accepts sessions of any scheduler until the next epoch is raised."""
        self.epoch = 0
        self._thread.post(EpochRaised(0))

    def grammar_compiled(self, session_id: int, problem: CatenaryError | None) -> None:
        """Lets a session compute that waited for its grammar, or fails it; on any thread."""
        self._thread.post(GrammarCompiled(session_id, problem))

    def engine_answered(self, session_ids: Sequence[int], problem: CatenaryError | None) -> None:
        """Lets sessions go on whose engine has their next tokens, or fails them; on any thread."""
        self._thread.post(EngineAnswered(session_ids, problem))

    # -- partitions ------------------------------------------------------------------------------

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which runs on the generation thread between two steps."""
        return await self.add_call(work)

    def add_call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queues `work` for the generation thread; calls run in the order they were added.

        Raises:
            Unavailable: The agent is stopping.
        """
        if self._closed:
            raise Unavailable("this agent is stopping")
        return self._thread.call(work)

    def add_decoder(self, loaded: LoadedDecoder) -> None:
        """Lets sessions begin on a loaded partition; an older one with its key is retired."""
        self.retire_decoder(loaded.key)
        self.decoders.add(loaded)
        self.add_call(lambda: self._generation_loop.add_batcher(loaded.batcher))

    def retire_decoder(self, key: PartitionKey) -> bool:
        """Lets no session begin on a partition any more; returns False if it is not loaded.

        The partition is closed with its last session.
        """
        loaded = self.decoders.leave(key)
        if loaded is not None and not self._closed:
            batcher = loaded.batcher
            self.add_call(lambda: self._generation_loop.retire_batcher(batcher))
        return loaded is not None

    def _batcher_closed(self, batcher: PartitionBatcher) -> None:
        """Called on the generation thread with a batcher whose executor was closed."""
        self._thread.on_loop(self.decoders.gone, batcher)

    # -- what comes out --------------------------------------------------------------------------

    def _flush(self, out: LoopOutput) -> None:
        """Sends on the event loop what a step produced; others wait for rows and tokens."""
        if self._closed:
            self._account(out)
            return
        for peer, frame in frames_of(
            out.rows, out.tokens, out.prompt_scores, out.prefixes, self._rows_left
        ):
            self._peers.send(peer, frame)
        for move in out.moves:
            self._peers.send(move.peer, MoveFrame(move))
        for cache in out.caches:
            self._peers.send(cache.cache_send.peer, CacheFrame(cache, self._pushed))
        for lent in out.lent:
            self._peers.send(lent.peer, LentFrame(lent))
        for loan in out.loans:
            self._peers.send(loan.peer, LoanFrame(loan))
        for piece in out.passed:
            self._sent.add(piece.peer, piece.nbytes, piece.taken_ns)
        for message in out.messages:
            self._around.tell(message)
        # The tasks that send the frames were scheduled before, so the frames leave first.
        asyncio.get_running_loop().call_soon(self._account, out)

    def _account(self, out: LoopOutput) -> None:
        """Gives memory back, forgets sessions that are gone, and counts."""
        for frame in out.consumed:
            frame.release()
        self._around.held.give_back(out.consumed_bytes)
        for spec in out.opened:
            self._note_opening(spec)
        for session_id in out.gone:
            self._openings.pop(session_id, None)
            self._members.forget(session_id)
        if not self._openings:
            self._idle.set()
        meter, tracer = self._around.meter, self._around.tracer
        meter.flowed_out(out)
        if tracer is not None and tracer.enabled:
            now = time.monotonic_ns()
            for session in out.ended:
                record_session(tracer, session, self.agent_id, now)
            for done in out.moved:
                record_move(tracer, done, self.agent_id)

    def _rows_left(self, session_id: int) -> None:
        self._thread.post(RowsPushed(session_id))

    def _pushed(self, cache: CacheOut) -> None:
        self._thread.post(CachePushed(cache))

    def _ring_of(self, opening: frame_pb2.SessionOpening) -> Sequence[common_pb2.Hop]:
        """Returns the ring of a session that this agent belongs to."""
        after = any(hop.agent_id == self.agent_id for hop in opening.decode_route)
        return opening.decode_route if after else opening.route

    def _header_of(self, frame: SessionFrame) -> bytes:
        return frame.header(self.epoch, self.agent_id, time.monotonic_ns())

    def _undeliverable(self, session_ids: tuple[int, ...], error: CatenaryError, peer: str) -> None:
        self._thread.post(SessionsBroken(session_ids, error, peer))
