"""Emulated executors let sessions wait side by side before a step, without being busy."""

from __future__ import annotations

import pytest

from catenary_agent.generation.context import GenerationLimits
from catenary_agent.generation.loop.generation_loop import GenerationLoop
from catenary_agent.generation.state.events import CloseOrdered, SessionOpened, TokenArrived
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_agent.generation.state.session import ArrivalTime, SessionSpec
from tests.support.ring_harness import BLOCKS, ToyDecoder, opening, toy, undisturbed

PASS_NS = 1_000
TOKEN_NS = 10
PROMPT = [3, 14, 15, 9]
FAR = 1 << 60


class Waiting(ToyDecoder):
    """The toy, far away: a pass takes `PASS_NS` and so much per token before its step."""

    def waiting_ns(self, session: int, tokens: int) -> int:
        assert session in self.book.entries
        return PASS_NS + TOKEN_NS * tokens


class Agent:
    """One agent that runs the whole model, and its clock."""

    def __init__(self) -> None:
        plain = toy()
        self.decoder = Waiting(plain.key, plain.layout)
        self.now = 0
        self.ring = GenerationLoop("a-0", GenerationLimits(512), lambda: self.now, validates=True)
        self.ring.add_batcher(PartitionBatcher(self.decoder))
        self.moments: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}

    def open(self, session: int, max_tokens: int) -> None:
        made = opening([("a-0", 0, BLOCKS)], PROMPT, max_tokens=max_tokens)
        self.ring.handle(SessionOpened(SessionSpec(session, made, 0, FAR), ArrivalTime(self.now)))

    def run_until(self, end: int) -> None:
        """Lets time pass as the thread does: from one thing that is due to the next."""
        while (wake := self.ring.next_wakeup_ns()) is not None and wake <= end:
            self.now = max(self.now, wake)
            self.ring.expire()
            while self.ring.is_ready:
                self.ring.step()
            for token in self.ring.take_outflow().tokens:
                session = token.spec.session_id
                self.moments.setdefault(session, []).append(self.now)
                self.tokens.setdefault(session, []).append(token.token_id)
        self.now = end


def first_ns() -> int:
    return PASS_NS + TOKEN_NS * len(PROMPT)


@pytest.fixture
def agent() -> Agent:
    return Agent()


def test_a_session_takes_its_waiting_for_every_token(agent: Agent) -> None:
    agent.open(1, max_tokens=3)
    assert not agent.ring.is_ready
    assert agent.ring.next_wakeup_ns() == first_ns()
    agent.run_until(10 * PASS_NS)
    each = PASS_NS + TOKEN_NS
    assert agent.moments[1] == [first_ns() + number * each for number in range(3)]
    assert agent.tokens[1] == undisturbed(PROMPT, 3)


def test_sessions_do_not_slow_each_other_down(agent: Agent) -> None:
    agent.open(1, max_tokens=4)
    agent.run_until(PASS_NS // 2)
    for session in range(2, 8):
        agent.open(session, max_tokens=4)
    agent.run_until(20 * PASS_NS)
    alone = [moment - PASS_NS // 2 for moment in agent.moments[2]]
    assert alone == agent.moments[1]
    assert all(agent.moments[session] == agent.moments[2] for session in range(3, 8))
    assert agent.decoder.sessions == 0


def test_a_session_closed_while_it_waits_is_never_computed(agent: Agent) -> None:
    agent.open(1, max_tokens=4)
    agent.open(2, max_tokens=1)
    agent.ring.handle(CloseOrdered((1,)))
    agent.run_until(10 * PASS_NS)
    assert list(agent.tokens) == [2]
    assert {item[0] for step in agent.decoder.steps for item in step} == {2}
    assert agent.decoder.sessions == 0


def test_a_token_that_comes_back_waits_again(agent: Agent) -> None:
    plain = toy(0, 2)
    decoder = Waiting(plain.key, plain.layout)
    ring = GenerationLoop("a-1", GenerationLimits(512), lambda: agent.now, validates=True)
    ring.add_batcher(PartitionBatcher(decoder))
    made = opening([("a-1", 0, 2), ("a-2", 2, BLOCKS)], PROMPT, max_tokens=4)
    ring.handle(SessionOpened(SessionSpec(1, made, 0, FAR), ArrivalTime(0)))
    agent.now = first_ns()
    ring.expire()
    ring.step()
    agent.now = 5 * PASS_NS
    ring.handle(TokenArrived(1, len(PROMPT), 7, False, ArrivalTime(agent.now)))
    assert not ring.is_ready
    agent.now += PASS_NS + TOKEN_NS - 1
    ring.expire()
    assert not ring.is_ready
    agent.now += 1
    ring.expire()
    assert ring.is_ready
