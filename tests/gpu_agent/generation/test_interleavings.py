"""Rings without threads or transports: every order in which frames can arrive gives one result."""

from __future__ import annotations

import time
from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_protos.catenary.v1 import frame_pb2
from gpu_agent.generation import intake
from gpu_agent.generation.cache_wire import CacheFrame
from gpu_agent.generation.events import Broken, CachePushed, CloseOrdered
from gpu_agent.generation.lane import Lane
from gpu_agent.generation.ring import Ring
from gpu_agent.generation.session import Arrived
from gpu_agent.generation.surroundings import CacheLimits, GenerationLimits
from gpu_agent.generation.wire import StepFrame, frames_of
from services.errors import PartitionLost
from tests.support.ring_harness import BLOCKS, TABLE, opening, toy, undisturbed

CHAINS = [
    [("a", 0, 2), ("b", 2, 4), ("c", 4, BLOCKS)],
    [("d", 0, 3), ("b", 3, 4), ("c", 4, BLOCKS)],
    [("a", 0, 2), ("c", 2, BLOCKS)],
    [("c", 0, BLOCKS)],
    [("d", 0, 3), ("c", 3, BLOCKS)],
]
HANDED_OVER = [
    (CHAINS[0], [("e", 0, BLOCKS)]),
    (CHAINS[3], [("e", 0, 3), ("f", 3, BLOCKS)]),
    (CHAINS[1], [("e", 0, 1), ("f", 1, 5), ("g", 5, BLOCKS)]),
    ([("e", 0, 3), ("f", 3, BLOCKS)], CHAINS[0]),
]
"""The ring of the prompt, and the ring that generates."""
SLOTS = 40


class Copied:
    """A frame that arrived."""

    def __init__(self, payload: bytes) -> None:
        self.payload = memoryview(payload).toreadonly()
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


