"""Questions about plans over gRPC: a running scheduler, scripted agents, no process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc.aio
import pytest

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.observed.links import MeasuredLink
from catenary_scheduler.planning.live import LinkFigures
from catenary_scheduler.planning.search import PlanAnswer
from catenary_scheduler.planning.search.answering import answered
from catenary_scheduler.planning.search.question import PlanQuestion
from catenary_scheduler.replanning.chain_builder import compose
from catenary_scheduler.replanning.solver import Solver
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import ModelKey, ServerId
from scheduler_harness import AgentScript, Crowd, add_model, operated, until

Configured = Callable[..., SchedulerSettings]
OLD = AgentScript(device_class="old")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver's process takes seconds to start on a busy machine, and does just this."""

    async def answer(_: Solver, question: PlanQuestion, most_s: float) -> PlanAnswer:
        return await asyncio.to_thread(answered, question, compose, most_s, time.perf_counter)

    monkeypatch.setattr(Solver, "answer", answer)


def question(model: str, gpus: dict[str, int], **others: object) -> admin_pb2.SearchPlanRequest:
    counts = [admin_pb2.GpuCount(device_class=name, count=n) for name, n in gpus.items()]
    return admin_pb2.SearchPlanRequest(model=model, gpus=counts, **others)  # type: ignore[arg-type]


async def test_a_vision_model_on_devices_that_are_here_and_others(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured()) as (process, stub):
        await crowd.agent(process.port, "agent-0", OLD)
        await until(lambda: process.leader().cluster.plan_id, "a plan")
        before = process.leader().cluster.plan_id
        found = await stub.SearchPlan(question("toy", {"old": 2, "l4": 1}))
        assert (found.model, found.version) == ("toy", "1")
        chosen = found.options[0]
        assert (chosen.shape, chosen.why_not, chosen.possible) == ("whole replicas", "", True)
        assert chosen.throughput_per_s > 0
        assert chosen.survives
        named = {a for p in chosen.pipelines for s in p.stages for a in s.agent_ids}
        assert named | {each.gpu for each in found.idle} == {"old-1", "old-2", "l4-1"}
        assert all(each.why_not for each in found.options[1:])
        assert any("times of toy:1 on old" in note for note in found.notes)
        assert found.scheduler_groups == 1
        assert process.leader().cluster.plan_id == before


async def test_a_language_model_on_more_devices_than_there_are(
    generating: Configured, crowd: Crowd
) -> None:
    async with operated(generating()) as (process, stub):
        await crowd.agent(process.port, "agent-0", OLD)
        request = question("llm", {"old": 2, "L4": 1}, prompt_tokens=100, output_tokens=50)
        found = await stub.SearchPlan(request)
        chosen = found.options[0]
        assert chosen.chains
        assert chosen.predicted, "an L4 has a data sheet"
        assert chosen.tokens_per_s == pytest.approx(50 * chosen.throughput_per_s)
        assert "100 and 50 tokens" in found.notes[0]
        assert any("data sheet of L4" in note for note in found.notes)


async def test_devices_have_the_links_that_were_measured_of_those_here(
    configured: Configured, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PlanQuestion] = []
    answer = Solver.answer

    async def noted(self: Solver, question: PlanQuestion, most_s: float) -> PlanAnswer:
        asked.append(question)
        return await answer(self, question, most_s)

    monkeypatch.setattr(Solver, "answer", noted)
    async with operated(configured()) as (process, stub):
        await crowd.agent(process.port, "agent-0", OLD)
        await until(lambda: process.leader().cluster.registry, "an agent")
        (record,) = process.leader().cluster.registry.values()
        slow = record.agent.link_bytes_per_second // 10
        link = MeasuredLink(LinkFigures(400_000, slow), 1_790_000_000, "10.0.0.5>10.0.0.6")
        process.leader().measured.links.put((record.agent.server, ServerId("other")), link)
        await stub.SearchPlan(question("toy", {"old": 1, "L4": 1}))
        (found,) = asked
        assert [each.link_bytes_per_second for each in found.cluster.agents] == [slow, slow]


async def test_a_model_of_the_repository_need_not_be_deployed(
    configured: Configured, crowd: Crowd
) -> None:
    values = configured()
    async with operated(values) as (process, stub):
        add_model(values.model_repository, ModelKey("later", "2"))
        found = await stub.SearchPlan(question("later", {"P4": 1}))
        assert (found.version, found.options[0].gpus) == ("2", 1)
        assert ModelKey("later", "2") not in process.leader().deployments.ready


@pytest.mark.parametrize(
    ("request_of", "code", "said"),
    [
        (question("ghost", {"L4": 1}), grpc.StatusCode.NOT_FOUND, "ghost"),
        (question("toy", {"L44": 1}), grpc.StatusCode.INVALID_ARGUMENT, "did you mean L4"),
        (question("toy", {}), grpc.StatusCode.INVALID_ARGUMENT, "gpus"),
        (question("toy", {"L4": 1000}), grpc.StatusCode.INVALID_ARGUMENT, "1 to 64 GPUs"),
        (
            question("toy", {"L4": 1}, objective="speed"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "throughput or gpus",
        ),
        (
            question("toy", {"L4": 1}, objective="gpus"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "rate_per_s",
        ),
    ],
    ids=["model", "class", "none", "many", "objective", "rate"],
)
async def test_what_cannot_be_answered_is_refused_in_a_sentence(
    configured: Configured,
    request_of: admin_pb2.SearchPlanRequest,
    code: grpc.StatusCode,
    said: str,
) -> None:
    async with operated(configured()) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.SearchPlan(request_of)
        assert refused.value.code() == code
        assert said in (refused.value.details() or "")


async def test_one_question_is_answered_at_a_time(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    answer = Solver.answer

    async def slow(self: Solver, asked: PlanQuestion, most_s: float) -> PlanAnswer:
        begun.set()
        await may_end.wait()
        return await answer(self, asked, most_s)

    monkeypatch.setattr(Solver, "answer", slow)
    async with operated(configured()) as (_, stub):
        first = asyncio.ensure_future(stub.SearchPlan(question("toy", {"L4": 1})))
        await begun.wait()
        with pytest.raises(grpc.aio.AioRpcError) as second:
            await stub.SearchPlan(question("toy", {"L4": 1}))
        assert second.value.code() == grpc.StatusCode.UNAVAILABLE
        may_end.set()
        await first
        assert (await stub.SearchPlan(question("toy", {"L4": 1}))).options
