"""Rings without threads or transports: the test says which frame arrives next, and who computes."""

from __future__ import annotations

from collections import deque

from catenary_agent.generation.context import CacheLimits, GenerationLimits
from catenary_agent.generation.frames import intake
from catenary_agent.generation.frames.cache_wire import CacheFrame
from catenary_agent.generation.frames.loan_wire import LentFrame, LoanFrame
from catenary_agent.generation.frames.move_wire import MoveFrame
from catenary_agent.generation.frames.peers import Priority, SessionFrame
from catenary_agent.generation.frames.wire import StepFrame, frames_of
from catenary_agent.generation.loop.generation_loop import GenerationLoop
from catenary_agent.generation.state.events import (
    CacheLent,
    CacheOut,
    CachePushed,
    CloseOrdered,
    LoanMessage,
    RowsPushed,
    SessionsBroken,
)
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_agent.generation.state.session import ArrivalTime
from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from catenary_services.errors import PartitionLost
from tests.support.ring_harness import BLOCKS, TABLE, toy
from tests.support.small_models.lent_caches import ToyLending

SLOTS = 40
_BEGIN_NS = 1_000_000_000
_TICK_NS = 10_000


Wire = tuple[str, ...]
"""Sender and receiver, and "prompts" for those frames between them that the others overtake."""


class Copied:
    """A frame that arrived."""

    def __init__(self, payload: bytes) -> None:
        self.payload = memoryview(payload).toreadonly()
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


