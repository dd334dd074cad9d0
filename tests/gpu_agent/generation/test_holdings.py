"""What agents answer to audits, with real rings: what they hold, behind all that they said."""

from __future__ import annotations

from catenary_agent.generation.state.holdings import HoldingsAnswer
from shared_helpers.waiting import until
from tests.support.ring_harness import BLOCKS, opening, toy
from tests.support.small_models.ring_world import World

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
RING = [("a-0", 0, 2), ("a-1", 2, BLOCKS)]


async def asked(node, number: int):
    """Returns what an agent answers to a question."""
    node.generation.report_holdings(number)
    said = await node.told.wait_for("holdings", number)
    assert [each.number for each in said] == list(range(1, number + 1))
    return said[-1]


async def test_every_agent_of_a_ring_says_what_it_holds(rings) -> None:
    caller = await rings.caller()
    decoders = [toy(first, last) for _, first, last in RING]
    nodes = [
        await rings.agent(agent, decoder)
        for (agent, _, _), decoder in zip(RING, decoders, strict=True)
    ]
    decoders[1].gate.clear()  # the second agent stands in its first step
    await caller.open(1, opening(RING, PROMPT, max_tokens=4))
    await until(decoders[1].entered.is_set)
    first = await asked(nodes[0], 1)
    [session] = first.sessions
    assert (session.session_id, session.passed_on) == (1, True)
    assert [(hop.agent_id, hop.first_block, hop.last_block) for hop in session.route] == [
        ("a-0", 0, 2)
    ]
    [partition] = first.partitions
    assert partition.key == session.partition
    assert (partition.used_block_slots, partition.cached_block_tokens) == (2, 2 * 16)  # whole pages
    decoders[1].gate.set()
    await caller.finished(1)
    for node in nodes:
        node.generation.close_sessions((1,))
        answer = await asked(node, 2 if node is nodes[0] else 1)
        assert not answer.sessions
        assert answer.partitions[0].used_block_slots == 0
        # Whoever hears that it is not held has heard before that it was closed.
        kinds = [message.WhichOneof("kind") for message in node.told.messages]
        last_close = len(kinds) - 1 - kinds[::-1].index("sessions_closed")
        assert last_close < len(kinds) - 1 - kinds[::-1].index("holdings")
    await rings.all_free()


def test_a_session_whose_opening_waits_for_a_slow_link_is_not_passed_on_yet() -> None:
    world = World(chunk=4, are_slow=True)
    world.open(1, opening([("a", 0, 2), ("b", 2, 4), ("c", 4, BLOCKS)], PROMPT, max_tokens=2))
    world.deliver(("gw-0", "a"))
    world.step("a")
    said = []
    for _ in range(2):
        answer = HoldingsAnswer(1, world.rings["a"].sessions, (), ()).message()
        said += [each.passed_on for each in answer.holdings.sessions]
        for wire in world.busy():
            world.deliver(wire)
    assert said == [False, True]
    world.run_out()


def test_an_answer_is_dropped_before_what_others_wait_for() -> None:
    answer = HoldingsAnswer(7, (), (), ())
    assert answer.droppable
    assert answer.message().holdings.number == 7
