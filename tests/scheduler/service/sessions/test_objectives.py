"""Objectives and progress between gateways and the dispatcher, over real gRPC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.dispatch import events
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.latency import TokenObjectives
from catenary_services.models.model_repository import ModelRepository
from chain_harness import RING, listening, nothing_is_left, request, serving
from scheduler_harness import LLM, MS, AgentScript, Crowd, operated, scheduler, until

Configured = Callable[..., SchedulerSettings]


def held_to(tmp_path: Path, objectives: TokenObjectives) -> None:
    repository = ModelRepository(tmp_path / "models")
    repository.write_manifest(replace(repository.manifest(LLM), objectives=objectives))


def requested(heard: list[events.Event], number: int) -> list[events.SessionRequested]:
    return [
        event
        for event in heard
        if isinstance(event, events.SessionRequested) and event.request.number == number
    ]


async def test_the_models_objectives_hold_where_a_request_names_none(
    generating: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    held_to(tmp_path, TokenObjectives(800 * MS, 80 * MS))
    async with scheduler(generating()) as process:
        gateway, _ = await serving(process, crowd, AgentScript())
        assert process.leader().cluster.active is not None
        (model,) = process.leader().cluster.active.plan.models
        assert model.objectives == TokenObjectives(800 * MS, 80 * MS)
        heard = listening(process.leader())
        await gateway.submit_session(1)
        await gateway.submit_session(2, first_token_slo_ns=700 * MS, waited_ns=3 * MS)
        for number in (1, 2):
            await gateway.started(number)
        (first,), (second,) = requested(heard, 1), requested(heard, 2)
        assert first.objectives is None
        start = await gateway.started(1)
        assert (start.first_token_slo_ns, start.per_token_slo_ns) == (800 * MS, 80 * MS)
        assert second.objectives == TokenObjectives(700 * MS, 80 * MS)
        assert second.arrived_ns == second.deadline_ns - 8_000 * MS - 3 * MS


async def test_an_order_says_what_was_promised_and_what_never_can_be_is_refused(
    generating: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    held_to(tmp_path, TokenObjectives(800 * MS, 80 * MS))
    async with scheduler(generating(chain_policy="slo")) as process:
        gateway, _ = await serving(process, crowd, AgentScript())
        await gateway.submit_session(1, waited_ns=100 * MS)
        start = await gateway.started(1)
        assert (start.first_token_slo_ns, start.per_token_slo_ns) == (800 * MS, 80 * MS)
        # 8 tokens of 6 ms each, behind the 100 ms it has waited; steps of 60 ms.
        assert 140 * MS < start.predicted_first_token_ns < 400 * MS
        assert 55 * MS < start.predicted_per_token_ns < 100 * MS
        await gateway.submit_session(3, prompt_tokens=40, max_tokens=4)
        assert (await gateway.started(3)).predicted_first_token_ns > 200 * MS
        await gateway.submit_session(2, first_token_slo_ns=5 * MS)
        refusal = await gateway.rejected(2)
        assert refusal.failure.reason == "SLO_UNATTAINABLE"
        assert "5 ms are allowed" in refusal.failure.message
        assert not refusal.retry_after_ns, "no waiting helps"


async def test_scaling_judges_sessions_by_the_models_objectives(
    generating: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    held_to(tmp_path, TokenObjectives(800 * MS, 80 * MS))
    async with scheduler(generating()) as process:
        gateway, _ = await serving(process, crowd, AgentScript())
        await gateway.submit_session(1)
        await gateway.started(1)
        late = scheduler_pb2.SessionProgress(
            request_id=1, generated_tokens=3, first_token_ns=900 * MS, decode_ns=5 * MS
        )
        finished = scheduler_pb2.RequestFinished(request_id=1, progress=late)
        await gateway.send(scheduler_pb2.GatewayMessage(finished=finished))
        await nothing_is_left(process)
        models = process.leader().autoscaler.models
        await until(
            lambda: LLM in models and models[LLM].attainment(now_ns()) == 0.0,
            "the session counts as late",
        )


async def test_a_plan_may_name_other_objectives_and_shows_them_again(
    generating: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    held_to(tmp_path, TokenObjectives(800 * MS, 80 * MS))
    document = {**RING, "models": [{**RING["models"][0], "time_per_output_token_slo_ms": 50}]}
    async with operated(generating(plan=document)) as (process, stub):
        await serving(process, crowd, AgentScript(), AgentScript())
        shown = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert '"time_per_output_token_slo_ms": 50' in shown.plan_json
        assert process.leader().sessions.objectives(LLM) == TokenObjectives(800 * MS, 50 * MS)
        assert "first token within 800" in shown.explanation
        wrong = {**document["models"][0], "time_to_first_token_slo_ms": 0}
        field = "time_to_first_token_slo_ms"
        with pytest.raises(grpc.aio.AioRpcError, match=field):
            await stub.ApplyPlan(request({"models": [wrong]}), timeout=5)


async def test_progress_and_ends_reach_the_dispatcher(generating: Configured, crowd: Crowd) -> None:
    async with scheduler(generating()) as process:
        gateway, _ = await serving(process, crowd, AgentScript())
        heard = listening(process.leader())
        await gateway.submit_session(1)
        await gateway.started(1)
        said = scheduler_pb2.SessionProgress(
            request_id=1, generated_tokens=3, first_token_ns=20 * MS, decode_ns=5 * MS
        )
        unknown = scheduler_pb2.SessionProgress(request_id=99, generated_tokens=1)
        progressed = scheduler_pb2.SessionsProgressed(sessions=[said, unknown])
        finished = scheduler_pb2.RequestFinished(request_id=1, progress=said)
        await gateway.send(
            scheduler_pb2.GatewayMessage(sessions_progressed=progressed),
            scheduler_pb2.GatewayMessage(finished=finished),
        )
        await nothing_is_left(process)
        progress = [event for event in heard if isinstance(event, events.SessionsProgressed)]
        (end,) = [event for event in heard if isinstance(event, events.RequestCompleted)]
        assert [each.request.number for each in progress[0].sessions] == [1, 99]
        assert end.progress == progress[0].sessions[0]
        # Nobody fell over it.
        await gateway.submit_session(2)
        await gateway.started(2)


async def test_what_a_session_generated_before_comes_with_its_resubmission(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating()) as process:
        gateway, _ = await serving(process, crowd, AgentScript())
        heard = listening(process.leader())
        progress = scheduler_pb2.SessionProgress(generated_tokens=2, first_token_ns=7, decode_ns=5)
        await gateway.submit_session(1, waited_ns=20, progress=progress)
        await gateway.started(1)
        (event,) = requested(heard, 1)
        assert event.progress is not None
        assert (event.progress.generated_tokens, event.progress.decode_ns) == (2, 5)


async def test_a_gateway_that_started_anew_says_nothing_of_its_former_sessions(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating()) as process:
        before, agents = await serving(process, crowd, AgentScript())
        await before.submit_session(1)
        session = (await before.started(1)).session_id
        after = await crowd.gateway(process.port, incarnation=2)
        await until(lambda: before.ended, "the old stream ends")
        await until(lambda: agents[0].told_to_close(session), "its session ends")
        said = scheduler_pb2.SessionProgress(request_id=1, generated_tokens=3)
        progressed = scheduler_pb2.SessionsProgressed(sessions=[said])
        await after.send(scheduler_pb2.GatewayMessage(sessions_progressed=progressed))
        await after.submit_session(1)
        assert (await after.started(1)).session_id != session
