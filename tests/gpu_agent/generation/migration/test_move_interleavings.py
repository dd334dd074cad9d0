"""Live migration in every order of arrivals: each token once, whatever comes late or gets lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_agent.generation.state.events import EpochRaised
from tests.support.ring_harness import BLOCKS, SECOND_NS, begin_frame, opening, undisturbed
from tests.support.small_models.ring_world import World

CHAINS = [
    [("a", 0, 2), ("b", 2, 4), ("c", 4, BLOCKS)],
    [("d", 0, 3), ("b", 3, 4), ("c", 4, BLOCKS)],
    [("a", 0, 2), ("c", 2, BLOCKS)],
    [("c", 0, BLOCKS)],
    [("d", 0, 3), ("c", 3, BLOCKS)],
    [("e", 0, BLOCKS)],
    [("e", 0, 3), ("f", 3, BLOCKS)],
    [("e", 0, 1), ("f", 1, 5), ("g", 5, BLOCKS)],
]
SPLIT = [([("c", 0, BLOCKS)], CHAINS[6]), (CHAINS[1], CHAINS[7])]
BUDGET_NS = 1000 * SECOND_NS


OFTEN = [6, pytest.param(300, marks=pytest.mark.system)]


def examples(count: int):
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, deadline=None, suppress_health_check=slow)


@dataclass
class Request:
    """One answer, and the sessions that made it, one after another."""

    prompt: list[int]
    count: int
    chains: dict[int, list]
    """By session."""
    current: int
    plan: list[tuple[list, bool]]
    """Where it is to move next, and whether by tokens."""
    moving: int | None = None
    dropped: set[int] = field(default_factory=set)
    """Moves that failed."""
    prompt_ring: list = field(default_factory=list)
    """Split phase: where the first session runs its prompt."""
    is_lost: bool = False
    """Nobody generates any more: the scheduler would start it again."""

    def agents(self, session: int) -> set[str]:
        """Returns who may hold slots of a session."""
        also = self.prompt_ring if session == min(self.chains) else []
        return {hop[0] for hop in (*self.chains[session], *also)}


class Cluster(World):
    """Adds a scheduler and a gateway that move sessions."""

    def __init__(
        self, chunk: int, period: int = 0, *, are_slow: bool = False, lends: bool = False
    ) -> None:
        super().__init__(chunk, period, are_slow=are_slow, lends=lends)
        self.period = period
        self.requests: dict[int, Request] = {}
        self.orders: list[tuple[str, int]] = []
        """Sessions to be closed, at agents."""

    def start(self, session: int, request: Request, rings: tuple[list, list]) -> None:
        made = opening(
            rings[0], request.prompt, max_tokens=request.count, decode=rings[1], budget_ns=BUDGET_NS
        )
        self.open(session, made)
        self.requests[session] = request

    def begin(self, number: int) -> bool:
        """Begins the next move of a request; False if it cannot."""
        request = self.requests[number]
        if not request.plan or request.moving is not None or request.is_lost:
            return False
        chain, by_tokens = request.plan.pop(0)
        made = opening(chain, request.prompt, max_tokens=request.count, budget_ns=BUDGET_NS)
        made.token_ids.extend(self.answer(number))
        session = max(request.chains) + 100
        request.chains[session], request.moving = chain, session
        moved = request.current
        header = begin_frame(session, moved, made, by_tokens=by_tokens, epoch=self.epoch)
        leader = request.chains[moved][0][0]
        self._put("gw-0", leader, header.SerializeToString(), b"")
        return True

    def answer(self, number: int) -> list[int]:
        """Returns the tokens of a request without a gap, and checks that none came twice."""
        request = self.requests[number]
        came = [token for session in request.chains for token in self.tokens.get(session, ())]
        by_position = {token.position: token.token_id for token in came}
        assert len(by_position) == len(came)
        first = len(request.prompt)
        got = []
        while first + len(got) in by_position:
            got.append(by_position[first + len(got)])
        return got

    def on_message(self, agent, message) -> None:
        kind = message.WhichOneof("kind")
        if kind == "session_moved":
            moved = message.session_moved
            request = self.request_of(moved.moved_session_id)
            if moved.session_id in request.dropped:  # it failed before this was heard
                request.is_lost = True
            request.current, request.moving = moved.session_id, None
            self.order_close(moved.moved_session_id, but=agent)
        elif kind == "session_failed":
            session = message.session_failed.session_id
            request = self.request_of(session)
            self.order_close(session)
            if session == request.moving:
                request.dropped.add(session)
                request.moving = None
            elif session == request.current:
                request.is_lost = True

    def request_of(self, session: int) -> Request:
        return next(each for each in self.requests.values() if session in each.chains)

    def order_close(self, session: int, but: str = "") -> None:
        request = self.request_of(session)
        agents = request.agents(session) - {but}
        self.orders += [(agent, session) for agent in sorted(agents)]

    def pass_time(self) -> None:
        self.skipped_ns += 31 * SECOND_NS
        for agent in self.rings:
            self.rings[agent].expire()
            self._collect(agent)

    def obey(self) -> None:
        while self.orders:
            self.close(*self.orders.pop(0))

    def run_out(self) -> None:
        super().run_out()
        while self.orders:
            self.obey()
            super().run_out()


def drawn_requests(data: st.DataObject) -> dict[int, tuple[Request, tuple[list, list]]]:
    requests = {}
    for number in range(1, data.draw(st.integers(1, 4)) + 1):
        ways = [*((chain, []) for chain in CHAINS), *SPLIT]
        rings = data.draw(st.sampled_from(ways))
        prompt = data.draw(st.lists(st.integers(0, 48), min_size=1, max_size=12))
        count = data.draw(st.integers(1, 40))
        plan = data.draw(
            st.lists(st.tuples(st.sampled_from(CHAINS), st.booleans()), min_size=1, max_size=3)
        )
        chains = {number: rings[1] or rings[0]}
        request = Request(prompt, count, chains, number, plan)
        request.prompt_ring = rings[0] if rings[1] else []
        requests[number] = (request, rings)
    return requests


def starts(world: Cluster, drawn: dict[int, tuple[Request, tuple[list, list]]]) -> list:
    """Returns what starts each of the requests that were drawn."""
    return [
        lambda n=number, r=request, rings=rings: world.start(n, r, rings)
        for number, (request, rings) in drawn.items()
    ]


def losses(world: Cluster, data: st.DataObject, drawn: dict[int, Any]) -> list:
    """Returns what ends requests, cuts wires, passes time and raises the epoch."""
    acts = [
        lambda n=number: n in world.requests and cancel(world, n)
        for number in data.draw(st.sets(st.sampled_from(sorted(drawn))))
    ]
    acts += [world.cut_one] * data.draw(st.integers(0, 2))
    acts += [world.pass_time] * data.draw(st.integers(0, 1))
    return acts + [lambda: raise_epoch(world)] * data.draw(st.integers(0, 1))


def play(world: Cluster, data: st.DataObject, acts: list, steps: int) -> None:
    """Does one thing after another that can happen, as the data chooses."""
    for _ in range(steps):
        choices: list = [(world.deliver, wire) for wire in world.busy()]
        choices += [(world.step, agent) for agent in world.ready()]
        choices += [(world.begin, number) for number in world.requests]
        if world.orders:
            choices.append((lambda order: world.close(*order), world.orders[0]))
        if acts:
            choices.append((lambda act: act(), acts[0]))
        if not choices:
            return
        what, which = data.draw(st.sampled_from(choices))
        if acts and which is acts[0]:
            acts.pop(0)
        elif world.orders and which is world.orders[0]:
            world.orders.pop(0)
        what(which)
    for act in acts:
        act()


def finish(world: Cluster) -> None:
    """Moves whatever still can be moved, and lets all come to an end."""
    world.run_out()
    for number, request in world.requests.items():
        for session in request.chains:
            for agent in request.agents(session):
                if agent not in world.closed.get(session, ()):
                    world.close(agent, session)
        expected = undisturbed(request.prompt, request.count, period=world.period)
        got = world.answer(number)
        assert got == expected[: len(got)]
    world.run_out()
    world.assert_all_free()


READS_AND_MOVES_ON = """
    gw-0>a a a>c c c>a c>gw-0 a a>c ! gw-0>a a>e a>f a>g e>a f>a g>a a>e a>f a>g c c>a c>gw-0 a a>c
    c c>a c>gw-0 a a>c c c>a c>gw-0 a a>c c c>a c>gw-0 a a>c e e>a e>f f f>a f>g g g>a c c>a a>e a>f
    a>g ! c>gw-0 gw-0>e - e e e e
