"""Both clients against one real server; every test runs with each of them."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

import catenary
import catenary_services.errors as served
from catenary import InferRequest, errors
from catenary.rpc.connection import Connection
from catenary.rpc.retry import RetryPolicy
from catenary_protos.inference import grpc_predict_v2_pb2 as oip

LINE_DELAY_S = 0.2
X = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


async def test_outputs_come_back_with_id_model_and_version(server, connect):
    inputs = {**X, "words": np.array(["ä", "b"]), "half": np.ones((0, 2), np.float16)}
    result = await connect.to(server).infer("net", inputs, version="3", request_id="mine")
    np.testing.assert_array_equal(result["x"], X["x"])
    assert result["words"].tolist() == ["ä".encode(), b"b"]
    assert result["half"].shape == (0, 2)
    assert (result.id, result.model, result.version) == ("mine", "net", "3")
    assert result.parameters["triton_final_response"] is True


async def test_each_request_gets_an_id_of_its_own(server, connect):
    client = connect.to(server)
    first, second = await client.infer("net", X), await client.infer("net", X)
    assert first.id
    assert first.id != second.id


async def test_wanted_outputs_slo_and_priority_reach_the_server(server, connect):
    await connect.to(server).infer("net", X, outputs=["y", "z"], slo_ms=40, priority=3)
    (request,) = server.requests
    assert [output.name for output in request.outputs] == ["y", "z"]
    assert request.parameters["slo_ms"].int64_param == 40
    assert request.parameters["priority"].int64_param == 3


async def test_only_a_limit_of_the_call_itself_travels_as_its_deadline(server, connect):
    client = connect.to(server, timeout_s=30)
    await client.infer("net", X)
    await client.infer("net", X, timeout_s=5)
    assert server.deadlines[0] is None
    assert 0 < server.deadlines[1] <= 5.2


@pytest.mark.parametrize("limits", [{"timeout_s": 0.2}, {}], ids=["deadline", "patience"])
async def test_no_call_waits_past_its_limit_and_the_server_learns_of_it(server, connect, limits):
    server.go.clear()
    # After 20 s the server itself would end the call, with another error.
    client = connect.to(server, timeout_s=3600 if limits else 0.2)
    with pytest.raises(errors.DeadlineExceededError) as caught:
        await client.infer("net", X, request_id="slow", **limits)
    assert caught.value.request_id == "slow"
    assert await asyncio.to_thread(server.cancelled.wait, 5)


async def test_a_cancelled_task_cancels_its_request(server):
    server.go.clear()
    async with catenary.AsyncClient(server.target) as client:
        task = asyncio.create_task(client.infer("net", X))
        assert await asyncio.to_thread(server.waiting.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.cancelled.wait, 5)


async def test_errors_are_typed_and_name_the_field(server, connect):
    server.failures.append(served.InvalidInput('inputs["x"].shape', "has 2 dimensions"))
    with pytest.raises(errors.InvalidInputError) as caught:
        await connect.to(server).infer("net", X)
    assert caught.value.field == 'inputs["x"].shape'
    assert caught.value.code == "INVALID_ARGUMENT"
    assert "has 2 dimensions" in caught.value.message


async def test_no_server_is_unavailable_not_a_hang(connect):
    with pytest.raises(errors.UnavailableError):
        await connect.to("127.0.0.1:1", timeout_s=10).live()


async def test_messages_far_beyond_the_default_limit_pass(server, connect):
    big = {"x": np.ones(5 << 20, np.float32)}
    result = await connect.to(server).infer("net", big)
    assert result["x"].nbytes == 20 << 20


async def test_what_the_server_refuses_as_too_large_says_so(server, connect):
    with pytest.raises(errors.PayloadTooLargeError):
        await connect.to(server).infer("net", {"x": np.ones(9 << 20, np.float32)})


async def test_a_reply_that_contradicts_itself_is_a_protocol_error(server, connect):
    def short(request):
        reply = oip.ModelInferResponse(raw_output_contents=[b"123"])
        reply.outputs.add(name="y", datatype="FP32", shape=[1])
        return reply

    server.reply = short
    with pytest.raises(errors.ProtocolError, match="outputs"):
        await connect.to(server).infer("net", X)


async def test_health_and_repository(server, connect):
    client = connect.to(server)
    assert await client.live() is True
    assert await client.ready() is False
    assert await client.model_ready("net") is True
    assert await client.model_ready("big", "2") is False
    net, big = await client.models()
    assert (net.name, net.ready) == ("net", True)
    assert (big.ready, big.reason) == (False, "no agent has room")
    metadata = await client.model_metadata("net")
    assert metadata.inputs == (catenary.TensorInfo("x", "FP32", (-1, 3, 8, 12)),)
    with pytest.raises(errors.ModelNotFoundError):
        await client.model_metadata("absent")


async def test_operating_the_cluster(server, connect):
    client = connect.to(server)
    status = await client.status()
    assert (status.epoch, status.redis_connected) == (7, True)
    assert status.agents[0].partitions == ("net:1[0,4)",)
    plan = await client.plan()
    assert plan.document == {"models": [{"name": "net"}]}
    assert await client.apply_plan(plan.document) == "plan-4"
    assert server.orders[-1] == plan.document
    assert plan.last_switch is None
    replanned = await client.replan()
    assert (replanned.plan_id, replanned.changed) == ("plan-6", True)
    assert replanned.switch is not None
    assert replanned.switch.downtime == (catenary.ModelDowntime("net", "1", 21_000_000),)
    assert (await client.plan()).last_switch == replanned.switch
    assert (await client.replan()) == catenary.Replanned("plan-6", False)
    searched = await client.search_plan("net", {"new": 1, "old": 2}, objective="gpus", rate_per_s=9)
    assert (searched.chosen.shape, searched.chosen.throughput_per_s) == ("whole replicas", 120.5)
    assert searched.idle == (catenary.IdleGpu("old-1", "it is too slow"),)
    assert server.orders[-1].objective == "gpus"
    with pytest.raises(errors.InvalidInputError, match="gpus"):
        await client.search_plan("net", {})
    assert await client.deploy("net", slo_ms=200, partitions=3) == "plan-5"
    assert (server.orders[-1].slo_ns, server.orders[-1].partitions) == (200_000_000, 3)
    assert await client.drain("agent-0") is True
    assert await client.drain("agent-9") is False
    await client.undrain("agent-9")
    assert server.orders[-1].agent_id == "agent-9"
    assert await client.undeploy("net", version="2") == "2"


async def test_a_model_is_pulled_and_its_steps_are_told(server, connect):
    client, steps = connect.to(server), []
    brought = await client.pull("hf:org/tiny", watch=steps.append)
    assert (brought.phase, brought.model, brought.version) == ("done", "tiny", "3")
    assert [each.phase for each in steps] == [
        "listed",
        "fetching",
        "fetching",
        "importing",
        "done",
    ]
    assert (steps[2].done_bytes, steps[2].total_bytes) == (900_000, 900_000)
    with pytest.raises(errors.ContentMismatchError, match="not what its source says"):
        await client.pull(catenary.ImportOrder("hf:org/broken"))
    with pytest.raises(errors.ProtocolError, match="without a result"):
        await client.pull("hf:org/cut")
    with pytest.raises(errors.InvalidInputError, match="slo_ms"):
        await client.pull(catenary.ImportOrder("hf:org/tiny", slo_ms=-1))


async def test_recent_requests_are_listed_newest_first(server, connect):
    found = await connect.to(server).requests(limit=2)
    assert [(each.request_id, each.outcome) for each in found] == [
        ("r0", "OK"),
        ("r1", "OVERLOADED"),
    ]
    assert (found[1].model, found[1].total_ns, found[1].ended_ago_ns) == (
        "net:1",
        20_000_000,
        1_500_000_000,
    )
    with pytest.raises(catenary.InvalidInputError, match="limit"):
        await connect.to(server).requests(limit=501)


async def test_a_trace_has_the_spans_of_the_request(server, connect):
    trace = await connect.to(server).trace("mine")
    assert (trace.request_id, trace.outcome, trace.total_ns) == ("mine", "OK", 20_000_000)
    assert [span.name for span in trace.spans] == ["gateway.queue", "agent.compute"]


@pytest.mark.parametrize(
    "order", [{"partitions": -1}, {"slo_ms": 0}, {"slo_ms": float("nan")}, {"max_batch": 2**32}]
)
async def test_impossible_deployments_are_refused_before_sending(server, connect, order):
    with pytest.raises(errors.InvalidInputError) as caught:
        await connect.to(server).deploy("net", **order)
    assert caught.value.field in order
    assert not server.orders


async def test_a_stream_answers_each_request_and_survives_a_failed_one(server, connect):
    requests = [
        InferRequest("net", X, request_id="a"),
        InferRequest("absent", X, request_id="b"),
        InferRequest("net", X, request_id="c"),
    ]
    results = [result async for result in connect.to(server).infer_stream(requests)]
    assert [result.id for result in results] == ["a", "b", "c"]
    np.testing.assert_array_equal(results[2]["x"], X["x"])
    assert isinstance(results[1].error, errors.ModelNotFoundError)
    assert results[1].error.request_id == "b"
    with pytest.raises(errors.ModelNotFoundError):
        results[1]["x"]


async def test_a_stream_raises_what_its_requests_raised_after_the_answers(server, connect):
    def requests():
        yield InferRequest("net", X, request_id="a")
        raise ZeroDivisionError

    seen = []

    async def collect():
        async for result in connect.to(server).infer_stream(requests()):
            seen.append(result.id)

    with pytest.raises(ZeroDivisionError):
        await collect()
    # The blocking stream is collected on a thread before any of it arrives here.
    assert seen in (["a"], [])
    assert [request.id for request in server.requests] == ["a"]


async def test_a_stream_that_fails_as_a_whole_raises_a_typed_error(server, connect):
    server.failures.append(served.Unavailable("draining"))
    with pytest.raises(errors.UnavailableError):
        [_ async for _ in connect.to(server).infer_stream([InferRequest("net", X)])]


async def test_leaving_a_stream_early_cancels_it(server):
    async def endless():
        while True:
            yield InferRequest("net", X)

    async with catenary.AsyncClient(server.target) as client:
        stream = client.infer_stream(endless())
        await anext(stream)
        await stream.aclose()
        assert await asyncio.to_thread(server.cancelled.wait, 5)


def test_leaving_a_blocking_stream_early_cancels_it(server):
    with catenary.Client(server.target) as client:
        stream = client.infer_stream(InferRequest("net", X) for _ in iter(int, 1))
        assert next(stream).model == "net"
        stream.close()
        assert server.cancelled.wait(5)


async def test_a_closed_client_says_so(server, connect):
    client = connect.to(server)
    await client.live()
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.live()


def test_one_blocking_client_serves_several_threads(server):
    with catenary.Client(server.target, admin_target=server.target) as client:

        async def many():
            calls = (asyncio.to_thread(client.infer, "net", X) for _ in range(32))
            return await asyncio.gather(*calls, asyncio.to_thread(client.status))

        *results, status = asyncio.run(many())
    assert len({result.id for result in results}) == 32
    assert status.epoch == 7


def connection(target: str, **settings: object) -> Connection:
    known = {"api_key": None, "tls": None, "insecure": False, "timeout_s": 1.0}
    return Connection(target, **{**known, "admin_target": None, "retry": RetryPolicy(), **settings})


@pytest.mark.parametrize(
    ("target", "admin"),
    [
        ("127.0.0.1:8001", "127.0.0.1:8003"),
        ("[::1]:9000", "[::1]:8003"),
        ("dns:///localhost:8001", "dns:///localhost:8003"),
    ],
)
def test_the_admin_port_is_8003_of_the_same_host(target, admin):
    assert connection(target).address(admin=True) == admin
    assert connection(target).address(admin=False) == target


def test_the_admin_port_must_be_told_where_the_target_has_no_port():
    with pytest.raises(errors.InvalidInputError) as caught:
        connection("unix:/run/gateway.sock").address(admin=True)
    assert caught.value.field == "admin_target"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"target": "gateway.example:8001"}, "target"),
        ({"target": "10.0.0.1:8001"}, "target"),
        ({"target": "127.0.0.1.example:8001"}, "target"),
        ({"target": ""}, "target"),
        ({"target": "[::1]:1", "timeout_s": 0}, "timeout_s"),
        ({"target": "[::1]:1", "api_key": "a\nb"}, "api_key"),
        ({"target": "[::1]:1", "insecure": True, "tls": catenary.TlsConfig()}, "insecure"),
    ],
)
def test_bad_settings_are_refused_and_named(settings, field):
    with pytest.raises(errors.InvalidInputError) as caught:
        connection(**settings)
    assert caught.value.field == field


def test_plain_connections_to_other_machines_only_by_explicit_word():
    assert connection("gateway.example:8001", insecure=True).credentials() is None


def test_loopback_traffic_never_takes_a_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    with catenary.Client(server.target) as client:
        assert client.live()


async def test_a_gateway_at_the_end_of_a_slow_line_is_reached(server, connect):
    host, _, port = server.target.rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, int(port))

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(4_096):
                await asyncio.sleep(LINE_DELAY_S)
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, ours), copy(theirs, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as line:
        target = f"127.0.0.1:{line.sockets[0].getsockname()[1]}"
        client = connect.to(target)
        assert (await client.infer("echo", X, timeout_s=60)).outputs
        await client.close()


def test_grpc_retries_of_unsent_calls_are_left_on():
    options = dict(connection("127.0.0.1:1").options("127.0.0.1:1"))
    assert "grpc.enable_retries" not in options
    assert isinstance(grpc.insecure_channel("127.0.0.1:1", list(options.items())), grpc.Channel)
