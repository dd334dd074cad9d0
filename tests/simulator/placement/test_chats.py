"""Conversations in simulation: what is shared, what is not computed, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catenary_services.domain.ids import GatewayId, RequestId
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS
from catenary_simulator.arrivals import parse_arrivals
from catenary_simulator.placement.chats import Chats, chat_workload
from catenary_simulator.placement.engine import SimulatedSession, SimulatedWorker
from catenary_simulator.placement.serve import PlacementRun, WorkerKind, serve_placement
from catenary_simulator.placement.workload import (
    LengthPopulation,
    RequestWorkload,
    SharedText,
)

BLOCK = PREFIX_BLOCK_TOKENS
LINES = LatencyLines(124e3, 14e6, 450.0, 75e3, 22e6, 23e6, prefill_chunk_tokens=512)
CHATS = Chats(heads=2, head_tokens=900, turns=4.0, pause_s=5.0, least_pause_s=8.0, most_tokens=4096)
LENGTHS = LengthPopulation((20, 60, 150), (30, 90, 200))
RUN = PlacementRun(WorkerKind(LINES, 60_000.0), 3, "least-time", TokenObjectives(), checked=True)


def workload(seed: int = 1, seconds: float = 90.0) -> RequestWorkload:
    return chat_workload(CHATS, LENGTHS, parse_arrivals("poisson"), 2.0, seconds, seed)


def test_a_turn_begins_with_all_turns_before_it() -> None:
    work = workload()
    longest: dict[int, int] = {}
    assert work.arrived_ns == sorted(work.arrived_ns)
    for number, text in enumerate(work.texts):
        before = longest.get(text.conversation, CHATS.head_tokens)
        assert work.prompts[number] > before
        assert work.blocks(number, before) == work.blocks(number, 1 << 12)[: before // BLOCK]
        longest[text.conversation] = work.prompts[number] + work.answers[number]
        assert longest[text.conversation] <= CHATS.most_tokens


def test_texts_have_their_head_in_common_and_nothing_else() -> None:
    one, other, unlike = SharedText(0, 70, 1), SharedText(0, 70, 2), SharedText(1, 70, 3)
    assert one.blocks(200)[:2] == other.blocks(200)[:2]
    assert not set(one.blocks(200)[2:]) & set(other.blocks(200))
    assert not set(one.blocks(200)) & set(unlike.blocks(200))
    assert len(one.blocks(200)) == len(set(one.blocks(200))) == 200 // BLOCK


@pytest.mark.parametrize("told", [True, False])
def test_what_is_reused_is_never_more_than_what_was_shared(told: bool) -> None:
    result = serve_placement(replace(RUN, tells_beginnings=told), workload())
    assert result.rejected == 0
    assert 0 < result.reused_tokens <= result.shared_tokens
    if told:
        assert result.reused_tokens >= 0.9 * result.shared_tokens
        assert result.busiest <= 1.3


def test_a_scheduler_that_is_told_has_first_tokens_come_sooner() -> None:
    told, blind = (
        serve_placement(replace(RUN, tells_beginnings=each), workload(seed=2, seconds=200.0))
        for each in (True, False)
    )
    assert told.reused_tokens > blind.reused_tokens
    assert told.first_token_ms.mean() < blind.first_token_ms.mean()


def test_requests_that_share_nothing_are_served_as_ever() -> None:
    work = workload()
    plain = RequestWorkload(work.arrived_ns, work.prompts, work.answers)
    result = serve_placement(RUN, plain)
    assert (result.reused_tokens, result.shared_tokens) == (0, 0)


def test_caches_of_sessions_come_before_what_a_worker_keeps() -> None:
    worker = SimulatedWorker(0, LINES, 1000.0)
    now = 0
    for number in range(6):
        session = SimulatedSession(RequestId(GatewayId("g"), number), 200, 3, now)
        session.blocks = SharedText(number, 0, number).blocks(203)
        over = worker.submit(session, now)
        while not over:
            now = worker.ends_ps
            held = worker.context_tokens + worker.reserved_tokens
            assert held + worker.kept.size <= 1000
            over = worker.boundary()
    assert worker.preemptions == 0
    assert 0 < worker.kept.size <= 1000
