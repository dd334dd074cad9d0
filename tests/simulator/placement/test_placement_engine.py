"""The worker that skips over decode steps, against one that takes them one by one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_services.domain.ids import GatewayId, RequestId
from catenary_services.domain.latency import LatencyLines
from catenary_simulator.placement.engine import PICOSECONDS, SimulatedSession, SimulatedWorker

GATEWAY = GatewayId("test")
LINES = LatencyLines(100.0, 5_000.0, 3.0, 70.0, 900.0, 1_000.0)


@dataclass
class Naive:
    """What the twin knows of a session."""

    arrived: int
    prompt: int
    answer: int
    generated: int = 0
    pending: int = 0
    first: int = -1
    last: int = -1
    preemptions: int = 0


def one_by_one(
    lines: LatencyLines, capacity: float, asked: list[tuple[int, int, int]], *, split: bool
) -> list[Naive]:
    """Runs (arrival in ps, prompt, answer) step by step; returns the sessions as they ended."""
    everyone = [Naive(*each) for each in asked]
    coming = list(everyone)
    waiting: list[Naive] = []
    prefilling: list[Naive] = []
    running: list[Naive] = []
    now = 0

    def used(extra: int = 0) -> float:
        tokens = sum(each.prompt + each.generated for each in running)
        tokens += sum(each.prompt + each.generated + 1 for each in prefilling)
        sessions = len(running) + len(prefilling)
        return lines.cache_token * (tokens + extra) + lines.cache_session * (
            sessions + (1 if extra else 0)
        )

    def join(session: Naive, moment: int) -> None:
        if split and session.first < 0:
            session.first = session.last = session.arrived
        else:
            session.last = moment
            if session.first < 0:
                session.first = moment
        session.generated += 1
        if session.generated < session.answer:
            running.append(session)

    def make_room() -> None:
        while used() + lines.cache_token * len(running) > capacity:
            if len(running) <= 1 and not prefilling:
                return
            victim = prefilling.pop() if prefilling else running.pop()
            victim.preemptions += 1
            waiting.insert(0, victim)

    while coming or waiting or prefilling or running:
        while coming and coming[0].arrived <= now:
            waiting.append(coming.pop(0))
        if not (waiting or prefilling or running):
            now = coming[0].arrived
            continue
        while waiting:
            session = waiting[0]
            free = 0.01 * capacity if running or prefilling else 0.0
            if used(session.prompt + session.generated + 1) + free > capacity:
                break
            waiting.pop(0)
            if split and session.first < 0:
                join(session, now)
            else:
                session.pending = session.prompt + session.generated
                prefilling.append(session)
        if not prefilling or lines.prefill_chunk_tokens:
            make_room()
        parts: list[tuple[Naive, int]] = []
        left = lines.prefill_chunk_tokens or 10**9
        held = list(prefilling)
        prefilling.clear()
        for session in held:
            if left:
                taken = min(left, session.pending)
                left -= taken
                session.pending -= taken
                parts.append((session, taken))
            else:
                prefilling.append(session)
        duration = 0
        if parts:
            total = sum(taken for _, taken in parts)
            duration += max(
                round(lines.prefill_floor_ns * PICOSECONDS),
                round(lines.prefill_token_ns * PICOSECONDS) * total
                + round(lines.prefill_ns * PICOSECONDS),
            )
        stepping = running if lines.prefill_chunk_tokens or not parts else []
        stepping = list(stepping)
        if len(stepping) == 1 and lines.decode_lone_ns:
            duration += round(lines.decode_lone_ns * PICOSECONDS)
        elif stepping:
            context = sum(each.prompt + each.generated for each in stepping)
            duration += round(lines.decode_context_token_ns * PICOSECONDS) * context
            duration += round(lines.decode_session_ns * PICOSECONDS) * len(stepping)
            duration += round(lines.decode_ns * PICOSECONDS)
        now += max(1, duration) if parts or stepping else 0
        for session in stepping:
            session.generated += 1
            session.last = now
            if session.generated == session.answer:
                running.remove(session)
        for session, _ in parts:
            if session.pending:
                prefilling.insert(0, session)
            else:
                join(session, now)
    return everyone


def skipping(
    lines: LatencyLines, capacity: float, asked: list[tuple[int, int, int]], *, split: bool
) -> tuple[list[SimulatedSession], SimulatedWorker]:
    """Runs the same on the simulator's worker."""
    worker = SimulatedWorker(0, lines, capacity, split)
    sessions = [
        SimulatedSession(RequestId(GATEWAY, number), prompt, answer, arrived)
        for number, (arrived, prompt, answer) in enumerate(asked)
    ]
    over: list[SimulatedSession] = []
    for session in sessions:
        while 0 <= worker.ends_ps < session.arrived_ps:
            over += worker.boundary()
        over += worker.submit(session, session.arrived_ps)
    while worker.ends_ps >= 0:
        over += worker.boundary()
    assert sorted(each.request.number for each in over) == list(range(len(asked)))
    return sessions, worker


def outcomes(sessions: list[Naive]) -> list[tuple[int, int, int]]:
    return [(each.first, each.last, each.preemptions) for each in sessions]