"""
"""Frames that arrive (from>to), agents that compute, moves that begin (!), sessions closed (-)."""


def test_a_session_that_still_reads_its_tokens_is_not_handed_over() -> None:
    """It comes to a ring with six tokens to read, three in a step, and is to move on at once."""
    world = Cluster(3)
    request = Request([0], 7, {1: CHAINS[2]}, 1, [(CHAINS[7], True), (CHAINS[5], True)])
    world.start(1, request, (CHAINS[2], []))
    for event in READS_AND_MOVES_ON.split():
        match event:
            case "!":
                assert world.begin(1)
            case "-":
                world.close(*world.orders.pop(0))
            case _ if ">" in event:
                sender, receiver = event.split(">")
                world.deliver((sender, receiver))
            case _:
                world.step(event)
    finish(world)
    assert not request.is_lost
    assert len(world.answer(1)) == request.count


@pytest.mark.parametrize("count", OFTEN)
def test_whatever_moves_and_in_any_order_every_answer_is_whole(count):
    @examples(count)
    @given(st.data(), st.integers(1, 6))
    def every_answer_is_whole(data, chunk):
        world = Cluster(
            chunk, data.draw(st.sampled_from([0, 2, 3])), are_slow=data.draw(st.booleans())
        )
        play(world, data, starts(world, drawn_requests(data)), 120)
        finish(world)
        for number, request in world.requests.items():
            assert not request.is_lost
            assert len(world.answer(number)) == request.count

    every_answer_is_whole()


@pytest.mark.parametrize("count", OFTEN)
def test_what_is_lost_while_sessions_move_is_never_said_wrong_and_all_comes_free(count):
    @examples(count)
    @given(st.data(), st.integers(1, 6))
    def nothing_wrong_is_said(data, chunk):
        world = Cluster(
            chunk, data.draw(st.sampled_from([0, 2, 3])), are_slow=data.draw(st.booleans())
        )
        drawn = drawn_requests(data)
        acts = starts(world, drawn) + losses(world, data, drawn)
        play(world, data, data.draw(st.permutations(acts)), 150)
        finish(world)

    nothing_wrong_is_said()


def cancel(world: Cluster, number: int) -> None:
    """The client is gone: everything of its request is closed."""
    request = world.requests[number]
    request.is_lost = True
    for session in request.chains:
        world.order_close(session)


def raise_epoch(world: Cluster) -> None:
    """A newer scheduler leads."""
    world.epoch += 1
    for agent, ring in world.rings.items():
        ring.handle(EpochRaised(world.epoch))
        world._collect(agent)
