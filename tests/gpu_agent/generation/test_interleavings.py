"""Rings without threads or transports: every order in which frames can arrive gives one result."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_protos.catenary.v1 import frame_pb2
from tests.support.ring_harness import BLOCKS, opening, undisturbed
from tests.support.small_models.ring_world import World

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
Rings = tuple[list, list]


def drawn_sessions(data: st.DataObject) -> dict[int, tuple[Rings, list[int], int]]:
    """Returns rings, prompt and number of tokens by session."""
    count = data.draw(st.integers(1, 5))
    sessions = {}
    for session in range(1, count + 1):
        rings = data.draw(st.sampled_from([*((chain, []) for chain in CHAINS), *HANDED_OVER]))
        prompt = data.draw(st.lists(st.integers(0, 48), min_size=1, max_size=12))
        sessions[session] = (rings, prompt, data.draw(st.integers(1, 12)))
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
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SETTINGS
@given(st.data(), st.integers(1, 6))
def test_in_any_order_of_arrivals_every_session_gets_the_tokens_it_gets_alone(data, chunk):
    period = data.draw(st.sampled_from([0, 2, 3]))
    world = World(chunk, period, are_slow=data.draw(st.booleans()))
    sessions = drawn_sessions(data)
    opens = {
        session: lambda s=session, drawn=drawn: world.open(s, opened(*drawn))
        for session, drawn in sessions.items()
    }
    play(world, data, opens, 60)
    world.run_out()
    for session, (rings, prompt, count) in sessions.items():
        got = got_of(world, session)
        assert [token.token_id for token in got] == undisturbed(prompt, count, period=period)
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
    world = World(chunk, are_slow=data.draw(st.booleans()))
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