class World:
    """Seven agents, a gateway and the wires between them; the test says what happens next."""

    def __init__(
        self, chunk: int, period: int = 0, *, are_slow: bool = False, lends: bool = False
    ) -> None:
        """Begins without sessions.

        Args:
            chunk: The most prompt tokens of one step.
            period: Number of tokens after which answers repeat themselves, so that guesses are
                right; 0 if they do not.
            are_slow: Whether rows of prompts wait for every link, and all others overtake them.
                Frames of caches have one token of one block then.
            lends: Whether agents lend each other caches.
        """
        self.decoders = {
            "a": toy(0, 2, slots=SLOTS),
            "b": toy(1, 4, 2, 3, slots=SLOTS),
            "c": toy(0, BLOCKS, 2, 3, 4, slots=SLOTS),
            "d": toy(0, 3, slots=SLOTS),
            "e": toy(0, 1, slots=SLOTS),
            "f": toy(1, BLOCKS, 3, slots=SLOTS),
            "g": toy(5, BLOCKS, slots=SLOTS),
        }
        link_bytes = dict.fromkeys(self.decoders, 1) if are_slow else None  # any row is long
        small = CacheLimits(
            frame_bytes=(4 if lends else 2) * TABLE.cache_bytes_per_token,
            window_bytes=150,
            step_bytes=200,
            lent_bytes=32 * TABLE.cache_bytes_per_token if lends else 0,
            least_lent_bytes=1 if lends else 1 << 60,
            link_bytes=link_bytes,
        )
        limits = GenerationLimits(chunk, 3, caches=small, link_bytes=link_bytes)
        self.skipped_ns = 0
        self._clock_ns = _BEGIN_NS
        self.epoch = 1
        self.rings = {
            name: GenerationLoop(name, limits, self.now, validates=True) for name in self.decoders
        }
        for name, ring in self.rings.items():
            ring.add_batcher(PartitionBatcher(self.decoders[name]))
        for name, last in (("e", 3), ("e", BLOCKS), ("f", 5)):
            decoder = self.decoders[f"{name}{last}"] = toy(
                0 if name == "e" else 1, last, slots=SLOTS
            )
            self.rings[name].add_batcher(PartitionBatcher(decoder))
        self.memories: dict[bytes, bytearray] = {}
        """Everything that was lent."""
        for decoder in self.decoders.values():
            decoder.period = period
            if lends:
                decoder.lending = ToyLending(decoder, self.memories)
        for ring in self.rings.values():
            ring.migrations.lender.is_local = lambda agent: lends
        self.loans_failed = 0
        self.frames: list[Copied] = []
        self.wires: dict[Wire, deque[tuple[bytes, bytes, CacheOut | None]]] = {}
        self.tokens: dict[int, list[frame_pb2.SessionToken]] = {}
        self.consumed = dict.fromkeys(self.rings, 0)
        self.arrived = dict.fromkeys(self.rings, 0)
        self.right = self.wrong = 0
        """Numbers of guesses."""
        self.asked: list[tuple[int, int]] = []
        """Of each session: the tokens it began with, and those that sessions before had cached."""
        self.failed: set[int] = set()
        self.closed: dict[int, set[str]] = {}

    def now(self) -> int:
        """Returns what every clock says; a moment passes with each look, however slow the machine."""
        self._clock_ns += _TICK_NS
        return self._clock_ns + self.skipped_ns

    def open(self, session: int, made: frame_pb2.SessionOpening) -> None:
        entry = frame_pb2.SessionRows(session_id=session, opening=made)
        header = frame_pb2.FrameHeader(
            kind=frame_pb2.FRAME_KIND_SESSION_STEP, epoch=1, session_rows=[entry]
        )
        self._put("gw-0", made.route[0].agent_id, header.SerializeToString(), b"")

    def close(self, agent: str, session: int) -> None:
        self.rings[agent].handle(CloseOrdered((session,)))
        self._collect(agent)

    def step(self, agent: str) -> None:
        self.rings[agent].expire()
        self.rings[agent].step()
        self._collect(agent)

    def deliver(self, wire: Wire) -> None:
        """Brings the oldest frame of a wire to its end."""
        data, payload, cache = self.wires[wire].popleft()
        header = frame_pb2.FrameHeader.FromString(data)
        self._left(wire, header)
        to = wire[1]
        if to == "gw-0":
            for token in header.session_tokens:
                self.tokens.setdefault(token.session_id, []).append(token)
            return
        arrived = ArrivalTime(self.now())
        if header.kind == frame_pb2.FRAME_KIND_SESSION_TOKENS:
            events = intake.token_events(header, arrived, to, self.epoch)
        elif header.kind == frame_pb2.FRAME_KIND_SESSION_MOVE:
            events = [intake.move_said(header.move, arrived, to, (header.epoch, self.epoch))]
        elif header.kind == frame_pb2.FRAME_KIND_CACHE_LOAN:
            events = [LoanMessage(header.loan)]
        elif header.cache.HasField("lent"):
            cache = header.cache
            part = intake.span_of(cache)
            events = [CacheLent(cache.session_id, part, cache.datatype, cache.lent)]
        elif header.kind == frame_pb2.FRAME_KIND_SESSION_CACHE:
            self._pushed(wire[0], cache)
            self.frames.append(Copied(payload))
            self.arrived[to] += len(payload)
            events = intake.cache_events(header, self.frames[-1], arrived, to, self.epoch)
        else:
            rows = intake.rows_of_payload(header, memoryview(payload))
            self.arrived[to] += rows.nbytes
            events = intake.step_events(header, rows, arrived, to, self.epoch)
        for event in events:
            self.rings[to].handle(event)
        self._collect(to)

    def _left(self, wire: Wire, header: frame_pb2.FrameHeader) -> None:
        if wire[2:]:
            self.rings[wire[0]].handle(RowsPushed(header.session_rows[0].session_id))
            self._collect(wire[0])

    def cut(self, wire: Wire) -> None:
        """Loses every frame of a wire; the sender notices."""
        lost = set()
        frames = list(self.wires[wire])
        headers = [frame_pb2.FrameHeader.FromString(data) for data, _, _ in frames]
        for header in headers:
            lost |= {each.session_id for each in (*header.session_rows, *header.session_tokens)}
            lost |= {header.cache.session_id} - {0}
            if header.move.step != frame_pb2.SessionMove.STEP_GIVE_UP:
                lost |= {header.move.session_id} - {0}
        self.wires[wire].clear()
        self.rings[wire[0]].handle(SessionsBroken(tuple(lost), PartitionLost("gone"), wire[1]))
        for _, _, cache in frames:
            self._pushed(wire[0], cache)
        for header in headers:
            self._left(wire, header)
        self._collect(wire[0])

    def cut_one(self) -> None:
        for wire in [each for each in self.busy() if each[0] != "gw-0"][:1]:
            self.cut(wire)

    def busy(self) -> list[Wire]:
        """Returns the wires with frames that may arrive next: prompts behind all others."""
        wires = self.wires
        return sorted(
            each for each in wires if wires[each] and not (each[2:] and wires.get(each[:2]))
        )

    def ready(self) -> list[str]:
        """Returns the agents that have something to compute, or to copy."""
        return sorted(
            name for name, ring in self.rings.items() if ring.is_ready or ring.migrations.is_waiting
        )

    def _put(
        self, sender: str, to: str, header: bytes, payload: bytes, cache: CacheOut | None = None
    ) -> None:
        self._put_on((sender, to), header, payload, cache)

    def _put_on(
        self, wire: Wire, header: bytes, payload: bytes, cache: CacheOut | None = None
    ) -> None:
        self.wires.setdefault(wire, deque()).append((header, payload, cache))

    def _pushed(self, sender: str, cache: CacheOut | None) -> None:
        if cache is not None:
            self.rings[sender].handle(CachePushed(cache))
            self._collect(sender)

    def _header(self, frame: SessionFrame, agent: str) -> bytes:
        return frame.header(self.epoch, agent, self.now())

    def _collect(self, agent: str) -> None:
        out = self.rings[agent].take_outflow()
        for peer, frame in frames_of(out.rows, out.tokens, (), out.prefixes):
            payload = bytearray(frame.nbytes)
            if isinstance(frame, StepFrame):
                frame.fill(memoryview(payload))
            line = ("prompts",) if frame.priority is Priority.PROMPTS else ()
            wire = (agent, peer, *line)
            self._put_on(wire, self._header(frame, agent), bytes(payload))
        for move in out.moves:
            self._put(agent, move.peer, self._header(MoveFrame(move), agent), b"")
        for cache in out.caches:
            made = CacheFrame(cache, lambda _: None)
            payload = bytearray(made.nbytes)
            made.fill(memoryview(payload))
            peer = cache.cache_send.peer
            self._put(agent, peer, self._header(made, agent), bytes(payload), cache)
        for lent in out.lent:
            self._put(agent, lent.peer, self._header(LentFrame(lent), agent), b"")
        for loan in out.loans:
            self._put(agent, loan.peer, self._header(LoanFrame(loan), agent), b"")
        self.loans_failed += len(out.loans_failed)
        for frame in out.consumed:
            frame.release()
        self.consumed[agent] += out.consumed_bytes
        for _, asked, reused in out.asked:
            self.asked.append((asked, reused))
        for _, guesses, right in out.guesses:
            self.right += right
            self.wrong += guesses - right
        for notice in out.messages:
            message = notice.message()
            if message.WhichOneof("kind") == "session_failed":
                self.failed.add(message.session_failed.session_id)
            self.on_message(agent, message)
            for session in message.sessions_closed.session_ids:
                self.closed.setdefault(session, set()).add(agent)

    def on_message(self, agent: str, message: scheduler_pb2.AgentMessage) -> None:
        """Is what the scheduler hears."""

    def run_out(self) -> None:
        """Lets everything go on until nothing moves."""
        for _ in range(100_000):
            moved = [*self.busy()]
            for wire in moved:
                self.deliver(wire)
            ready = self.ready()
            for agent in ready:
                self.step(agent)
            if not moved and not ready:
                return
        raise AssertionError("it never comes to rest")

    def assert_all_free(self) -> None:
        for name, decoder in self.decoders.items():
            assert decoder.sessions == 0, name
            assert decoder.free_block_slots == SLOTS
        for ring in self.rings.values():
            ring.migrations.close()
        for decoder in self.decoders.values():
            assert decoder.lending is None or not decoder.lending.owned
        for name, ring in self.rings.items():
            assert len(ring.sessions) == 0
            assert self.consumed[name] == self.arrived[name]
            assert not ring.migrations.pushing.lines
            assert not ring.sessions.out
        assert all(frame.releases == 1 for frame in self.frames)
