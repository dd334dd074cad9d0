from __future__ import annotations

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.dispatch import events
from catenary_scheduler.dispatch.text_lengths import TextLengths
from catenary_scheduler.wire import messages as wire_messages
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    Epoch,
    GatewayId,
    ModelKey,
    PartitionKey,
    RequestId,
)
from catenary_services.domain.model import TokenUnits

MODEL = ModelKey("toy", "1")
NOW = 1_000_000_000


def request(gateway: str, number: int) -> RequestId:
    return RequestId(GatewayId(gateway), number)


def test_budgets_become_moments_of_our_clock() -> None:
    message = scheduler_pb2.SubmitRequest(
        request_id=7,
        model="toy",
        model_version="1",
        rows=3,
        budget_ns=500,
        priority=-1,
        in_flight=[scheduler_pb2.InFlight(batch_id=9, request_row=1, rows=2, expected_after_ns=40)],
    )
    arrived = wire_messages.request_arrived(GatewayId("g"), message, MODEL, NOW)
    assert arrived == events.RequestArrived(
        request("g", 7),
        MODEL,
        3,
        NOW + 500,
        -1,
        (events.AdoptedRows(BatchId(9), 1, 2, NOW + 40),),
    )


def test_texts_become_runs_of_counted_tokens() -> None:
    units = TokenUnits(16, 64)
    run = scheduler_pb2.TextRows
    message = scheduler_pb2.SubmitRequest(
        request_id=7, model="toy", rows=6, texts=[run(rows=5, tokens=3), run(rows=1, tokens=90)]
    )
    arrived = wire_messages.request_arrived(GatewayId("g"), message, MODEL, NOW, units)
    assert arrived.texts is not None
    assert (arrived.texts.ends, arrived.texts.tokens) == ((5, 6), (8, 64))
    assert arrived.full_rows == (5 * 8 + 64) / 64
    # Rows are rows where the model's batches are counted in them.
    assert wire_messages.request_arrived(GatewayId("g"), message, MODEL, NOW).full_rows == 6
    del message.texts[:]  # of a gateway of an earlier release
    arrived = wire_messages.request_arrived(GatewayId("g"), message, MODEL, NOW, units)
    assert (arrived.texts, arrived.full_rows) == (TextLengths((6,), (64,), 6.0), 6.0)


def test_reports_become_intervals_of_our_clock() -> None:
    report = scheduler_pb2.StageReport(
        batch_id=1,
        position=2,
        compute_ended_ago_ns=10,
        compute_ns=100,
        transfer_ended_ago_ns=150,
        transfer_ns=30,
    )
    assert wire_messages.stage_reported(report, NOW) == events.StageReported(
        BatchId(1), 2, NOW - 110, NOW - 10, NOW - 180, NOW - 150
    )
    report.transfer_ns = 0
    assert wire_messages.stage_reported(report, NOW).transfer_start_ns is None


def test_starts_become_moments_of_our_clock() -> None:
    start = scheduler_pb2.StageStart(batch_id=1, position=2, started_ago_ns=10, is_transfer=True)
    assert wire_messages.stage_started(start, NOW) == events.StageStarted(
        BatchId(1), 2, NOW - 10, True
    )


def test_a_hop_is_sent_with_its_windows() -> None:
    part = PartitionKey(MODEL, 0, 2)
    hop = events.PlannedHop(
        AgentId("a"), part, NOW + 50, 20, NOW + 30, 10, 0, NOW + 45, BatchId(7), NOW + 25
    )
    sent = wire_messages.hop_message(hop)
    assert (sent.reserved_start_ns, sent.reserved_duration_ns) == (NOW + 50, 20)
    assert (sent.earliest_start_ns, sent.behind_batch_id) == (NOW + 45, 7)
    assert (sent.transfer_start_ns, sent.transfer_duration_ns) == (NOW + 30, 10)
    assert sent.transfer_earliest_ns == NOW + 25
    unsent = wire_messages.hop_message(events.PlannedHop(AgentId("a"), part, NOW, 20, NOW))
    assert (unsent.transfer_start_ns, unsent.transfer_duration_ns) == (0, 0)


def test_a_failure_names_an_agent_or_nobody() -> None:
    failure = common_pb2.Failure(reason="PARTITION_LOST", message="gone", retryable=True)
    assert wire_messages.batch_failed(3, failure).agent is None
    failure.agent_id = "agent-1"
    event = wire_messages.batch_failed(3, failure)
    assert (event.agent, event.reason, event.retryable) == ("agent-1", "PARTITION_LOST", True)


def test_every_gateway_gets_its_own_slices_and_the_whole_route() -> None:
    hop = events.PlannedHop(AgentId("a"), PartitionKey(MODEL, 0, 2), NOW + 5, 50)
    command = events.DispatchBatch(
        BatchId(4),
        3,
        (
            events.BatchSlice(request("g", 1), 0, 1, 0),
            events.BatchSlice(request("h", 1), 2, 1, 1),
            events.BatchSlice(request("g", 2), 0, 1, 2),
        ),
        (hop,),
        NOW + 55,
    )
    traced = {request("g", 2): "00-trace"}
    messages = wire_messages.dispatch_messages(command, Epoch(6), "plan", traced, NOW)
    ours = messages[GatewayId("g")].dispatch
    theirs = messages[GatewayId("h")].dispatch
    assert [(s.request_id, s.batch_row, s.traceparent) for s in ours.slices] == [
        (1, 0, ""),
        (2, 2, "00-trace"),
    ]
    assert [(s.request_row, s.batch_row) for s in theirs.slices] == [(2, 1)]
    assert (ours.epoch, ours.batch_id, ours.batch_rows, ours.plan_id) == (6, 4, 3, "plan")
    assert ours.expected_after_ns == theirs.expected_after_ns == 55
    assert ours.route[0].reserved_start_ns == NOW + 5
    assert (ours.route[0].model, ours.route[0].last_block) == ("toy", 2)


def test_a_refusal_carries_offsets() -> None:
    command = events.Reject(request("g", 1), "SLO_UNATTAINABLE", "late", 30, NOW + 70)
    reject = wire_messages.reject_message(command, NOW).reject
    assert (reject.retry_after_ns, reject.earliest_finish_after_ns) == (30, 70)
    assert reject.failure.retryable
    hopeless = events.Reject(request("g", 1), "INVALID_INPUT", "no")
    reject = wire_messages.reject_message(hopeless, NOW).reject
    assert (reject.retry_after_ns, reject.earliest_finish_after_ns) == (0, 0)
    assert not reject.failure.retryable


def test_an_agent_that_says_little_is_a_machine_of_its_own() -> None:
    hello = scheduler_pb2.AgentHello(agent_id="a", device="cpu", link_bytes_per_second=5)
    agent = wire_messages.agent_of(hello)
    assert (agent.server, agent.device_class) == ("a", "cpu")
    assert (agent.virtual_level, agent.device_id) == (1, "a")


def test_a_virtual_gpu_names_its_level_and_its_device() -> None:
    hello = scheduler_pb2.AgentHello(
        agent_id="a", device="cuda:0", link_bytes_per_second=5, virtual_level=4, device_id="gpu-1"
    )
    agent = wire_messages.agent_of(hello)
    assert (agent.virtual_level, agent.device_id) == (4, "gpu-1")


def test_partition_keys_survive_the_wire() -> None:
    key = PartitionKey(MODEL, 2, 5)
    assert wire_messages.partition_of(wire_messages.partition_message(key)) == key
