"""Circuits open, pause and close by their table, and leave nothing behind."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.breaker import (
    TRANSITIONS,
    BreakerConfig,
    CircuitBreakers,
    CircuitSignal,
    CircuitState,
)
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey

A, B = AgentId("a"), AgentId("b")
KEY = PartitionKey(ModelKey("m", "1"), 0, 2)
OTHER = PartitionKey(ModelKey("m", "1"), 2, 4)
CONFIG = BreakerConfig(first_pause_ns=100, longest_pause_ns=1000)


class Bench:
    def __init__(self, config: BreakerConfig = CONFIG) -> None:
        self.view = Availability()
        self.breakers = CircuitBreakers(self.view, config)
        self.evidence = itertools.count(1)

    def fails(self, now: int, agent: AgentId = A, reason: str = "DEVICE_FAILED") -> int:
        evidence = next(self.evidence)
        self.breakers.failed(agent, KEY, evidence, reason, now)
        return evidence

    def circuit(self, agent: AgentId = A) -> CircuitState:
        return self.breakers.circuit(agent, KEY)

    def is_broken(self, agent: AgentId = A, key: PartitionKey = KEY) -> bool:
        return self.view.impairment_of(agent, key) is Impairment.BROKEN


def opened() -> Bench:
    bench = Bench()
    for _ in range(3):
        assert bench.circuit() is CircuitState.CLOSED
        bench.fails(0)
    return bench


def test_three_failures_in_a_row_open_a_circuit_for_that_partition_only() -> None:
    bench = opened()
    assert bench.circuit() is CircuitState.OPEN
    assert bench.is_broken()
    assert not bench.is_broken(B)
    assert not bench.is_broken(A, OTHER)


def test_a_success_between_failures_keeps_it_closed() -> None:
    bench = Bench()
    for now in range(7):
        bench.fails(now)
        bench.fails(now)
        for _ in range(3):
            bench.breakers.worked(A, KEY, now)
    assert bench.circuit() is CircuitState.CLOSED


def test_failing_half_of_the_time_opens_it_too() -> None:
    bench = Bench()
    for now in range(8):
        bench.fails(now)
        if bench.circuit() is CircuitState.OPEN:
            break
        bench.breakers.worked(A, KEY, now)
    assert bench.circuit() is CircuitState.OPEN


def test_a_lost_device_opens_it_at_once() -> None:
    bench = Bench()
    bench.fails(0, reason="DEVICE_LOST")
    assert bench.is_broken()


def test_after_the_pause_one_probe_is_let_through_and_its_success_closes_it() -> None:
    bench = opened()
    bench.breakers.look(99)
    assert bench.is_broken()
    bench.breakers.look(100)
    assert bench.circuit() is CircuitState.HALF_OPEN
    assert not bench.is_broken()
    bench.breakers.given(A, KEY, 101)
    assert bench.circuit() is CircuitState.PROBING
    assert bench.is_broken()
    bench.breakers.worked(A, KEY, 120)
    assert bench.circuit() is CircuitState.CLOSED
    assert not bench.is_broken()
    assert len(bench.breakers) == 0


def test_every_probe_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    bench = opened()
    now, pauses = 0, []
    for _ in range(6):
        mark = bench.view.mark_of(A, Impairment.BROKEN, KEY)
        assert mark is not None
        assert mark.until is not None
        pauses.append(mark.until - now)
        now = mark.until
        bench.breakers.look(now)
        bench.breakers.given(A, KEY, now)
        bench.fails(now)
    assert pauses == [100, 200, 400, 800, 1000, 1000]


def test_a_probe_that_is_never_answered_is_followed_by_another() -> None:
    bench = opened()
    bench.breakers.look(100)
    bench.breakers.given(A, KEY, 100)
    bench.breakers.look(200)
    assert bench.circuit() is CircuitState.HALF_OPEN


def test_what_a_request_was_to_blame_for_is_forgiven_everywhere() -> None:
    bench = Bench()
    poison = []
    for _ in range(3):
        poison.append(bench.fails(0, A))
        poison.append(bench.fails(0, B))
    assert bench.is_broken(A)
    assert bench.is_broken(B)
    bench.breakers.forgive(poison, 1)
    assert not bench.is_broken(A)
    assert not bench.is_broken(B)
    assert len(bench.breakers) == 0


def test_what_else_failed_still_counts() -> None:
    bench = opened()
    bench.breakers.forgive([bench.fails(1)], 2)
    assert bench.is_broken()


@pytest.mark.parametrize(
    ("circuit", "signal"), list(itertools.product(CircuitState, CircuitSignal))
)
def test_the_table_leads_only_where_a_circuit_may_go(
    circuit: CircuitState, signal: CircuitSignal
) -> None:
    to = TRANSITIONS.get((circuit, signal), circuit)
    if signal is CircuitSignal.WORKED:
        assert to is CircuitState.CLOSED
    if signal is CircuitSignal.GIVEN:
        assert to is (CircuitState.PROBING if circuit is CircuitState.HALF_OPEN else circuit)
    if signal is CircuitSignal.FAILED_TOO_OFTEN:
        assert to is CircuitState.OPEN


def test_circuits_of_those_that_never_come_back_are_forgotten() -> None:
    bench = opened()
    bench.fails(0, B)
    for now in (CONFIG.first_pause_ns, CONFIG.forgotten_after_ns):
        bench.breakers.look(now)
        assert len(bench.breakers) == 2
    bench.breakers.look(CONFIG.forgotten_after_ns + 1)
    assert len(bench.breakers) == 0
    assert not bench.is_broken()


class Histories(RuleBasedStateMachine):
    """Whatever happens: the view says BROKEN exactly while a circuit says so, and not for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.now = 0
        self.evidence: list[int] = []

    @rule(agent=st.sampled_from([A, B]), lost=st.booleans())
    def fail(self, agent: AgentId, lost: bool) -> None:
        reason = "DEVICE_LOST" if lost else "DEVICE_FAILED"
        self.evidence.append(self.bench.fails(self.now, agent, reason))

    @rule(agent=st.sampled_from([A, B]))
    def work(self, agent: AgentId) -> None:
        self.bench.breakers.worked(agent, KEY, self.now)
        assert self.bench.circuit(agent) is CircuitState.CLOSED

    @rule(agent=st.sampled_from([A, B]))
    def give(self, agent: AgentId) -> None:
        self.bench.breakers.given(agent, KEY, self.now)
        assert self.bench.circuit(agent) is not CircuitState.HALF_OPEN

    @rule(data=st.data())
    def forgive(self, data: st.DataObject) -> None:
        if self.evidence:
            chosen = data.draw(st.lists(st.sampled_from(self.evidence)))
            self.bench.breakers.forgive(chosen, self.now)

    @rule(step=st.integers(0, 400))
    def passes(self, step: int) -> None:
        self.now += step
        self.bench.breakers.look(self.now)
        self.bench.view.expire(self.now)

    @invariant()
    def view_and_circuits_agree(self) -> None:
        for agent in (A, B):
            is_open = self.bench.circuit(agent) in {CircuitState.OPEN, CircuitState.PROBING}
            mark = self.bench.view.mark_of(agent, Impairment.BROKEN, KEY)
            assert (mark is not None) == is_open
            if mark is not None:
                assert mark.until is not None
                assert mark.until <= self.now + CONFIG.longest_pause_ns

    def teardown(self) -> None:
        self.now += CONFIG.longest_pause_ns
        self.bench.breakers.look(self.now)
        assert not self.bench.is_broken(A)
        assert not self.bench.is_broken(B)
        for agent in (A, B):
            self.bench.breakers.worked(agent, KEY, self.now)
            for _ in range(CONFIG.of_last):
                self.bench.breakers.worked(agent, KEY, self.now)
        assert len(self.bench.breakers) == 0


Histories.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
