"""The session plane under every order of starts, moves, tokens, losses, failures, reconnections."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_gateway.catalog import Catalog
from catenary_gateway.generation.plane import SessionPlane
from catenary_gateway.generation.request import (
    TEXT_COMPLETION,
    GenerationOptions,
    GenerationRequest,
)
from catenary_gateway.inference import RequestArrival
from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import PartitionLost, RequestCancelled
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.tracing import TraceContext, Tracer
from catenary_services.transport.acknowledgements import Lost
from generation_harness import generating
from small_models.text_here import codec_of
from small_models.tiny_tokenizer import tiny_tokenizer, tokens_of

ANSWER = "The quick brown fox — jumps."
PROMPT = tokens_of("Go: ")
TRUTH = PROMPT + tokens_of(ANSWER)
CODEC = codec_of(tiny_tokenizer())
KINDS = [
    "start",
    *["token"] * 4,
    "again",
    "skip",
    "fail",
    "reconnect",
    *["move", "hand over"] * 2,
    "overtake",
    "link lost",
]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), max_size=60)


class Slot:
    view = memoryview(bytearray())

    def release(self) -> None:
        pass


@dataclass
class Wires:
    """The hub, its one link, and the outbox: whatever was said, in order."""

    reachable: bool = True
    openings: list[tuple[int, frame_pb2.SessionOpening]] = field(default_factory=list)
    messages: list[scheduler_pb2.GatewayMessage] = field(default_factory=list)
    losses: list[Lost] = field(default_factory=list)
    """Told of openings that may not have arrived."""

    async def link_to(self, peer_id: str, timeout_s: float) -> Wires:
        if peer_id == "gone":
            raise PartitionLost("gone is in no directory")
        return self

    async def export(self, nbytes: int, timeout_s: float) -> Slot:
        return Slot()

    async def push(
        self, slot: Slot, header: bytes, timeout_s: float, lost: Lost | None = None
    ) -> None:
        if lost is not None:
            self.losses.append(lost)
        frame = frame_pb2.FrameHeader.FromString(header)
        if frame.HasField("move"):
            self.openings.append((frame.move.session_id, frame.move.opening))
            return
        (rows,) = frame.session_rows
        self.openings.append((rows.session_id, rows.opening))

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        self.messages.append(message)

    send_soon = send

    def said(self, kind: str) -> int:
        return sum(message.WhichOneof("kind") == kind for message in self.messages)


class World:
    """One generation, and the agents that were given it; each knows the truth by position only."""

    def __init__(self) -> None:
        self.wires = Wires()
        request_metrics = RequestMetrics("g", Metrics(), Tracer("t", "t"))
        self.plane = SessionPlane("g", self.wires, self.wires, request_metrics, itertools.count(7))
        catalog = Catalog()
        catalog.update(scheduler_pb2.ModelTable(models=[generating()]))
        sampling = SamplingParameters(max_tokens=200).resolved(len(PROMPT), 512, 1)
        request = GenerationRequest(
            catalog.find("tiny", ""),
            "id",
            TEXT_COMPLETION,
            array("I", PROMPT),
            sampling,
            CODEC,
            GenerationOptions(),
        )
        now = time.monotonic_ns()
        arrival = RequestArrival("m", now, time.time_ns(), TraceContext(1, 1, False), None)
        self.generation = self.plane.open(request, arrival)
        self.sessions = 0
        self.positions: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        """Where sessions stopped that were handed over."""
        self.moves: dict[int, int] = {}
        """Sessions on their way to another, by what they become."""

    async def start(self, agent: str, moved: int = 0) -> None:
        self.sessions += 1
        order = scheduler_pb2.StartSession(
            epoch=1,
            session_id=self.sessions,
            request_id=7,
            moved_session_id=moved,
            route=[common_pb2.Hop(agent_id=agent)],
        )
        if moved:
            self.moves[self.sessions] = moved
        self.plane.start(order)
        for _ in range(4):
            await asyncio.sleep(0)
        for session_id, opening in self.wires.openings:
            if session_id not in self.positions and session_id not in self.moves:
                ids = list(opening.token_ids)
                assert ids == TRUTH[: len(ids)], "an opening holds what the client has, exactly"
                self.positions[session_id] = len(ids)

    def hand_over(self, which: int) -> None:
        """A ring hands a session over; up to three of its tokens are still on their way."""
        for session_id, moved in self.moves.items():
            if moved in self.positions and moved not in self.ends:
                end = min(self.positions[moved] + which, len(TRUTH) - 1)
                self.ends[moved] = self.positions[session_id] = end
                return

    def token(self, session_id: int, position: int) -> None:
        if position >= self.ends.get(session_id, len(TRUTH)):
            return
        last = position == len(TRUTH) - 1
        token = frame_pb2.SessionToken(
            session_id=session_id,
            position=position,
            token_id=TRUTH[position],
            finish_reason="length" if last else "",
        )
        self.plane.tokens(frame_pb2.FrameHeader(session_tokens=[token]))

    async def happen(self, event: str, which: int) -> None:
        if event == "start":
            await self.start("gone" if which == 3 else "agent")
        elif event == "reconnect":
            self.plane.connected()
        elif event == "move":
            await self.start("gone" if which == 3 else "agent", moved=max(1, self.sessions - which))
        elif event == "hand over":
            self.hand_over(which)
        elif event == "link lost":
            for lost in self.wires.losses[-1 - which :]:
                lost(PartitionLost("nothing was acknowledged"))
        elif event == "overtake":
            await self.start("agent", moved=self.sessions)
            self.hand_over(which)
            self.token(self.sessions, self.positions.get(self.sessions, 0))
        elif self.positions:
            known = sorted(self.positions)
            session_id = known[-1 - which % len(known)]
            at = self.positions[session_id]
            if event == "token":
                self.token(session_id, at)
                self.positions[session_id] += 1
            elif event == "again":
                self.token(session_id, max(len(PROMPT), at - 1 - which))
            elif event == "skip":
                self.token(session_id, at + 1 + which)
            else:
                failure = common_pb2.Failure(reason="PARTITION_LOST", retryable=True)
                token = frame_pb2.SessionToken(session_id=session_id, position=at, failure=failure)
                self.plane.tokens(frame_pb2.FrameHeader(session_tokens=[token]))

    def check(self) -> None:
        plane = self.plane
        current = [s for s in plane._requests.values() if s.current is not None]
        assert len(plane._starts._sessions) == len(current)
        moving = [start for s in plane._requests.values() for start in s.successors]
        assert len(plane._starts._successors) == len(moving)
        assert set(plane._starts._deliveries) <= set(range(1, self.sessions + 1))


@given(EVENTS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_client_gets_every_token_once_and_in_order(
    events: list[tuple[str, int]], cancel: bool
) -> None:
    async def run() -> None:
        world = World()
        got = ""

        async def read() -> None:
            nonlocal got
            with world.generation as generation:
                while (piece := await generation.next()) is not None:
                    got += piece.text
                    assert ANSWER.startswith(got)

        reader = asyncio.create_task(read())
        for event, which in events:
            await world.happen(event, which)
            await asyncio.sleep(0)
            world.check()
        if cancel:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        elif not reader.done():
            # However it went, one more start brings it to its end.
            await world.start("agent")
            for position in range(world.positions[world.sessions], len(TRUTH)):
                world.token(world.sessions, position)
            await reader
        if not cancel:
            assert got == ANSWER
        await world.plane.close(RequestCancelled("over"))
        assert not world.plane._requests
        starts = world.plane._starts
        assert not starts._sessions
        assert not starts._successors
        assert not starts._deliveries
        assert world.wires.said("finished") + world.wires.said("cancel") == 1

    asyncio.run(run())


def test_an_opening_that_a_broken_link_may_have_lost_is_told_to_the_scheduler_once() -> None:
    async def run() -> None:
        world = World()
        await world.start("agent")
        await world.start("agent")
        first, second = world.wires.losses
        first(PartitionLost("of a start that was overtaken"))
        assert world.wires.said("session_failed") == 0
        second(PartitionLost("nothing was acknowledged"))
        second(PartitionLost("nothing was acknowledged"))
        [failed] = [
            each.session_failed
            for each in world.wires.messages
            if each.WhichOneof("kind") == "session_failed"
        ]
        assert (failed.session_id, failed.failure.reason) == (2, "PARTITION_LOST")
        assert failed.failure.retryable
        await world.start("agent")
        world.token(3, len(PROMPT))
        world.wires.losses[-1](PartitionLost("its opening has arrived: there is a token"))
        assert world.wires.said("session_failed") == 1
        await world.plane.close(RequestCancelled("over"))

    asyncio.run(run())
