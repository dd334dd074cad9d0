"""Objectives in, progress out, and what is said of both when an answer ends."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from catenary_protos.catenary.v1 import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    scheduler_pb2,
)
from catenary_services.telemetry.metrics import Metrics
from gateway_harness import Down
from generation_harness import TextStage, answering, text_stage
from small_models.tiny_tokenizer import END

MS = 1_000_000
Request = generation_pb2.GenerateRequest
HOUR_NS = 3_600 * 10**9


def promising(stage: TextStage, **promises: int) -> None:
    """The scheduler holds every session to what it is told here."""

    def script(submit: scheduler_pb2.SubmitSession) -> list[Down]:
        order = stage.scheduler.start_session(submit.request_id)
        order.start_session.MergeFrom(scheduler_pb2.StartSession(**promises))
        return [order]

    stage.scheduler.session_script = script


async def answer_of(stage: TextStage, **facts: object) -> generation_pb2.GenerateResponse:
    """The last response of a whole answer."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(stage.grpc, options=options) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        asked = Request(model="tiny", prompt="ab", **facts)
        responses = [response async for response in stub.Generate(asked, timeout=5)]
    assert not any(each.HasField("objectives") for each in responses[:-1])
    return responses[-1]


async def rest(call) -> generation_pb2.GenerateResponse:
    """Reads to the end; returns the last response."""
    last = None
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    assert last is not None
    return last


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, {"model": "tiny:1", **labels})
    return 0.0 if found is None else found