class World:
    """Seven agents, a gateway and the wires between them; the test says what happens next."""

    def __init__(self, chunk: int) -> None:
        self.decoders = {
            "a": toy(0, 2, slots=SLOTS),
            "b": toy(1, 4, 2, 3, slots=SLOTS),
            "c": toy(0, BLOCKS, 2, 3, 4, slots=SLOTS),
            "d": toy(0, 3, slots=SLOTS),
            "e": toy(0, 1, slots=SLOTS),
            "f": toy(1, BLOCKS, 3, slots=SLOTS),
            "g": toy(5, BLOCKS, slots=SLOTS),
        }
        small = CacheLimits(frame_bytes=2 * TABLE.cache_bytes_per_token, window_bytes=150)
        limits = GenerationLimits(chunk, caches=small)
        self.rings = {name: Ring(name, limits, time.monotonic_ns) for name in self.decoders}
        for name, ring in self.rings.items():
            ring.add_lane(Lane(self.decoders[name]))
        for name, last in (("e", 3), ("e", BLOCKS), ("f", 5)):
            decoder = self.decoders[f"{name}{last}"] = toy(
                0 if name == "e" else 1, last, slots=SLOTS
            )
            self.rings[name].add_lane(Lane(decoder))
        self.frames: list[Copied] = []
        self.wires: dict[tuple[str, str], deque[tuple[bytes, bytes]]] = {}
        self.tokens: dict[int, list[frame_pb2.SessionToken]] = {}
        self.consumed = dict.fromkeys(self.rings, 0)
        self.arrived = dict.fromkeys(self.rings, 0)
        self.failed: set[int] = set()
        self.closed: dict[int, set[str]] = {}

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

    def deliver(self, wire: tuple[str, str]) -> None:
        """Brings the oldest frame of a wire to its end."""
        data, payload = self.wires[wire].popleft()
        header = frame_pb2.FrameHeader.FromString(data)
        to = wire[1]
        if to == "gw-0":
            for token in header.session_tokens:
                self.tokens.setdefault(token.session_id, []).append(token)
            return
        arrived = Arrived(time.monotonic_ns())
        if header.kind == frame_pb2.FRAME_KIND_SESSION_TOKENS:
            events = intake.token_events(header, arrived, to, 1)
        elif header.kind == frame_pb2.FRAME_KIND_SESSION_CACHE:
            self._pushed(wire, header, len(payload))
            self.frames.append(Copied(payload))
            self.arrived[to] += len(payload)
            events = intake.cache_events(header, self.frames[-1], arrived, to, 1)
        else:
            rows = intake.rows_of_payload(header, memoryview(payload))
            self.arrived[to] += rows.nbytes
            events = intake.step_events(header, rows, arrived, to, 1)
        for event in events:
            self.rings[to].handle(event)
        self._collect(to)

    def cut(self, wire: tuple[str, str]) -> None:
        """Loses every frame of a wire; the sender notices."""
        lost = set()
        frames = list(self.wires[wire])
        headers = [frame_pb2.FrameHeader.FromString(data) for data, _ in frames]
        for header in headers:
            lost |= {each.session_id for each in (*header.session_rows, *header.session_tokens)}
            lost |= {header.cache.session_id} - {0}
        self.wires[wire].clear()
        self.rings[wire[0]].handle(Broken(tuple(lost), PartitionLost("gone"), wire[1]))
        for header, (_, payload) in zip(headers, frames, strict=True):
            self._pushed(wire, header, len(payload))
        self._collect(wire[0])

    def cut_one(self) -> None:
        for wire in [each for each in self.busy() if each[0] != "gw-0"][:1]:
            self.cut(wire)

    def busy(self) -> list[tuple[str, str]]:
        """Returns the wires that have frames."""
        return sorted(wire for wire, frames in self.wires.items() if frames)

    def ready(self) -> list[str]:
        return sorted(name for name, ring in self.rings.items() if ring.is_ready)

    def _put(self, sender: str, to: str, header: bytes, payload: bytes) -> None:
        self.wires.setdefault((sender, to), deque()).append((header, payload))

    def _pushed(self, wire: tuple[str, str], header: frame_pb2.FrameHeader, nbytes: int) -> None:
        if header.kind == frame_pb2.FRAME_KIND_SESSION_CACHE:
            self.rings[wire[0]].handle(CachePushed(header.cache.session_id, wire[1], nbytes))
            self._collect(wire[0])

    def _collect(self, agent: str) -> None:
        out = self.rings[agent].take_outflow()
        for peer, frame in frames_of(out.rows, out.tokens):
            payload = bytearray(frame.nbytes)
            if isinstance(frame, StepFrame):
                frame.fill(memoryview(payload))
            self._put(agent, peer, frame.header(1, agent), bytes(payload))
        for cache in out.caches:
            made = CacheFrame(cache, lambda _: None)
            payload = bytearray(made.nbytes)
            made.fill(memoryview(payload))
            self._put(agent, cache.peer, made.header(1, agent), bytes(payload))
        for frame in out.consumed:
            frame.release()
        self.consumed[agent] += out.consumed_bytes
        for notice in out.messages:
            message = notice.message()
            if message.WhichOneof("kind") == "session_failed":
                self.failed.add(message.session_failed.session_id)
            for session in message.sessions_closed.session_ids:
                self.closed.setdefault(session, set()).add(agent)

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
        for name, ring in self.rings.items():
            assert len(ring.sessions) == 0
            assert self.consumed[name] == self.arrived[name]
            assert not ring._pushing._lines
            assert not ring.sessions.out
        assert all(frame.releases == 1 for frame in self.frames)


Rings = tuple[list, list]


def drawn_sessions(data: st.DataObject) -> dict[int, tuple[Rings, list[int], int]]:
    """Returns rings, prompt and number of tokens by session."""
    count = data.draw(st.integers(1, 5))
    sessions = {}
    for session in range(1, count + 1):
        rings = data.draw(st.sampled_from([*((chain, []) for chain in CHAINS), *HANDED_OVER]))
        prompt = data.draw(st.lists(st.integers(0, 48), min_size=1, max_size=12))
        sessions[session] = (rings, prompt, data.draw(st.integers(1, 9)))
    return sessions


def opened(rings: Rings, prompt: list[int], count: int) -> frame_pb2.SessionOpening:
    return opening(rings[0], prompt, max_tokens=count, decode=rings[1])


def got_of(world: World, session: int) -> list[frame_pb2.SessionToken]:
    """Returns the tokens by position: those of two rings come over two wires."""
    return sorted(world.tokens.get(session, ()), key=lambda token: token.position)


