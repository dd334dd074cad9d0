"""Requests through a real gateway: deadlines, cancels, overload, losses, drain, traces, keys."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import aiohttp
import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from catenary_gateway.process import GatewayProcess
from catenary_gateway.settings import GatewaySettings
from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    scheduler_pb2,
)
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.errors import Unavailable
from catenary_services.security.keys import add_key
from gateway_harness import Down, ScriptedScheduler, Stage, stage

CODE = grpc.StatusCode
SERVING, NOT_SERVING = 1, 2


def request_of(values: np.ndarray, model: str = "toy", **parameters: int) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name=model, id="me")
    request.inputs.add(name="in_0", datatype="FP32", shape=values.shape)
    request.raw_input_contents.append(values.astype(np.float32).tobytes())
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


ONE = np.ones((1, 4), np.float32)


def channel_to(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def stub_of(channel: grpc.aio.Channel) -> oip_grpc.GRPCInferenceServiceStub:
    return oip_grpc.GRPCInferenceServiceStub(channel)


async def refused(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


def details(error: grpc.aio.AioRpcError) -> tuple[dict[str, str], int | None]:
    """Metadata of ErrorInfo (with its reason), and the retry delay in nanoseconds."""
    trailers = dict(error.trailing_metadata())
    facts: dict[str, str] = {}
    delay = None
    for packed in status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            facts = {"reason": info.reason, **info.metadata}
        elif packed.Unpack(retry):
            delay = retry.retry_delay.ToNanoseconds()
    return facts, delay


async def test_rows_may_come_back_in_several_batches(running: Stage) -> None:
    scheduler = running.scheduler
    scheduler.script = lambda submit: [
        scheduler.batch([(submit.request_id, 4, 2, 0)]),
        scheduler.batch([(submit.request_id, 0, 4, 0)]),
    ]
    values = np.arange(24).reshape(6, 4)
    async with channel_to(running.grpc) as channel:
        answer = await stub_of(channel).ModelInfer(request_of(values), timeout=5)
    got = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(6, 4)
    np.testing.assert_array_equal(got, values)
    assert (await scheduler.hear("finished")).request_id == 1


async def test_models_without_rows_travel_whole(running: Stage) -> None:
    async with aiohttp.ClientSession(f"http://{running.http}") as session:
        tensor = {"name": "in_0", "datatype": "FP64", "shape": [3], "data": [1, 2.5, -3]}
        body = {"inputs": [tensor]}
        async with session.post("/v2/models/whole/versions/1/infer", json=body) as answer:
            assert (await answer.json())["outputs"][0]["data"] == [1, 2.5, -3]
    assert (await running.scheduler.hear("submit")).rows == 1


async def test_budget_is_the_smallest_of_what_was_asked(running: Stage) -> None:
    async with channel_to(running.grpc) as channel:
        infer = stub_of(channel).ModelInfer
        for call, longest_s in [
            (lambda: infer(request_of(ONE)), 10.0),
            (lambda: infer(request_of(ONE), timeout=3), 3.0),
            (lambda: infer(request_of(ONE, slo_ms=2000), timeout=3), 2.0),
        ]:
            await call()
            submit = await running.scheduler.hear("submit")
            # gRPC's own clock is coarse.
            assert longest_s - 1.0 < submit.budget_ns / 1e9 <= longest_s + 0.1


async def test_deadline_answers_and_cancels_even_if_nobody_else_does(running: Stage) -> None:
    running.scheduler.script = lambda submit: []
    async with channel_to(running.grpc) as channel:
        patient = stub_of(channel).ModelInfer(request_of(ONE, slo_ms=600_000))
        assert (await running.scheduler.hear("submit")).request_id == 1
        started = time.monotonic()
        error = await refused(stub_of(channel).ModelInfer(request_of(ONE, slo_ms=60)))
        assert error.code() == CODE.DEADLINE_EXCEEDED
        assert time.monotonic() - started > 0.05
        assert not patient.done(), "it was the deadline of this request and no other"
        assert details(error)[0]["stage"] == "queue"
        assert (await running.scheduler.hear("cancel")).request_id == 2
        patient.cancel()
        assert (await running.scheduler.hear("cancel")).request_id == 1
        running.agent.hold = True
        running.scheduler.script = running.scheduler.one_batch
        error = await refused(stub_of(channel).ModelInfer(request_of(ONE, slo_ms=60)))
        assert details(error)[0]["stage"] == "execute"
    assert running.gateway._capacity.requests == 0


async def test_client_that_goes_away_cancels_its_work(running: Stage) -> None:
    running.scheduler.script = lambda submit: []
    async with channel_to(running.grpc) as channel:
        call = stub_of(channel).ModelInfer(request_of(ONE))
        first = await running.scheduler.hear("submit")
        call.cancel()
        assert (await running.scheduler.hear("cancel")).request_id == first.request_id
    async with aiohttp.ClientSession(f"http://{running.http}") as session:
        tensor = {"name": "in_0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
        post = asyncio.create_task(
            session.post("/v2/models/toy/infer", json={"inputs": [tensor]}).__aenter__()
        )
        second = await running.scheduler.hear("submit")
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
    assert (await running.scheduler.hear("cancel")).request_id == second.request_id
    assert running.gateway._plane.unanswered == 0


async def test_reject_becomes_the_error_with_its_advice(running: Stage) -> None:
    running.scheduler.script = lambda submit: [
        Down(
            reject=scheduler_pb2.RejectRequest(
                request_id=submit.request_id,
                failure=common_pb2.Failure(reason="SLO_UNATTAINABLE", message="too late"),
                retry_after_ns=250_000_000,
                earliest_finish_after_ns=90_000_000,
            )
        )
    ]
    async with channel_to(running.grpc) as channel:
        error = await refused(stub_of(channel).ModelInfer(request_of(ONE)))
    assert error.code() == CODE.RESOURCE_EXHAUSTED
    facts, delay = details(error)
    assert (facts["reason"], facts["earliest_finish_ms"]) == ("SLO_UNATTAINABLE", "90")
    assert delay == 250_000_000
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "250"


async def test_overload_is_refused_at_once_with_advice(tmp_path: Path) -> None:
    async with stage(tmp_path, max_in_flight_requests=2) as running:
        running.agent.hold = True
        async with channel_to(running.grpc) as channel:
            infer = stub_of(channel).ModelInfer
            waiting = [asyncio.ensure_future(infer(request_of(ONE))) for _ in range(2)]
            for _ in waiting:
                await running.scheduler.hear("submit")
            error = await refused(infer(request_of(ONE)))
            facts, delay = details(error)
            assert (error.code(), facts["reason"]) == (CODE.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert delay
            while len(running.agent.held) < 2:
                running.agent.arrived.clear()
                await asyncio.wait_for(running.agent.arrived.wait(), 30)
            for held in running.agent.held:
                running.agent.answer(*held)
            await asyncio.gather(*waiting)
            running.agent.hold = False
            await infer(request_of(ONE))
        assert running.gateway._capacity.bytes == 0


async def test_bytes_are_bounded_too(tmp_path: Path) -> None:
    async with stage(tmp_path, max_in_flight_bytes=10_000) as running:
        running.agent.hold = True
        async with channel_to(running.grpc) as channel:
            infer = stub_of(channel).ModelInfer
            first = asyncio.ensure_future(infer(request_of(np.ones((500, 4)))))
            await running.scheduler.hear("submit")
            error = await refused(infer(request_of(np.ones((500, 4)))))
            assert details(error)[0]["reason"] == "OVERLOADED"
            first.cancel()


async def test_undeliverable_rows_are_reported_and_sent_again(running: Stage) -> None:
    scheduler = running.scheduler
    scheduler.script = lambda submit: [
        scheduler.batch([(submit.request_id, 0, submit.rows, 0)], agent="agent-gone")
    ]
    async with channel_to(running.grpc) as channel:
        call = asyncio.ensure_future(stub_of(channel).ModelInfer(request_of(ONE)))
        submit = await scheduler.hear("submit")
        failed = await scheduler.hear("delivery_failed")
        assert failed.failure.retryable
        assert (failed.failure.reason, failed.failure.agent_id) == ("PARTITION_LOST", "agent-gone")
        scheduler.send(*scheduler.one_batch(submit))
        assert (await call).raw_output_contents[0] == ONE.tobytes()


async def test_duplicate_results_are_harmless(running: Stage) -> None:
    running.agent.copies = 3
    async with channel_to(running.grpc) as channel:
        for number in range(5):
            values = ONE * number
            answer = await stub_of(channel).ModelInfer(request_of(values))
            assert answer.raw_output_contents[0] == values.tobytes()


async def test_next_scheduler_hears_of_everything_unfinished(tmp_path: Path) -> None:
    successor = ScriptedScheduler()
    successor.epoch = 2
    successor.standby = True
    await successor.start()
    async with stage(tmp_path) as running:
        first = running.scheduler
        running.gateway._schedulers.links[0]._addresses += (f"127.0.0.1:{successor.port}",)
        successor.peers = first.peers
        running.agent.hold = True
        async with channel_to(running.grpc) as channel:
            infer = stub_of(channel).ModelInfer
            sent = asyncio.ensure_future(infer(request_of(ONE * 2)))
            await first.hear("submit")
            await asyncio.wait_for(running.agent.arrived.wait(), 30)
            first.script = lambda submit: []
            queued = asyncio.ensure_future(infer(request_of(ONE * 3)))
            await first.hear("submit")
            successor.script = lambda submit: (
                [] if submit.in_flight else successor.one_batch(submit)
            )
            await first.stop()
            async with asyncio.timeout(30):
                while running.gateway._schedulers.links[0].is_connected:
                    await asyncio.sleep(0.01)
            late = asyncio.ensure_future(infer(request_of(ONE * 4)))
            running.agent.hold = False
            successor.standby = False
            again = {}
            for _ in range(3):
                submit = await successor.hear("submit")
                again[submit.request_id] = submit
            assert [(f.batch_id, f.rows) for f in again[1].in_flight] == [(1 << 40 | 1, 1)]
            assert again[1].budget_ns < 10**10
            assert not again[2].in_flight
            running.agent.answer(*running.agent.held[0])
            answers = await asyncio.gather(sent, queued, late)
        got = [np.frombuffer(a.raw_output_contents[0], np.float32)[0] for a in answers]
        assert got == [2, 3, 4]
    await successor.stop()


async def test_without_any_scheduler_requests_are_refused_with_advice(tmp_path: Path) -> None:
    async with stage(tmp_path, wait=False, scheduler_addresses=["127.0.0.1:1"]) as running:
        async with channel_to(running.grpc) as channel:
            error = await refused(stub_of(channel).ModelInfer(request_of(ONE)))
            assert error.code() == CODE.UNAVAILABLE
            assert details(error)[1]
            assert (await stub_of(channel).ServerLive(oip.ServerLiveRequest())).live
            assert not (await stub_of(channel).ServerReady(oip.ServerReadyRequest())).ready
        async with channel_to(running.admin) as channel:
            operator = admin_pb2_grpc.AdminStub(channel)
            status = await operator.GetStatus(admin_pb2.GetStatusRequest())
            assert status.scheduler_problem.startswith("no scheduler is connected: UNAVAILABLE")
            assert list(status.gateways) == ["gateway-t"]
            call = operator.GetPlan(admin_pb2.GetPlanRequest())
            assert (await refused(call)).code() == CODE.UNAVAILABLE


async def ready_table(running: Stage) -> None:
    models = [model for model in running.scheduler.models if model.ready]
    running.scheduler.send(Down(models=scheduler_pb2.ModelTable(models=models)))
    await running.gateway.wait_ready(5)


async def test_readiness_follows_models_scheduler_and_drain(tmp_path: Path) -> None:
    async with stage(tmp_path, unavailable_grace_s=0.05) as running:  # noqa: SIM117
        async with channel_to(running.grpc) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

            async def told() -> int:
                return (await asyncio.wait_for(watch.read(), 30)).status

            assert await told() == NOT_SERVING, "a model is not ready"
            await ready_table(running)
            assert await told() == SERVING
            port = running.scheduler.port
            await running.scheduler.stop()
            assert await told() == NOT_SERVING, "no scheduler for longer than the grace"
            running.scheduler.models = running.scheduler.models[:1]
            await running.scheduler.start(port)
            assert await told() == SERVING
            await running.scheduler.hear("hello")
            running.agent.hold = True
            running.agent.arrived.clear()
            call = asyncio.ensure_future(stub_of(channel).ModelInfer(request_of(ONE)))
            await asyncio.wait_for(running.agent.arrived.wait(), 30)
            drained = asyncio.create_task(running.gateway.drain(5))
            assert await told() == NOT_SERVING
            error = await refused(stub_of(channel).ModelInfer(request_of(ONE)))
            assert error.code() == CODE.UNAVAILABLE
            assert details(error)[1]
            assert not drained.done()
            running.agent.answer(*running.agent.held[0])
            assert (await call).raw_output_contents
            await asyncio.wait_for(drained, 30)


async def test_keys_are_asked_for_at_every_endpoint_but_the_probes(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    toy_only = add_key(file, "toy", ["infer:toy"])
    admin = add_key(file, "root", ["admin"])
    async with stage(tmp_path, api_keys_file=file) as running:
        key = [("authorization", f"Bearer {toy_only}")]
        root = [("authorization", f"Bearer {admin}")]
        async with channel_to(running.grpc) as channel:
            stub = stub_of(channel)
            error = await refused(stub.ModelInfer(request_of(ONE)))
            assert error.code() == CODE.UNAUTHENTICATED
            error = await refused(stub.ModelInfer(request_of(ONE, "nope"), metadata=key))
            assert error.code() == CODE.PERMISSION_DENIED, "does not tell what exists"
            await stub.ModelInfer(request_of(ONE), metadata=key)
            await stub.ServerLive(oip.ServerLiveRequest())
            await stub.ServerReady(oip.ServerReadyRequest())
            for call in (
                stub.ModelReady(oip.ModelReadyRequest(name="toy")),
                stub.ServerMetadata(oip.ServerMetadataRequest()),
                stub.ModelMetadata(oip.ModelMetadataRequest(name="toy")),
                stub.RepositoryIndex(oip.RepositoryIndexRequest()),
                stub.ModelStreamInfer(iter([request_of(ONE)])).read(),
                generation_pb2_grpc.GenerationStub(channel)
                .Generate(generation_pb2.GenerateRequest())
                .read(),
            ):
                assert (await refused(call)).code() == CODE.UNAUTHENTICATED
            load = stub.RepositoryModelLoad(
                oip.RepositoryModelLoadRequest(model_name="a"), metadata=key
            )
            assert (await refused(load)).code() == CODE.PERMISSION_DENIED
        async with channel_to(running.admin) as channel:
            status = admin_pb2_grpc.AdminStub(channel).GetStatus
            request = admin_pb2.GetStatusRequest()
            assert (await refused(status(request))).code() == CODE.UNAUTHENTICATED
            assert (await refused(status(request, metadata=key))).code() == CODE.PERMISSION_DENIED
            assert (await status(request, metadata=root)).scheduler_id == "s"
        async with aiohttp.ClientSession(f"http://{running.http}") as session:
            for path in ("/v2", "/v2/models/toy", "/v2/models/toy/ready", "/v1/models"):
                async with session.get(path) as answer:
                    assert answer.status == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
            headers = {"Authorization": f"Bearer {toy_only}"}
            async with session.get("/v2/models/toy", headers=headers) as answer:
                assert answer.status == 200
            for path in ("/healthz", "/v2/health/live"):
                async with session.get(path) as answer:
                    assert answer.status == 200


async def test_trace_tells_where_the_time_went(running: Stage) -> None:
    async with channel_to(running.grpc) as channel, channel_to(running.admin) as admin:
        get = admin_pb2_grpc.AdminStub(admin).GetTrace
        error = await refused(get(admin_pb2.GetTraceRequest(request_id="who")))
        assert error.code() == CODE.INVALID_ARGUMENT
        await stub_of(channel).ModelInfer(request_of(ONE))
        trace = await get(admin_pb2.GetTraceRequest(request_id="me"))
        assert (trace.request_id, trace.model, trace.outcome) == ("me", "toy:1", "OK")
        spans = {span.name: span for span in trace.spans}
        assert list(spans) == [
            "gateway.receive",
            "gateway.queue",
            "gateway.send",
            "agent.transfer",
            "agent.wait",
            "agent.compute",
            "agent.send",
            "gateway.return",
            "gateway.merge",
        ]
        assert spans["agent.compute"].duration_ns == 2000
        assert spans["agent.compute"].process == "agent-0"
        assert all(s.start_ns + s.duration_ns <= trace.total_ns for s in trace.spans)
        running.scheduler.script = lambda submit: []
        await refused(stub_of(channel).ModelInfer(request_of(ONE, slo_ms=20)))
        latest = await get(admin_pb2.GetTraceRequest())
        assert latest.outcome == "DEADLINE_EXCEEDED"


async def test_sampled_requests_carry_their_context_and_export_spans(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    async with stage(tmp_path, exporter=exporter, trace_sample_ratio=0.0) as running:
        async with channel_to(running.grpc) as channel:
            infer = stub_of(channel).ModelInfer
            await infer(request_of(ONE))
            assert (await running.scheduler.hear("submit")).traceparent == ""
            await infer(request_of(ONE), metadata=[("traceparent", parent)])
            submit = await running.scheduler.hear("submit")
            await running.scheduler.hear("finished")
        assert submit.traceparent.startswith("00-" + "ab" * 16)
        await asyncio.to_thread(running.gateway._tracer.force_flush)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["inference.GRPCInferenceService/ModelInfer"]
    assert root.parent.span_id == int("cd" * 8, 16)
    assert submit.traceparent.split("-")[2] == f"{root.context.span_id:016x}"
    assert {"gateway.queue", "gateway.send", "gateway.merge"} <= set(spans)
    assert all(span.context.trace_id == int("ab" * 16, 16) for span in spans.values())
    for span in spans.values():
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time


async def test_metrics_count_requests_and_refusals(tmp_path: Path) -> None:
    async with stage(tmp_path, metrics_port=0) as running:
        async with channel_to(running.grpc) as channel:
            infer = stub_of(channel).ModelInfer
            await infer(request_of(ONE))
            await refused(infer(request_of(ONE, "nope")))
            await refused(infer(request_of(np.ones((1, 5)))))
        url = f"http://127.0.0.1:{running.gateway.metrics_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            text = await answer.text()
    assert 'catenary_requests_total{model="toy:1",outcome="OK"} 1.0' in text
    assert 'catenary_requests_total{model="toy:1",outcome="INVALID_INPUT"} 1.0' in text
    assert 'catenary_requests_total{model="",outcome="MODEL_NOT_FOUND"} 1.0' in text
    assert "catenary_in_flight_bytes 0.0" in text
    assert 'catenary_slo_attainment_ratio{model="toy:1"} 1.0' in text
    assert 'catenary_arrivals_total{kind="good",model="toy:1"} 1.0' in text
    assert 'catenary_arrivals_total{kind="client",model="toy:1"} 1.0' in text
    assert 'catenary_arrivals_total{kind="client",model=""} 1.0' in text


async def test_ids_are_echoed_or_made(running: Stage) -> None:
    tensor = {"name": "in_0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    body = json.dumps({"inputs": [tensor]}).encode()
    async with aiohttp.ClientSession(f"http://{running.http}") as session:
        headers = {"X-Request-Id": "mine"}
        async with session.post("/v2/models/toy/infer", data=body, headers=headers) as answer:
            assert (await answer.json())["id"] == "mine"
            assert answer.headers["X-Request-Id"] == "mine"
        async with session.post("/v2/models/toy/infer", data=body) as answer:
            assert (await answer.json())["id"].startswith("gateway-t-")


async def test_a_model_that_does_not_generate_is_not_asked_for_text(running: Stage) -> None:
    async with channel_to(running.grpc) as channel:
        generate = generation_pb2_grpc.GenerationStub(channel).Generate
        for model, code in (("toy", CODE.INVALID_ARGUMENT), ("nobody", CODE.NOT_FOUND)):
            call = generate(generation_pb2.GenerateRequest(model=model, prompt="hi"))
            assert (await refused(call.read())).code() == code


async def test_taken_port_stops_the_start_and_nothing_is_left_behind(tmp_path: Path) -> None:
    async with stage(tmp_path) as running:
        taken = {
            "grpc_port": running.gateway.grpc_port,
            "http_port": running.gateway.http_port,
            "admin_port": running.gateway.admin_port,
        }
        for name, port in taken.items():
            ports = {"grpc_port": 0, "http_port": 0, "admin_port": 0} | {name: port}
            second = GatewayProcess(
                GatewaySettings(
                    gateway_id="second", insecure=True, runtime_dir=tmp_path / "other", **ports
                )
            )
            before = asyncio.all_tasks()
            with pytest.raises(Unavailable, match="cannot listen"):
                await second.start()
            await asyncio.wait_for(second.stop(), 30)
            assert asyncio.all_tasks() <= before


async def test_frames_come_and_go_over_every_transport(tmp_path: Path) -> None:
    for transport in ("shm", "tcp", "grpc"):
        async with (
            stage(tmp_path, transports=[transport]) as running,
            channel_to(running.grpc) as channel,
        ):
            values = np.arange(40_000).reshape(10_000, 4)
            answer = await stub_of(channel).ModelInfer(request_of(values), timeout=5)
            assert answer.raw_output_contents[0] == values.astype(np.float32).tobytes()
