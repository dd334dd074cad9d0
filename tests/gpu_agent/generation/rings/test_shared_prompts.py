"""Several answers to one prompt on one ring: it is computed once, and nothing else is shared."""

from __future__ import annotations

import pytest

from catenary_protos.catenary.v1 import frame_pb2
from shared_helpers.waiting import until
from tests.support.ring_harness import BLOCKS, opening, toy

PROMPT = [(i * i * 3 + 5 * i) % 48 for i in range(30)]
RINGS = {
    1: [("a-0", 0, BLOCKS)],
    2: [("a-0", 0, 2), ("a-1", 2, BLOCKS)],
    3: [("a-0", 0, 1), ("a-1", 1, 4), ("a-2", 4, BLOCKS)],
}
ANSWERS = 5


async def ring_of(rings, size: int, **options):
    return [
        await rings.agent(agent, toy(first, last), chunk=8, **options)
        for agent, first, last in RINGS[size]
    ]


def one_of(size: int, seed: int, source: int = 0, **facts: object) -> frame_pb2.SessionOpening:
    """Answers differ by what they may say: the logits of this model are too far apart for seeds."""
    allowed = [token for token in range(48) if token % ANSWERS == seed % ANSWERS]
    known: dict[str, object] = {"max_tokens": 9, "prompt": PROMPT, "allowed_token_ids": allowed}
    made = opening(RINGS[size], **(known | facts))
    made.shares_prompt_of = source
    return made


async def alone(caller, size: int, **facts: object) -> list[list[int]]:
    """The answers of sessions that share nothing, one after the other."""
    answers = []
    for seed in range(ANSWERS):
        await caller.open(100 + seed, one_of(size, seed, **facts))
        answers.append(await caller.finished(100 + seed))
    assert len({tuple(answer) for answer in answers}) == ANSWERS
    return answers


def computed(nodes, session: int) -> list[list[tuple[int, int]]]:
    """At each agent: position and number of tokens of every part of a session's computation."""
    return [
        [
            (at, count)
            for step in node.decoders[0].steps
            for name, at, count in step
            if name == session
        ]
        for node in nodes
    ]


def close_in_the_middle(nodes, *sessions: int) -> None:
    for node in nodes[1:-1]:
        node.generation.close_sessions(sessions)


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_prompt_is_computed_once_for_all_answers(rings, size):
    caller = await rings.caller()
    nodes = await ring_of(rings, size)
    expected = await alone(caller, size)
    for seed in range(ANSWERS):
        await caller.open(1 + seed, one_of(size, seed, source=min(seed, 1)))
    for seed in range(ANSWERS):
        assert await caller.finished(1 + seed) == expected[seed]
    assert all(parts[0] == (0, 8) for parts in computed(nodes, 1))
    for session in range(2, 1 + ANSWERS):
        rows = [(len(PROMPT) - 1 + at, 1) for at in range(9)]
        assert computed(nodes, session) == [rows] * size
    close_in_the_middle(nodes, *range(1, 1 + ANSWERS), *range(100, 100 + ANSWERS))
    await rings.all_free()
    assert all(node.told.of("session_failed") == [] for node in nodes)


@pytest.mark.parametrize("size", [1, 3])
async def test_an_answer_of_one_token_still_gives_its_prompt(rings, size):
    """The first session ends with the step that completes the prompt for the others."""
    caller = await rings.caller()
    nodes = await ring_of(rings, size)
    expected = await alone(caller, size, max_tokens=1)
    for seed in range(ANSWERS):
        await caller.open(1 + seed, one_of(size, seed, source=min(seed, 1), max_tokens=1))
    for seed in range(ANSWERS):
        assert await caller.finished(1 + seed) == expected[seed]
    close_in_the_middle(nodes, *range(1, 1 + ANSWERS), *range(100, 100 + ANSWERS))
    await rings.all_free()
    assert all(node.told.of("session_failed") == [] for node in nodes)


async def test_the_prompt_of_a_session_that_generates_is_shared_as_well(rings):
    caller = await rings.caller()
    nodes = await ring_of(rings, 2)
    expected = await alone(caller, 2)
    await caller.open(1, one_of(2, 0, max_tokens=200))
    await caller.wait_for(1, 3)
    await caller.open(2, one_of(2, 1, source=1))
    assert await caller.finished(2) == expected[1]
    assert computed(nodes, 2)[1][0] == (len(PROMPT) - 1, 1)
    assert len(await caller.finished(1)) == 200
    await rings.all_free()


@pytest.mark.parametrize(
    "facts",
    [
        {"source": 99},
        {"source": 1, "prompt": [*PROMPT[:-2], 7, 7]},
        {"source": 1, "prompt_tokens": len(PROMPT) - 1},
        {"source": 1, "prompt": PROMPT[:1]},
    ],
    ids=["unknown", "another prompt", "it has an answer", "too short"],
)
async def test_a_session_that_cannot_share_reads_its_prompt_itself(rings, facts):
    caller = await rings.caller()
    nodes = await ring_of(rings, 2)
    await caller.open(1, one_of(2, 0, max_tokens=100))
    await caller.open(2, one_of(2, 1, **facts))
    await caller.open(3, one_of(2, 1, **(facts | {"source": 0})))
    assert await caller.finished(2) == await caller.finished(3)
    assert [parts[0][0] for parts in computed(nodes, 2)] == [0, 0]
    await caller.finished(1)
    await rings.all_free()


async def test_sessions_fail_with_the_one_whose_prompt_they_wait_for(rings):
    caller = await rings.caller()
    nodes = await ring_of(rings, 2)
    nodes[0].decoders[0].takes_s = 0.2  # a prompt takes four steps
    await caller.open(1, one_of(2, 0))
    for session in (2, 3):
        await caller.open(session, one_of(2, session, source=1))
    await until(lambda: nodes[0].generation.sessions == 3)
    nodes[0].generation.close_sessions([1])
    await until(lambda: len(nodes[0].told.of("session_failed")) == 2)
    nodes[0].decoders[0].takes_s = 0.0
    reports = nodes[0].told.of("session_failed")
    assert {each.session_id for each in reports} == {2, 3}
    assert {each.failure.reason for each in reports} == {"PARTITION_LOST"}
    assert all(each.failure.retryable for each in reports)
    await caller.open(4, one_of(2, 0))
    assert len(await caller.finished(4)) == 9
    for node in nodes[1:]:
        node.generation.close_sessions([1, 2, 3])
    await rings.all_free()


@pytest.mark.parametrize("size", [1, 3])
async def test_log_probabilities_come_with_their_tokens(rings, size):
    caller = await rings.caller()
    nodes = await ring_of(rings, size)
    await caller.open(1, one_of(size, 3, logprobs=2, prompt_logprobs=0))
    await caller.open(2, one_of(size, 3))
    tokens = await caller.finished(1)
    assert await caller.finished(2) == tokens
    said = [each.logprobs for each in caller.tokens[1]]
    assert [each.token_id for each in said] == tokens
    assert all(len(each.top) == 2 and each.rank > 0 for each in said)
    assert not any(each.HasField("logprobs") for each in caller.tokens[2])
    assert [each.token_id for each in caller.prompts[1]] == PROMPT[1:]
    assert 2 not in caller.prompts
    close_in_the_middle(nodes, 1, 2)
    await rings.all_free()