def their_outcomes(sessions: list[SimulatedSession]) -> list[tuple[int, int, int]]:
    return [(each.first_ps, each.last_ps, each.preemptions) for each in sessions]


arrivals = st.lists(
    st.tuples(st.integers(1, 60_000_000), st.integers(1, 40), st.integers(1, 30)),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each[0],
).map(sorted)
costs = st.integers(0, 3_000).map(lambda number: number / 7)


@settings(max_examples=150, deadline=None)
@given(
    asked=arrivals,
    k1=costs,
    c1=costs,
    k2=costs,
    c2=costs,
    c3=st.integers(1, 4_000),
    lone=st.sampled_from([0.0, 900.0]),
    floor=st.sampled_from([0.0, 2_000.0]),
    chunk=st.sampled_from([0, 7, 16]),
    capacity=st.integers(80, 400),
    session_cache=st.sampled_from([0.0, 2.5]),
    split=st.booleans(),
)
def test_skipping_steps_changes_nothing(
    asked, k1, c1, k2, c2, c3, lone, floor, chunk, capacity, session_cache, split
):
    lines = LatencyLines(k1, c1, k2, c2, float(c3), lone, floor, chunk, cache_session=session_cache)
    if split:  # their only token would be there already
        asked = [(arrived, prompt, answer + 1) for arrived, prompt, answer in asked]
    sessions, worker = skipping(lines, float(capacity), asked, split=split)
    assert their_outcomes(sessions) == outcomes(
        one_by_one(lines, float(capacity), asked, split=split)
    )
    assert worker.context_tokens == worker.reserved_tokens == worker.sessions == 0
    assert [*worker.running, *worker.waiting, *worker.prefilling] == []


def test_a_lone_request_takes_its_prompt_and_its_steps():
    sessions, worker = skipping(LINES, 1e9, [(5, 10, 4)], split=False)
    prefill = (100 * 10 + 5_000) * PICOSECONDS
    assert sessions[0].first_ps == 5 + prefill
    assert sessions[0].last_ps == 5 + prefill + 3 * 1_000 * PICOSECONDS
    assert worker.busy_ps == sessions[0].last_ps - 5


def test_prompts_that_wait_together_are_run_in_one_pass():
    sessions, _ = skipping(LINES, 1e9, [(1, 10, 50), (2, 4, 1), (3, 6, 1)], split=False)
    first_pass = 1 + (100 * 10 + 5_000) * PICOSECONDS
    second_pass = first_pass + (100 * 10 + 5_000) * PICOSECONDS
    assert [each.first_ps for each in sessions] == [first_pass, second_pass, second_pass]


def test_who_came_last_gives_way_when_the_cache_is_full_and_is_run_again():
    # 30 + 30 tokens join; with 5 steps of two they would be 70.
    sessions, worker = skipping(LINES, 70.0, [(1, 30, 20), (2, 30, 20)], split=False)
    assert [each.preemptions for each in sessions] == [0, 1]
    assert worker.preemptions == 1
    assert sessions[1].last_ps > sessions[0].last_ps
    assert all(each.generated == 20 for each in sessions)


def test_progress_between_boundaries_is_that_of_the_steps_so_far():
    worker = SimulatedWorker(0, LINES, 1e9)
    session = SimulatedSession(RequestId(GATEWAY, 0), 10, 100, 0)
    worker.submit(session, 0)
    worker.boundary()
    step = 1_000 * PICOSECONDS
    for steps in (0, 1, 7, 98):
        for late in (0, step - 1):
            now = session.first_ps + steps * step + late
            tokens, last = worker.state_of(session, *worker.progress_at(now))
            assert (tokens, last) == (1 + steps, session.first_ps + steps * step)


def test_a_session_larger_than_the_cache_is_recognised():
    worker = SimulatedWorker(0, LINES, 100.0)
    assert worker.can_ever_hold(SimulatedSession(RequestId(GATEWAY, 0), 60, 40, 0))
    assert not worker.can_ever_hold(SimulatedSession(RequestId(GATEWAY, 1), 61, 40, 0))


@pytest.mark.parametrize("chunk", [0, 16])
def test_no_chunk_holds_up_who_generates_for_longer_than_a_chunk_and_a_step(chunk):
    lines = LatencyLines(100.0, 5_000.0, 0.0, 0.0, 1_000.0, prefill_chunk_tokens=chunk)
    sessions, _ = skipping(lines, 1e9, [(1, 1, 12), (2, 160, 2)], split=False)
    stall = sessions[0].last_ps - sessions[0].first_ps - 11 * 1_000 * PICOSECONDS
    if chunk:  # ten chunks beside ten of the eleven steps
        assert stall == 10 * (16 * 100 + 5_000) * PICOSECONDS
    else:
        assert stall == (160 * 100 + 5_000) * PICOSECONDS


def test_prompts_in_chunks_are_read_one_after_the_other():
    lines = LatencyLines(100.0, 0.0, 0.0, 0.0, 1_000.0, prefill_chunk_tokens=16)
    sessions, _ = skipping(lines, 1e9, [(1, 160, 1), (2, 160, 1), (3, 160, 1)], split=False)
    whole = 160 * 100 * PICOSECONDS
    assert [each.first_ps for each in sessions] == [1 + whole, 1 + 2 * whole, 1 + 3 * whole]
