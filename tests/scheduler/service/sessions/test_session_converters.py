from __future__ import annotations

from typing import Any

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.dispatch import events
from catenary_scheduler.wire import messages as wire_messages
from catenary_scheduler.wire import session_messages
from catenary_services.domain.ids import (
    AgentId,
    Epoch,
    GatewayId,
    ModelKey,
    PartitionKey,
    RequestId,
)
from catenary_services.domain.ids import SessionId as Session
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.plan import ChainHop
from scheduler_harness import MS

GATEWAY = GatewayId("g")
LLM = ModelKey("llm", "1")
NOW = 10**12
DAY_NS = 86_400 * 10**9
Progress = scheduler_pb2.SessionProgress


def submit(**changes: Any) -> scheduler_pb2.SubmitSession:
    values = {
        "request_id": 7,
        "model": "llm",
        "model_version": "1",
        "prompt_tokens": 5,
        "max_tokens": 9,
        "budget_ns": 500,
        "priority": -1,
        **changes,
    }
    return scheduler_pb2.SubmitSession(**values)


def event_of(
    message: scheduler_pb2.SubmitSession, usual: TokenObjectives | None = None
) -> events.SessionRequested:
    return session_messages.session_requested(GATEWAY, message, NOW, None, usual)


def test_a_request_arrived_when_it_came_to_its_gateway() -> None:
    assert event_of(submit(waited_ns=30)) == events.SessionRequested(
        RequestId(GATEWAY, 7), LLM, 5, 9, NOW + 500, -1, arrived_ns=NOW - 30
    )


def test_objectives_of_the_request_come_before_those_of_the_model_each_by_itself() -> None:
    usual = TokenObjectives(800 * MS, 80 * MS)
    assert event_of(submit()).objectives is None
    assert event_of(submit(), usual).objectives is None, "the dispatcher knows the model's"
    assert event_of(submit(per_token_slo_ns=MS)).objectives == TokenObjectives(0, MS)
    mixed = event_of(submit(per_token_slo_ns=MS), usual).objectives
    assert mixed == TokenObjectives(800 * MS, MS)
    both = event_of(submit(first_token_slo_ns=3, per_token_slo_ns=4), usual).objectives
    assert both == TokenObjectives(3, 4)


def test_a_resubmitted_request_brings_what_it_has_generated() -> None:
    progress = Progress(generated_tokens=4, first_token_ns=10, decode_ns=20)
    event = event_of(submit(waited_ns=30, progress=progress))
    assert event.progress == events.SessionProgress(RequestId(GATEWAY, 7), 4, 10, 20)


def test_progress_is_taken_as_it_comes_and_what_has_no_token_left_out() -> None:
    message = scheduler_pb2.SessionsProgressed(
        sessions=[
            Progress(request_id=1, generated_tokens=3, first_token_ns=5, decode_ns=6),
            Progress(request_id=2, first_token_ns=5),
        ]
    )
    event = session_messages.sessions_progressed(GATEWAY, message)
    assert event.sessions == (events.SessionProgress(RequestId(GATEWAY, 1), 3, 5, 6),)


def test_the_end_brings_the_whole_progress_if_the_gateway_says_it() -> None:
    said = Progress(request_id=1, generated_tokens=3, first_token_ns=5, decode_ns=6)
    finished = scheduler_pb2.RequestFinished(request_id=1, progress=said)
    request = RequestId(GATEWAY, 1)
    assert wire_messages.request_completed(GATEWAY, finished) == events.RequestCompleted(
        request, events.SessionProgress(request, 3, 5, 6)
    )
    rows = scheduler_pb2.RequestFinished(request_id=1)
    assert wire_messages.request_completed(GATEWAY, rows) == events.RequestCompleted(request)


def test_an_order_says_what_was_promised_and_both_rings_of_a_split_session() -> None:
    def hop(agent: str, first: int) -> ChainHop:
        return ChainHop(AgentId(agent), PartitionKey(LLM, first, 6), first, 6)

    command = events.StartSession(
        Session(3),
        RequestId(GATEWAY, 7),
        "llm/0",
        (hop("a", 0),),
        (hop("b", 0), hop("c", 2)),
        TokenObjectives(800, 80),
        600,
        60,
    )
    order = session_messages.start_session_message(command, Epoch(2), "p").start_session
    assert (order.session_id, order.request_id, order.epoch) == (3, 7, 2)
    assert [hop.agent_id for hop in order.route] == ["a"]
    assert [hop.agent_id for hop in order.decode_route] == ["b", "c"]
    assert (order.first_token_slo_ns, order.per_token_slo_ns) == (800, 80)
    assert (order.predicted_first_token_ns, order.predicted_per_token_ns) == (600, 60)
    plain = events.StartSession(Session(3), RequestId(GATEWAY, 7), "llm/0", (hop("a", 0),))
    order = session_messages.start_session_message(plain, Epoch(2), "p").start_session
    assert not order.decode_route
    assert (order.first_token_slo_ns, order.predicted_per_token_ns) == (0, 0)


def test_an_order_to_move_names_what_is_moved_and_what_travels() -> None:
    hop = ChainHop(AgentId("a"), PartitionKey(LLM, 0, 4), 0, 4)
    started = events.StartSession(Session(8), RequestId(GATEWAY, 7), "llm:1/0", (hop,))
    moved = events.StartSession(
        Session(9), RequestId(GATEWAY, 7), "llm:1/1", (hop,), moves=Session(8), move_mode="tokens"
    )
    orders = [
        session_messages.start_session_message(each, Epoch(3), "plan").start_session
        for each in (started, moved)
    ]
    unspecified, by_tokens = scheduler_pb2.MOVE_MODE_UNSPECIFIED, scheduler_pb2.MOVE_MODE_TOKENS
    assert [each.moved_session_id for each in orders] == [0, 8]
    assert [each.move_mode for each in orders] == [unspecified, by_tokens]
    assert orders[1].session_id == 9
    assert [each.agent_id for each in orders[1].route] == ["a"]


def test_the_word_of_a_move_names_both_sessions_and_what_travelled() -> None:
    message = scheduler_pb2.SessionMoved(
        session_id=9, moved_session_id=8, mode=scheduler_pb2.MOVE_MODE_KV, tokens=70
    )
    moved = events.SessionMoved(Session(9), Session(8), cached_tokens=70)
    assert session_messages.session_moved(message) == moved
    assert session_messages.move_mode(message.mode) == "kv"
    assert session_messages.move_mode(scheduler_pb2.MOVE_MODE_TOKENS) == "tokens"