async def test_objectives_and_the_time_it_waited_travel_with_a_request(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage:
        stage.agent.script = answering
        began = time.monotonic_ns()
        await answer_of(
            stage, time_to_first_token_slo_ns=800 * MS, time_per_output_token_slo_ns=2**64 - 1
        )
        elapsed_ns = time.monotonic_ns() - began
        submit = await stage.scheduler.hear("submit_session")
        assert submit.first_token_slo_ns == 800 * MS
        assert submit.per_token_slo_ns == HOUR_NS, "longer than any request takes"
        assert 0 < submit.waited_ns < elapsed_ns
        assert not submit.HasField("progress")
        await answer_of(stage)
        submit = await stage.scheduler.hear("submit_session")
        assert (submit.first_token_slo_ns, submit.per_token_slo_ns) == (0, 0)


async def test_progress_is_told_now_and_then_and_whole_at_the_end(tmp_path: Path) -> None:
    async with text_stage(tmp_path, progress_interval_s=0.02) as stage:
        scheduler, reports = stage.scheduler, stage.gateway._sessions._progress
        async with grpc.aio.insecure_channel(stage.grpc) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            first, second = (stub.Generate(Request(model="tiny", prompt="ab")) for _ in range(2))
            sessions = [await stage.agent.session() for _ in range(2)]
            assert reports._timer is None, "nobody has a token yet"
            for session in sessions:
                await session.say("abc")
            seen: dict[int, scheduler_pb2.SessionProgress] = {}
            while len(seen) < 2 or min(each.generated_tokens for each in seen.values()) < 3:
                heard = await scheduler.hear("sessions_progressed")
                for each in heard.sessions:
                    assert each.generated_tokens > getattr(
                        seen.get(each.request_id), "generated_tokens", 0
                    ), "only who got tokens is in a report"
                    seen[each.request_id] = each
            assert reports._timer is None, "no timer while nothing happens"
            latest = seen[1]
            pending = stage.gateway._sessions._requests[1]
            assert latest.first_token_ns == pending.first_token_ns - pending.arrival.monotonic_ns
            assert latest.decode_ns == pending.last_token_ns - pending.first_token_ns
            for session in sessions:
                await session.send(END, "stop")
            ends = [await scheduler.hear("finished") for _ in range(2)]
            for call in (first, second):
                await rest(call)
        assert {end.request_id: end.progress.generated_tokens for end in ends} == {1: 4, 2: 4}
        for end in ends:
            assert end.progress.request_id == end.request_id
            assert end.progress.first_token_ns == seen[end.request_id].first_token_ns
            assert end.progress.decode_ns > seen[end.request_id].decode_ns


async def test_a_new_scheduler_hears_how_far_a_session_is(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, grpc.aio.insecure_channel(stage.grpc) as channel:
        scheduler = stage.scheduler
        stub = generation_pb2_grpc.GenerationStub(channel)
        call = stub.Generate(Request(model="tiny", prompt="ab", time_to_first_token_slo_ns=7))
        session = await stage.agent.session()
        await session.say("ab")
        got = ""
        while got != "ab":
            got += (await call.read()).text
        before = await scheduler.hear("submit_session")
        port = scheduler.port
        await scheduler.stop()
        scheduler.epoch = 2
        await scheduler.start(port)
        await scheduler.hear("hello")
        again = await scheduler.hear("submit_session")
        assert again.progress.generated_tokens == 2
        assert again.waited_ns > before.waited_ns
        assert again.progress.first_token_ns + again.progress.decode_ns <= again.waited_ns
        assert again.first_token_slo_ns == 7
        await session.send(END, "stop")
        await rest(call)


async def test_the_last_response_compares_measured_predicted_and_wanted(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with text_stage(tmp_path, exporter=exporter, trace_sample_ratio=1.0) as stage:
        stage.agent.script = answering
        promising(
            stage,
            first_token_slo_ns=60_000 * MS,
            per_token_slo_ns=1,
            predicted_first_token_ns=10**12,
            predicted_per_token_ns=10**12,
        )
        said = (await answer_of(stage)).objectives
        assert (said.time_to_first_token_slo_ns, said.time_per_output_token_slo_ns) == (
            60_000 * MS,
            1,
        )
        assert 0 < said.time_to_first_token_ns < 5 * 10**9
        assert 0 < said.time_per_output_token_ns < 5 * 10**9
        assert said.predicted_time_to_first_token_ns == 10**12
        assert not said.met, "no token takes one nanosecond"
        await stage.is_empty()
        metrics = stage.gateway._metrics
        name = "catenary_token_objectives_total"
        assert value(metrics, name, objective="time_to_first_token", met="true") == 1
        assert value(metrics, name, objective="time_per_output_token", met="false") == 1
        assert value(metrics, name, objective="time_per_output_token", met="true") == 0
        for objective in ("time_to_first_token", "time_per_output_token"):
            ratio = "catenary_token_prediction_ratio"
            assert value(metrics, f"{ratio}_count", objective=objective) == 1
            assert 0 < value(metrics, f"{ratio}_sum", objective=objective) < 0.01
    (span,) = [
        each for each in exporter.get_finished_spans() if each.name == "text_completion tiny:1"
    ]
    assert span.attributes["catenary.time_to_first_token.slo.seconds"] == 60
    assert span.attributes["catenary.time_per_output_token.predicted.seconds"] == 1000


async def test_one_token_meets_any_time_per_token_and_a_failure_meets_none(
    tmp_path: Path,
) -> None:
    async with text_stage(tmp_path) as stage:
        promising(stage, first_token_slo_ns=60_000 * MS, per_token_slo_ns=1)

        async def one_token(session) -> None:
            await session.send(END, "stop")

        stage.agent.script = one_token
        said = (await answer_of(stage)).objectives
        assert said.met
        assert said.time_per_output_token_ns == 0

        async def breaking_off(session) -> None:
            await session.say("a")
            reject = scheduler_pb2.RejectRequest(
                request_id=2, failure=common_pb2.Failure(reason="PARTITION_LOST", message="gone")
            )
            stage.scheduler.send(Down(reject=reject))

        stage.agent.script = breaking_off
        with pytest.raises(grpc.aio.AioRpcError):
            await answer_of(stage)
        await stage.is_empty()
        name, metrics = "catenary_token_objectives_total", stage.gateway._metrics
        assert value(metrics, name, objective="time_to_first_token", met="true") == 2
        assert value(metrics, name, objective="time_per_output_token", met="true") == 1
        assert value(metrics, name, objective="time_per_output_token", met="false") == 1


async def test_a_promise_counts_for_the_chain_that_kept_it(tmp_path: Path) -> None:
    async with text_stage(tmp_path, agents=2) as stage:
        promising(stage, predicted_first_token_ns=11, predicted_per_token_ns=12)
        async with grpc.aio.insecure_channel(stage.grpc) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            call = stub.Generate(Request(model="tiny", prompt="ab"))
            await (await stage.agents[0].session()).say("a")
            assert (await call.read()).text == "a"
            again = stage.scheduler.start_session(1, "agent-1")
            again.start_session.predicted_first_token_ns = 21
            stage.scheduler.send(again)
            await (await stage.agents[1].session()).say("b", finish="length")
            said = (await rest(call)).objectives
        assert said.predicted_time_to_first_token_ns == 11
        assert said.predicted_time_per_output_token_ns == 0, "no single chain made them all"


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_clients_find_predictions_in_headers(tmp_path: Path, stream: bool) -> None:
    async with text_stage(tmp_path) as stage:
        stage.agent.script = answering
        async with openai.AsyncOpenAI(base_url=f"{stage.http}/v1", api_key="x") as client:
            asked = {"model": "tiny", "prompt": "ab", "stream": stream}
            raw = await client.completions.with_raw_response.create(**asked)
            assert "x-predicted-ttft-ms" not in raw.headers
            promising(stage, predicted_first_token_ns=12_345_678, predicted_per_token_ns=MS)
            raw = await client.completions.with_raw_response.create(**asked)
            assert raw.headers["x-predicted-ttft-ms"] == "12.346"
            assert raw.headers["x-predicted-tpot-ms"] == "1.000"
            answered = raw.parse()
            if stream:
                async for _ in answered:
                    pass


async def test_what_can_never_meet_its_objectives_is_told_why(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage:
        why = "prompt: 900 tokens take 900 ms alone, its first token is wanted within 500 ms"

        def refuse(submit: scheduler_pb2.SubmitSession) -> list[Down]:
            failure = common_pb2.Failure(reason="SLO_UNATTAINABLE", message=why)
            reject = scheduler_pb2.RejectRequest(request_id=submit.request_id, failure=failure)
            return [Down(reject=reject)]

        stage.scheduler.session_script = refuse
        with pytest.raises(grpc.aio.AioRpcError, match="wanted within 500 ms") as raised:
            await answer_of(stage, time_to_first_token_slo_ns=500 * MS)
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(raised.value.trailing_metadata())
        assert trailers["grpc-retry-pushback-ms"] == "-1", "the same request never fits"
