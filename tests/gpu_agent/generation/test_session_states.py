"""States of a session at an agent: the lives it can have, their causes, and what is no life."""

from __future__ import annotations

import re

import pytest

from catenary_agent.generation.context import GenerationLimits
from catenary_agent.generation.loop.generation_loop import GenerationLoop
from catenary_agent.generation.state.events import (
    CloseOrdered,
    LoopCall,
    MoveMessage,
    SessionOpened,
    TokenArrived,
)
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_agent.generation.state.session import ArrivalTime, Session, SessionSpec
from catenary_agent.generation.state.states import (
    FIRST_STATES,
    ROUND,
    TRANSITIONS,
    History,
    InvalidTransitionError,
    SessionState,
)
from catenary_protos.catenary.v1 import frame_pb2
from tests.support.ring_harness import BLOCKS, begin_frame, opening, toy, undisturbed
from tests.support.small_models.ring_world import World

ALONE = [("c", 0, BLOCKS)]
RING = [("a", 0, 2), ("b", 2, 4), ("c", 4, BLOCKS)]
OTHER = [("e", 0, 3), ("f", 3, BLOCKS)]
PROMPT = [3, 14, 15, 9, 26, 5]
FAR = 1 << 62

S = SessionState
GENERATES = [S.WAITING, S.QUEUED, S.COMPUTING]


