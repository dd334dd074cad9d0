"""Sessions over catenary.v1.Generation: openings, restarts, late tokens, ends of every kind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from catenary_protos.catenary.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    frame_pb2,
    generation_pb2,
    generation_pb2_grpc,
    scheduler_pb2,
)
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.grpc.sampling_messages import sampling_of_message
from gateway_harness import GATEWAY, Down
from generation_harness import Session, TextStage, answering, generating, text_stage
from small_models.tiny_tokenizer import END, tokens_of

CODE = grpc.StatusCode
Request = generation_pb2.GenerateRequest
Sampling = generation_pb2.SamplingParameters


@asynccontextmanager
async def calling(stage: TextStage) -> AsyncIterator[generation_pb2_grpc.GenerationStub]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(stage.grpc, options=options) as channel:
        yield generation_pb2_grpc.GenerationStub(channel)


def asking(prompt: str = "ab", **facts: object) -> generation_pb2.GenerateRequest:
    return Request(**({"model": "tiny", "prompt": prompt} | facts))


async def read(call, text: str) -> generation_pb2.GenerateResponse:
    """Reads until this much text is there."""
    got = ""
    async with asyncio.timeout(30):
        while got != text:
            response = await call.read()
            assert response is not grpc.aio.EOF
            got += response.text
            assert text.startswith(got)
    return response


async def rest(call) -> tuple[str, generation_pb2.GenerateResponse]:
    """All that is left: text, and the last response."""
    got, last = "", None
    async with asyncio.timeout(30):
        while (response := await call.read()) is not grpc.aio.EOF:
            got += response.text
            last = response
    assert last is not None
    return got, last


async def refused(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rest(call)
    return raised.value


def facts_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    trailers = dict(error.trailing_metadata())
    for packed in status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details:
        info = error_details_pb2.ErrorInfo()
        if packed.Unpack(info):
            return {"reason": info.reason, **info.metadata}
    return {}


async def test_an_opening_says_all_an_agent_must_know(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        stage.agent.script = answering
        sampling = Sampling(max_tokens=20, temperature=0.5, seed=7, stop=["zzz"], min_tokens=2)
        call = stub.Generate(asking("ab", id="mine", sampling=sampling, deadline_ns=5 * 10**9))
        text, last = await rest(call)
        assert (text, last.finish_reason, last.id) == ("Hello!", "stop", "mine")
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 7)
        submit = await stage.scheduler.hear("submit_session")
        assert (submit.model, submit.model_version, submit.session_id) == ("tiny", "1", 0)
        assert (submit.prompt_tokens, submit.max_tokens, submit.request_id) == (2, 20, 1)
        assert 0 < submit.budget_ns <= 5 * 10**9
        (frame,) = stage.agent.frames
        assert frame.kind == frame_pb2.FRAME_KIND_SESSION_STEP
        assert (frame.epoch, frame.plan_id, len(frame.session_rows)) == (1, "p", 1)
        rows = frame.session_rows[0]
        assert (rows.session_id, rows.position, rows.tokens) == (1 << 40 | 1, 0, 0)
        opening = rows.opening
        assert (opening.gateway_id, opening.request_id) == (GATEWAY, 1)
        assert list(opening.token_ids) == tokens_of("ab")
        assert opening.prompt_tokens == 2
        assert [hop.agent_id for hop in opening.route] == ["agent-0"]
        assert 0 < opening.budget_ns <= 5 * 10**9
        assert sampling_of_message(opening.sampling) == SamplingParameters(
            max_tokens=20, min_tokens=2, temperature=0.5, seed=7
        ), "stop texts stay at the gateway"
        assert (await stage.scheduler.hear("finished")).request_id == 1


async def test_a_chat_is_put_into_the_models_words(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        stage.agent.script = answering
        said = [generation_pb2.ChatMessage(role="user", content="hi")]
        _, last = await rest(stub.Generate(Request(model="tiny:1", messages=said)))
        assert last.id.startswith("gateway-t-")
        opening = stage.agent.frames[0].session_rows[0].opening
        begin, end = 0, 1
        assert list(opening.token_ids) == [
            begin,
            *tokens_of("user\nhi"),
            end,
            *tokens_of("\n"),
            begin,
            *tokens_of("assistant\n"),
        ]
        assert opening.sampling.max_tokens == 512 - len(opening.token_ids)
        assert opening.sampling.HasField("seed"), "the gateway chooses one"


async def test_a_session_that_is_started_again_goes_on_without_gap_or_repeat(
    tmp_path: Path,
) -> None:
    async with text_stage(tmp_path, agents=2) as stage, calling(stage) as stub:
        first, second = stage.agents
        call = stub.Generate(asking("ab", sampling=Sampling(seed=3)))
        old = await first.session()
        await old.say("One, ")
        await read(call, "One, ")
        stage.scheduler.send(stage.scheduler.start_session(1, "agent-1"))
        new = await second.session()
        assert list(new.opening.token_ids) == tokens_of("abOne, ")
        assert new.opening.prompt_tokens == 2
        assert new.opening.sampling == old.opening.sampling
        # Whatever still comes of the old session is nobody's.
        await old.say("wrong")
        await new.say("two", finish="length")
        text, last = await rest(call)
        assert (text, last.finish_reason) == ("two", "length")
        assert last.usage.completion_tokens == 8
        assert (await stage.scheduler.hear("finished")).request_id == 1


async def test_tokens_count_once_and_in_order(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        call = stub.Generate(asking())
        session = await stage.agent.session()
        await session.say("ab")
        session.position -= 2
        await session.say("xy")  # the same positions again
        await session.say("c", finish="length")
        assert (await rest(call))[0] == "abc"
        assert stage.gateway._sessions.dropped == 2
        await session.say("late")
        await stage.scheduler.hear("finished")


@pytest.mark.parametrize("how", ["agent says so", "a token is lost", "agent unknown"])
async def test_a_failed_session_is_reported_and_another_one_goes_on(
    tmp_path: Path, how: str
) -> None:
    async with text_stage(tmp_path, agents=2) as stage, calling(stage) as stub:
        scheduler = stage.scheduler
        scheduler.agent = "nobody" if how == "agent unknown" else "agent-0"
        call = stub.Generate(asking())
        if how != "agent unknown":
            session = await stage.agent.session()
            await session.say("a")
            await read(call, "a")
            if how == "agent says so":
                await session.fail()
            else:
                session.position += 1
                await session.say("c")
        failed = await scheduler.hear("session_failed")
        assert failed.session_id == 1 << 40 | 1
        assert (failed.failure.reason, failed.failure.retryable) == ("PARTITION_LOST", True)
        scheduler.send(scheduler.start_session(1, "agent-1"))
        session = await stage.agents[1].session()
        await session.say("b", finish="length")
        assert (await rest(call))[0] == "b"
        assert list(session.opening.token_ids) == tokens_of(
            "ab" if how == "agent unknown" else "aba"
        )


async def test_a_new_scheduler_is_told_what_goes_on_where(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        scheduler = stage.scheduler
        running, waiting = stub.Generate(asking("run")), None
        session = await stage.agent.session()
        await session.say("a")
        await read(running, "a")
        scheduler.session_script = lambda _: []
        waiting = stub.Generate(asking("wait"))
        for _ in range(2):
            await scheduler.hear("submit_session")
        port = scheduler.port
        await scheduler.stop()
        await session.say("b")  # goes on meanwhile
        await read(running, "b")
        scheduler.epoch = 2
        await scheduler.start(port)
        await scheduler.hear("hello")
        again = {
            submit.request_id: submit
            for submit in [await scheduler.hear("submit_session") for _ in range(2)]
        }
        assert (again[1].session_id, again[2].session_id) == (1 << 40 | 1, 0)
        assert [hop.agent_id for hop in again[1].route] == ["agent-0"]
        assert (again[1].prompt_tokens, again[1].max_tokens) == (3, 509)
        scheduler.send(scheduler.start_session(2))
        other = await stage.agent.session()
        assert stage.agent.frames[-1].epoch == 2
        await session.say("c", finish="length")
        await other.say("d", finish="length")
        assert ((await rest(running))[0], (await rest(waiting))[0]) == ("c", "d")


def two_rings(stage: TextStage) -> None:
    """The first agent runs prompts, the second generates."""

    def script(submit: scheduler_pb2.SubmitSession) -> list[Down]:
        if submit.session_id:
            return []
        order = stage.scheduler.start_session(submit.request_id)
        order.start_session.decode_route.add(agent_id="agent-1", model="tiny", last_block=30)
        return [order]

    stage.scheduler.session_script = script


async def test_tokens_of_the_second_ring_may_overtake_the_first_one(tmp_path: Path) -> None:
    async with text_stage(tmp_path, agents=2) as stage, calling(stage) as stub:
        two_rings(stage)
        call = stub.Generate(asking("ab"))
        session = await stage.agent.session()
        assert [hop.agent_id for hop in session.opening.decode_route] == ["agent-1"]
        other = Session(stage.agents[1], session.session_id, session.opening, session.position + 1)
        await other.say("bc")
        await session.say("a")
        assert (await read(call, "abc")).finish_reason == ""
        await other.say("d", finish="length")
        assert (await rest(call))[0] == "d"


async def test_a_token_lost_between_two_rings_is_noticed(tmp_path: Path) -> None:
    async with text_stage(tmp_path, agents=2) as stage, calling(stage) as stub:
        two_rings(stage)
        call = stub.Generate(asking("ab"))
        session = await stage.agent.session()
        other = Session(stage.agents[1], session.session_id, session.opening, session.position + 2)
        await other.say("c")  # the one in front of it never came
        failed = await stage.scheduler.hear("session_failed")
        assert failed.session_id == session.session_id
        assert failed.failure.retryable
        call.cancel()


async def test_a_new_scheduler_is_told_of_the_ring_that_generates_only(tmp_path: Path) -> None:
    async with text_stage(tmp_path, agents=2) as stage, calling(stage) as stub:
        scheduler = stage.scheduler
        two_rings(stage)
        going, prompting = stub.Generate(asking("run")), stub.Generate(asking("prompt"))
        sessions = {
            session.opening.prompt_tokens: session
            for session in [await stage.agent.session() for _ in range(2)]
        }
        first, second = sessions[len("run")], sessions[len("prompt")]
        await first.say("a")
        await read(going, "a")
        port = scheduler.port
        await scheduler.stop()
        scheduler.epoch = 2
        for _ in range(2):
            await scheduler.hear("submit_session")
        await scheduler.start(port)
        again = {
            submit.request_id: submit
            for submit in [await scheduler.hear("submit_session") for _ in range(2)]
        }
        told = again[first.opening.request_id]
        assert told.session_id == first.session_id
        assert [hop.agent_id for hop in told.route] == ["agent-1"]
        assert (
            again[second.opening.request_id].session_id == 0
        )  # is started anew: where it runs now may end any moment
        going.cancel()
        prompting.cancel()


async def test_a_stop_text_across_tokens_ends_the_session_at_once(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        call = stub.Generate(asking(sampling=Sampling(stop=["END", "\n\n"])))
        session = await stage.agent.session()
        await session.say("so EN EN")
        await session.say("Dmore")
        text, last = await rest(call)
        assert (text, last.finish_reason) == ("so EN ", "stop")
        assert last.usage.completion_tokens == 9
        assert (await stage.scheduler.hear("finished")).request_id == 1


async def test_an_agent_that_forgets_to_end_is_not_read_for_ever(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        call = stub.Generate(asking(sampling=Sampling(max_tokens=3)))
        await (await stage.agent.session()).say("abcdef")
        text, last = await rest(call)
        assert (text, last.finish_reason, last.usage.completion_tokens) == ("abc", "length", 3)


async def test_a_client_that_goes_away_frees_everything_at_once(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        call = stub.Generate(asking())
        session = await stage.agent.session()
        await session.say("a")
        await read(call, "a")
        call.cancel()
        assert (await stage.scheduler.hear("cancel")).request_id == 1
        await stage.is_empty()
        await session.say("b")


@pytest.mark.parametrize("stage_name", ["queue", "execute"])
async def test_the_deadline_ends_a_request_wherever_it_is(tmp_path: Path, stage_name: str) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        if stage_name == "queue":
            stage.scheduler.session_script = lambda _: []
        error = await refused(stub.Generate(asking(deadline_ns=100_000_000)))
        assert error.code() == CODE.DEADLINE_EXCEEDED
        assert facts_of(error)["stage"] == stage_name
        assert (await stage.scheduler.hear("cancel")).request_id == 1
        await refused(stub.Generate(asking(), timeout=0.1))
        assert (await stage.scheduler.hear("cancel")).request_id == 2


async def test_an_answer_that_goes_on_has_no_deadline_and_one_that_falls_silent_has(
    tmp_path: Path,
) -> None:
    models = [generating(default_slo_ns=10**9)]
    quiet = text_stage(tmp_path, models=models, generation_silence_s=1.0)
    async with quiet as stage, calling(stage) as stub:
        call = stub.Generate(asking())
        session = await stage.agent.session()
        began = time.monotonic()
        while time.monotonic() - began < 2.0:  # twice the model's objective
            await session.say("a")
            await read(call, "a")
            await asyncio.sleep(0.05)
        error = await refused(call)
        assert error.code() == CODE.DEADLINE_EXCEEDED
        assert "no token came for 1 s" in (error.details() or "")
        assert (await stage.scheduler.hear("cancel")).request_id == 1


async def test_the_reason_arrives_before_the_clients_own_deadline(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        stage.scheduler.session_script = lambda _: []
        error = await refused(stub.Generate(asking(), timeout=2.0))
        assert error.code() == CODE.DEADLINE_EXCEEDED
        assert facts_of(error)["stage"] == "queue"  # gRPC's own status has no facts
        assert (await stage.scheduler.hear("cancel")).request_id == 1


async def test_a_refusal_is_a_status_before_and_behind_the_first_token(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        scheduler = stage.scheduler

        def rejection(number: int, reason: str) -> Down:
            failure = common_pb2.Failure(reason=reason, message="all chains are taken")
            return Down(
                reject=scheduler_pb2.RejectRequest(
                    request_id=number, failure=failure, retry_after_ns=2 * 10**9
                )
            )

        scheduler.session_script = lambda s: [rejection(s.request_id, "OVERLOADED")]
        error = await refused(stub.Generate(asking()))
        assert error.code() == CODE.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "2000"
        scheduler.session_script = scheduler.one_start
        call = stub.Generate(asking())
        session = await stage.agent.session()
        await session.say("a")
        await read(call, "a")
        scheduler.send(rejection(2, "PARTITION_LOST"))
        assert (await refused(call)).code() == CODE.UNAVAILABLE


async def test_wrong_requests_name_the_field(tmp_path: Path) -> None:
    message = generation_pb2.ChatMessage(content="x")
    wrong = {
        "prompt": [
            Request(model="tiny"),
            asking(token_ids=[1]),
            asking("a" * 512),
            asking("a" * 100_000),
            Request(model="tiny", token_ids=[259]),
        ],
        "temperature": [asking(sampling=Sampling(temperature=-1))],
        "max_tokens": [asking(sampling=Sampling(max_tokens=511))],
        "stop": [asking(sampling=Sampling(stop=[""]))],
        "logit_bias": [
            asking(sampling=Sampling(logit_bias=[{"token_id": 259, "bias": 1}])),
            asking(sampling=Sampling(logit_bias=[{"token_id": 1, "bias": -101}])),
        ],
        "min_p": [asking(sampling=Sampling(min_p=2))],
        "messages[0].role": [Request(model="tiny", messages=[message])],
        "model": [asking(model="toy")],
    }
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        for field, requests in wrong.items():
            for request in requests:
                error = await refused(stub.Generate(request))
                assert error.code() == CODE.INVALID_ARGUMENT
                assert facts_of(error)["field"] == field
        unknown = await refused(stub.Generate(asking(model="gpt")))
        assert unknown.code() == CODE.NOT_FOUND
        assert stage.scheduler.heard.empty()


async def test_a_text_model_is_not_asked_for_tensors(tmp_path: Path) -> None:
    async with (
        text_stage(tmp_path) as stage,
        grpc.aio.insecure_channel(stage.grpc) as channel,
    ):
        infer = oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        with pytest.raises(grpc.aio.AioRpcError, match="generates text") as raised:
            await infer(oip.ModelInferRequest(model_name="tiny"))
        assert raised.value.code() == CODE.INVALID_ARGUMENT


async def test_a_model_without_tokenizer_files_is_known_but_cannot_be_asked(
    tmp_path: Path,
) -> None:
    models = [generating(), generating("bare")]
    async with text_stage(tmp_path, models=models) as stage, calling(stage) as stub:
        error = await refused(stub.Generate(asking(model="bare")))
        assert error.code() == CODE.FAILED_PRECONDITION


async def test_timings_tell_of_every_token_and_the_trace_of_the_whole(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with text_stage(tmp_path, exporter=exporter) as stage, calling(stage) as stub:
        stage.agent.script = answering
        timings = [
            timing
            async for response in stub.Generate(asking(id="mine", timings=True))
            for timing in response.timings
        ]
        assert [each.token_id for each in timings] == [*tokens_of("Hello!"), END]
        assert all(each.since_previous_ns > 0 for each in timings)
        assert [hop.compute_ns for each in timings for hop in each.hops] == [2000] * 7
        await stage.is_empty()
        async with grpc.aio.insecure_channel(stage.admin) as channel:
            trace = await admin_pb2_grpc.AdminStub(channel).GetTrace(
                admin_pb2.GetTraceRequest(request_id="mine")
            )
        assert (trace.model, trace.outcome) == ("tiny:1", "OK")
        assert [span.name for span in trace.spans] == [
            "gateway.receive",
            "gateway.queue",
            "gateway.send",
            "gateway.first_token",
            "agent.transfer",
            "agent.wait",
            "agent.compute",
            "agent.send",
            "gateway.next_tokens",
            "agent.transfer",
            "agent.wait",
            "agent.compute",
            "agent.send",
        ]
        sums = [span.duration_ns for span in trace.spans if span.name == "agent.compute"]
        assert sums == [2000, 6 * 2000]
        assert not exporter.get_finished_spans(), "timed, but not sampled"
        parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
        await rest(stub.Generate(asking(), metadata=[("traceparent", parent)]))
        await stage.is_empty()
        opening = stage.agent.frames[-1].session_rows[0].opening
        assert opening.timed
        assert opening.traceparent.startswith("00-0123456789abcdef0123456789abcdef-")
        stage.gateway._tracer.force_flush()
        spans = {span.name: span for span in exporter.get_finished_spans()}
        outermost = spans["text_completion tiny:1"].attributes
        assert outermost["gen_ai.usage.output_tokens"] == 7
        assert outermost["gen_ai.response.finish_reasons"] == ("stop",)
        assert {"gateway.queue", "gateway.first_token", "gateway.next_tokens"} <= spans.keys()


async def test_a_slow_reader_holds_no_more_than_its_answer(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        call = stub.Generate(asking("a" * 12))
        session = await stage.agent.session()
        await session.say("b" * 499, finish="")
        await session.send(tokens_of("b")[0], "length")
        # All of it was made while nothing was read: the slots are free, the answer is kept.
        assert (await stage.scheduler.hear("finished")).request_id == 1
        text, last = await rest(call)
        assert (text, last.usage.completion_tokens) == ("b" * 500, 500)


async def test_numbers_are_shared_with_inferences(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        stage.agent.script = answering
        stage.scheduler.script = lambda _: []
        async with grpc.aio.insecure_channel(stage.grpc) as channel:
            request = oip.ModelInferRequest(model_name="toy")
            request.inputs.add(name="in_0", datatype="FP32", shape=[1, 4])
            request.raw_input_contents.append(bytes(16))
            infer = oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
            assert (await stage.scheduler.hear("submit")).request_id == 1
            await rest(stub.Generate(asking()))
            assert (await stage.scheduler.hear("submit_session")).request_id == 2
            infer.cancel()
            await stage.scheduler.hear("cancel")


async def test_a_gateway_that_stops_ends_what_is_unanswered(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, calling(stage) as stub:
        call = stub.Generate(asking())
        session = await stage.agent.session()
        await session.say("a")
        await read(call, "a")
        draining = asyncio.create_task(stage.gateway.drain(5))
        await asyncio.sleep(0)
        assert (await refused(stub.Generate(asking()))).code() == CODE.UNAVAILABLE
        await session.say("b", finish="length")
        assert (await rest(call))[0] == "b"
        await draining
        assert stage.leftovers()["requests"] == 0