def play(world: World, data: st.DataObject, acts: dict, moves: int) -> None:
    """Does some of the acts at moments of the data's choice, and some of what can happen."""
    waiting = list(acts.items())
    for _ in range(moves):
        choices: list[tuple[str, object]] = [("deliver", wire) for wire in world.busy()]
        choices += [("step", agent) for agent in world.ready()]
        if waiting:
            choices.append(("act", None))
        if not choices:
            return
        kind, what = data.draw(st.sampled_from(choices))
        if kind == "deliver":
            world.deliver(what)
        elif kind == "step":
            world.step(what)
        else:
            _, act = waiting.pop(0)
            act()
    for _, act in waiting:
        act()


SETTINGS = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)  # fmt: skip


@SETTINGS
@given(st.data(), st.integers(1, 6))
def test_in_any_order_of_arrivals_every_session_gets_the_tokens_it_gets_alone(data, chunk):
    world = World(chunk)
    sessions = drawn_sessions(data)
    opens = {
        session: lambda s=session, drawn=drawn: world.open(s, opened(*drawn))
        for session, drawn in sessions.items()
    }
    play(world, data, opens, 60)
    world.run_out()
    for session, (rings, prompt, count) in sessions.items():
        got = got_of(world, session)
        assert [token.token_id for token in got] == undisturbed(prompt, count)
        assert [t.position for t in got] == list(range(len(prompt), len(prompt) + count))
        assert [bool(token.finish_reason) for token in got] == [False] * (count - 1) + [True]
        if rings[1]:
            assert world.closed[session] >= {agent for agent, _, _ in rings[0]}
        for agent, _, _ in (*rings[0], *rings[1]):
            if agent not in world.closed.get(session, ()):
                world.close(agent, session)
    assert not world.failed
    world.assert_all_free()


@SETTINGS
@given(st.data(), st.integers(1, 6))
def test_cancelling_and_losing_sessions_leaves_the_others_and_frees_everything(data, chunk):
    world = World(chunk)
    sessions = drawn_sessions(data)
    cancelled = data.draw(st.sets(st.sampled_from(sorted(sessions))))
    acts: dict[tuple[str, int], object] = {}
    for session, drawn in sessions.items():
        acts["open", session] = lambda s=session, drawn=drawn: world.open(s, opened(*drawn))
        if session in cancelled:
            hops = [*drawn[0][0], *drawn[0][1]]
            for place, (agent, _, _) in enumerate(data.draw(st.permutations(hops))):
                acts[f"close {place}", session] = lambda s=session, a=agent: world.close(a, s)
    if data.draw(st.booleans()):
        acts["cut", 0] = world.cut_one
    order = data.draw(st.permutations(sorted(acts)))
    play(world, data, {key: acts[key] for key in order}, 80)
    world.run_out()
    hurt = cancelled | world.failed
    for session, (rings, prompt, count) in sessions.items():
        tokens = got_of(world, session)
        got = [token.token_id for token in tokens]
        expected = undisturbed(prompt, count)
        assert got == [expected[token.position - len(prompt)] for token in tokens]
        if session not in hurt and not any(key == ("cut", 0) for key in acts):
            assert got == expected
        for agent in {agent for ring in rings for agent, _, _ in ring}:
            world.close(agent, session)  # as the scheduler does where nobody said so
            assert agent in world.closed[session]
    world.run_out()
    world.assert_all_free()


@pytest.mark.parametrize("chain", CHAINS)
def test_frames_that_come_twice_change_nothing_but_the_session_they_belong_to(chain):
    world = World(4)
    world.open(1, opening(chain, [1, 2, 3, 4, 5], max_tokens=6))
    world.open(2, opening(CHAINS[0], [9, 8, 7], max_tokens=6))
    for _ in range(400):
        for wire in world.busy():
            frames = world.wires[wire]
            header = frame_pb2.FrameHeader.FromString(frames[0][0])
            ids = {e.session_id for e in (*header.session_rows, *header.session_tokens)}
            if ids == {1} and wire[1] != "gw-0":
                frames.appendleft(frames[0])
                world.deliver(wire)
            world.deliver(wire)
        for agent in world.ready():
            world.step(agent)
    assert [t.token_id for t in world.tokens[2]] == undisturbed([9, 8, 7], 6)
    assert world.failed <= {1}
    for agent in world.rings:
        world.close(agent, 1)
        world.close(agent, 2)
    world.assert_all_free()