class Watched(World):
    """Notes the states of every session of every agent."""

    def __init__(self) -> None:
        super().__init__(4)
        self.lives: dict[tuple[str, int], list[SessionState]] = {}
        self.changes: set[tuple[SessionState | None, SessionState]] = set()
        for name, ring in self.rings.items():
            ring.sessions.go = self._noting(name, ring.sessions.go)  # type: ignore[method-assign]

    def _noting(self, agent, go):
        def noted(session: Session, state: SessionState) -> None:
            first = session.state
            go(session, state)
            self.lives.setdefault((agent, session.spec.session_id), [first]).append(state)
            self.changes.add((first, state))

        return noted

    def life(self, agent: str, session: int) -> list[SessionState]:
        """Returns the states, each turn of the ring only once."""
        short: list[SessionState] = []
        for state in self.lives[agent, session]:
            short.append(state)
            while short[-3:] == GENERATES and short[-6:-3] == GENERATES:
                del short[-3:]
        return short

    def start(self, ring, count: int = 6, decode=()) -> None:
        self.open(1, opening(ring, PROMPT, max_tokens=count, decode=decode))

    def move(self, *, by_tokens: bool, session: int = 1) -> None:
        made = opening(OTHER, PROMPT, max_tokens=40, budget_ns=FAR // 4)
        header = begin_frame(session + 10, session, made, by_tokens=by_tokens)
        self._put("gw-0", "a", header.SerializeToString(), b"")

    def turn(self, times: int) -> None:
        """Lets everything happen once, some times over."""
        for _ in range(times):
            for wire in self.busy():
                self.deliver(wire)
            for agent in self.ready():
                self.step(agent)


def test_a_session_alone_is_queued_again_after_every_step() -> None:
    world = Watched()
    world.start(ALONE)
    world.run_out()
    assert world.life("c", 1) == [*GENERATES, S.CLOSED]


def test_every_hop_of_a_ring_waits_for_the_others() -> None:
    world = Watched()
    world.start(RING)
    world.run_out()
    for agent in "ab":
        world.close(agent, 1)
    assert world.life("a", 1) == [*GENERATES, S.WAITING, S.CLOSED]
    assert world.life("b", 1) == [*GENERATES, S.WAITING, S.CLOSED]
    assert world.life("c", 1) == [*GENERATES, S.CLOSED]


def test_a_prefill_ring_leaves_and_a_decode_ring_receives() -> None:
    world = Watched()
    world.start(RING, decode=[("e", 0, 1), ("f", 1, 5), ("g", 5, BLOCKS)])
    world.run_out()
    for agent in "abc":
        assert world.life(agent, 1) == [*GENERATES, S.LEAVING, S.CLOSED]
    assert world.life("e", 1)[:5] == [S.AWAITING_TOKEN, S.RECEIVING, *GENERATES]
    assert world.life("f", 1)[:4] == [S.RECEIVING, *GENERATES]
    assert world.life("g", 1)[:5] == [S.AWAITING_TOKEN, S.RECEIVING, *GENERATES]


@pytest.mark.parametrize("by_tokens", [False, True])
def test_a_session_that_moves_leaves_its_ring_and_begins_on_the_other(by_tokens: bool) -> None:
    world = Watched()
    world.start(RING, 40)
    world.turn(8)
    world.move(by_tokens=by_tokens)
    world.run_out()
    for agent in "bc":
        world.close(agent, 1)
    world.run_out()
    assert world.life("a", 1)[-2:] == [S.LEAVING, S.CLOSED]
    expected = [S.MIGRATING_IN, *GENERATES] if by_tokens else [S.MIGRATING_IN, S.RECEIVING]
    for agent in "ef":
        assert world.life(agent, 11)[: len(expected)] == expected
    got = [token.token_id for each in (1, 11) for token in world.tokens[each]]
    assert got == undisturbed(PROMPT, 40)


def first_states(world: Watched, name: SessionState) -> str:
    """Opens session 1 so that one agent has it in one of the first states; returns the agent."""
    if name in (S.AWAITING_TOKEN, S.RECEIVING):
        made = opening(RING, PROMPT, decode=[("e", 0, 1), ("f", 1, 5), ("g", 5, BLOCKS)])
        agent, hop = ("e", 0) if name is S.AWAITING_TOKEN else ("f", 1)
        world.rings[agent].handle(
            SessionOpened(SessionSpec(1, made, hop, FAR, "decode"), ArrivalTime(world.now()))
        )
    elif name is S.MIGRATING_IN:
        agent, made = "f", opening(OTHER, PROMPT, max_tokens=9)
        move = begin_frame(1, 9, made).move
        move.step, move.agent_id = frame_pb2.SessionMove.STEP_ROUND, "a"
        spec = SessionSpec(1, made, 1, FAR)
        world.rings[agent].handle(MoveMessage(move, 1, ArrivalTime(world.now()), spec))
    else:
        agent = "a"
        world.start(RING)
        world.deliver(("gw-0", "a"))
    return agent


@pytest.mark.parametrize("name", [S.AWAITING_TOKEN, S.RECEIVING, S.MIGRATING_IN, S.QUEUED])
def test_a_session_closed_while_it_moves_on_leaves_from_any_state(name: SessionState) -> None:
    world = Watched()
    agent = first_states(world, name)
    session = world.rings[agent].sessions.get(1)
    assert session is not None
    assert session.state is name
    move = begin_frame(2, 1, opening([("d", 0, 3), ("c", 3, BLOCKS)], PROMPT)).move
    move.agent_id = "a" if agent != "a" else "b"
    world.rings[agent].handle(MoveMessage(move, 1, ArrivalTime(world.now())))
    world.close(agent, 1)
    assert world.lives[agent, 1][-3:] == [name, S.LEAVING, S.CLOSED]
    world.run_out()
    world.assert_all_free()


def test_a_session_that_leaves_while_it_is_queued_is_not_computed() -> None:
    world = Watched()
    world.start(RING, 40)
    world.turn(8)
    loop, decoder = world.rings["b"], world.decoders["b"]
    while (session := loop.sessions.get(1)) is None or session.state is not S.QUEUED:
        wires = world.busy()
        assert wires or world.ready()
        if wires:
            world.deliver(wires[0])
        else:
            world.step(world.ready()[0])
    move = begin_frame(2, 1, opening([("d", 0, 3), ("c", 3, BLOCKS)], PROMPT)).move
    move.agent_id = "a"
    loop.handle(MoveMessage(move, 1, ArrivalTime(world.now())))
    world.close("b", 1)
    assert session.state is S.LEAVING
    steps = len(decoder.steps)
    loop.step()
    assert len(decoder.steps) == steps
    assert not loop.is_ready


def test_the_lives_above_have_every_change_of_the_table() -> None:
    seen: set[tuple[SessionState | None, SessionState]] = set()
    for name in FIRST_STATES:
        for closes_while_moving in (False, True):
            world = Watched()
            agent = first_states(world, name)
            world.changes.add((None, name))
            if closes_while_moving:
                move = begin_frame(2, 1, opening([("d", 0, 3), ("c", 3, BLOCKS)], PROMPT)).move
                move.agent_id = "b" if agent == "a" else "a"
                world.rings[agent].handle(MoveMessage(move, 1, ArrivalTime(world.now())))
            world.close(agent, 1)
            seen |= world.changes
    for by_tokens in (False, True):
        world = Watched()
        world.start(RING, 40)
        world.turn(8)
        world.move(by_tokens=by_tokens)
        world.run_out()
        world.close("b", 1)
        seen |= world.changes
    for decode in ((), [("e", 0, 1), ("f", 1, 5), ("g", 5, BLOCKS)]):
        world = Watched()
        world.start(RING, decode=decode)
        world.run_out()
        for agent in "abc":
            world.close(agent, 1)
        seen |= world.changes
    known = {(before, after) for before, following in TRANSITIONS.items() for after in following}
    assert seen >= known | {(None, state) for state in FIRST_STATES}


def lone_loop(*, validates: bool) -> GenerationLoop:
    loop = GenerationLoop("c", GenerationLimits(4), lambda: 7, validates=validates)
    loop.add_batcher(PartitionBatcher(toy()))
    for session in (1, 2):
        made = opening(ALONE, PROMPT, max_tokens=3)
        loop.handle(SessionOpened(SessionSpec(session, made, 0, FAR), ArrivalTime(7)))
    return loop


def queue_twice(loop: GenerationLoop) -> None:
    """Makes a mistake with session 1."""
    session = loop.sessions.get(1)
    assert session is not None
    session.state = S.WAITING  # behind the table's back
    loop.handle(
        LoopCall(lambda: None, lambda result, error: loop.sessions.go(session, S.COMPUTING))
    )


def test_an_invalid_change_is_raised_in_tests() -> None:
    loop = lone_loop(validates=True)
    with pytest.raises(InvalidTransitionError, match=r"-> computing \(LoopCall-3\) after new"):
        queue_twice(loop)


def test_in_service_an_invalid_change_costs_its_session_alone() -> None:
    loop = lone_loop(validates=False)
    queue_twice(loop)
    assert loop.sessions.is_over(1)
    told = [each.message() for each in loop.take_outflow().messages]
    assert [each.session_failed.failure.reason for each in told][1] == "INTERNAL"
    tokens: list[int] = []
    while loop.is_ready:
        loop.step()
        tokens += [token.token_id for token in loop.take_outflow().tokens]
    assert tokens == undisturbed(PROMPT, 3)


def test_what_does_not_fit_together_is_found() -> None:
    loop = lone_loop(validates=True)
    session = loop.sessions.get(1)
    assert session is not None
    for spoil, mend in (
        (
            lambda: session.batcher.prefilling.pop(0),
            lambda: session.batcher.prefilling.insert(0, session.turn),
        ),
        (lambda: session.batcher.decoding.append(1), session.batcher.decoding.pop),
        (
            lambda: session.batcher.executor.open_session(9, 0),
            lambda: session.batcher.executor.close_session(9),
        ),
        (session.tokens.clear, lambda: session.tokens.extend(PROMPT)),
        (
            lambda: setattr(session, "state", S.RECEIVING),
            lambda: setattr(session, "state", S.QUEUED),
        ),
    ):
        loop.validate()
        spoil()
        with pytest.raises(AssertionError):
            loop.validate()
        mend()
    loop.validate()


def test_a_history_keeps_the_latest_changes_and_the_milestones() -> None:
    history = History()
    history.add(None, S.MIGRATING_IN, ("MoveMessage", 1, 0))
    history.add(S.MIGRATING_IN, S.WAITING, ("MoveMessage", 2, 0))
    for number in range(3, 303):
        history.latest.append((S.QUEUED, S.COMPUTING, ("Step", number, 0)))
    kept = [int(number) for number in re.findall(r"-(\d+)\)", repr(history))]
    assert kept == [1, 2, *range(295, 303)]
    for number in range(303, 400):
        history.add(S.COMPUTING, S.LEAVING, ("Step", number, 0))
    assert repr(history).count("->") == 16


def test_the_changes_that_every_token_takes_are_in_the_table() -> None:
    assert ROUND == {S.WAITING: S.QUEUED, S.QUEUED: S.COMPUTING, S.COMPUTING: S.WAITING}
    assert all(after in TRANSITIONS[before] for before, after in ROUND.items())


def test_every_change_of_a_session_has_the_event_that_caused_it() -> None:
    loop = GenerationLoop("a", GenerationLimits(64), lambda: 7, validates=True)
    loop.add_batcher(PartitionBatcher(toy(0, 2)))
    made = opening(RING, PROMPT)
    loop.handle(SessionOpened(SessionSpec(1, made, 0, FAR), ArrivalTime(7)))
    session = loop.sessions.get(1)
    assert session is not None
    loop.step()
    loop.handle(TokenArrived(1, len(PROMPT), 4, False, ArrivalTime(7)))
    loop.handle(CloseOrdered((1,)))
    assert repr(session.history) == (
        "new -> waiting (SessionOpened-1); waiting -> queued (SessionOpened-1);"
        " queued -> computing (StepBegan-2); computing -> waiting (StepDone-3);"
        " waiting -> queued (TokenArrived-4); queued -> closed (CloseOrdered-5)"
    )
