"""Leaks inside real processes' parts: agents that forget, gateways that forget, moves that get lost.

Scheduler, gateway and three agents run in this event loop, with a real Redis beside it, so that a
test can make one of them forget something without a word. Decoders are slowed to 30 ms a step.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import figures
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.generation.state.events import MoveMessage
from catenary_agent.generation.state.states import SessionState
from catenary_agent.process import AgentProcess
from catenary_agent.settings import AgentSettings
from catenary_gateway.process import GatewayProcess
from catenary_gateway.settings import GatewaySettings
from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc, generation_pb2
from catenary_protos.catenary.v1 import generation_pb2_grpc as stubs
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenary_services.redis.embedded_redis import EmbeddedRedis
from tiny_language_models import LAYERS, worker_in_this_process, write_folder

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

KEY = ModelKey("tiny-llm", "1")
PROMPT, TOKENS = [7, 11, 13, 17, 19], 50
STEP_S = 0.03
INTERVAL_S, GRACE_S = 0.4, 0.3
PLAN = {
    "models": [
        {
            "name": KEY.name,
            "chains": [
                {
                    "capacity": 2,
                    "hops": [
                        {"agent": "a-0", "blocks": [0, 3]},
                        {"agent": "a-1", "blocks": [3, LAYERS]},
                    ],
                },
                {"capacity": 2, "hops": [{"agent": "a-2", "blocks": [0, LAYERS]}]},
            ],
        }
    ]
}


@dataclass
class Parts:
    scheduler: SchedulerProcess
    gateway: GatewayProcess
    agents: list[AgentProcess]
    stub: Any
    admin: Any

    async def answer(self) -> list[int]:
        """Returns the tokens of one answer."""
        request = generation_pb2.GenerateRequest(
            model=KEY.name,
            token_ids=PROMPT,
            sampling=generation_pb2.SamplingParameters(max_tokens=TOKENS, ignore_eos=True),
        )
        return [t async for said in self.stub.Generate(request, timeout=60) for t in said.token_ids]

    @property
    def book(self) -> list[Any]:
        return self.scheduler.leader().dispatcher.snapshot()

    def leaks(self) -> dict[str, float]:
        metric = self.scheduler.leader().audits._metrics.book_leaks
        samples = [sample for family in metric.collect() for sample in family.samples]
        return {e.labels["kind"]: e.value for e in samples if e.name.endswith("_total") and e.value}

    async def running(self, agent: int) -> int:
        """Returns a session that an agent has and that has got tokens."""
        async with asyncio.timeout(20):
            while True:
                for view in self.scheduler.leader().dispatcher.chained.sessions():
                    if view.runs and view.hops[-1].agent == f"a-{agent}":
                        return int(view.session)
                await asyncio.sleep(0.01)

    async def idle(self) -> None:
        async with asyncio.timeout(20):
            while self.book or any(agent.generation.sessions for agent in self.agents):
                await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> ModelRepository:
    root = tmp_path_factory.mktemp("audit-parts")
    write_folder(root / "source", "llama3")
    made = ModelRepository(root / "models")
    with worker_in_this_process():
        import_decoder(made, root / "source", KEY, ImportOptions(session_tokens=64))
    return made


@pytest.fixture
async def parts(repository: ModelRepository, tmp_path: Path) -> AsyncIterator[Parts]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cat-")))
        redis = EmbeddedRedis(tmp_path / "redis")
        await redis.start()
        stack.push_async_callback(redis.stop)
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps(PLAN))
        common: dict[str, Any] = {"insecure": True, "model_repository": repository.root}
        scheduler = SchedulerProcess(
            SchedulerSettings(
                port=0,
                redis_url=redis.url,
                models=[KEY.name],
                plan_file=plan,
                audit_interval_s=INTERVAL_S,
                audit_grace_s=GRACE_S,
                **common,
            )
        )
        await scheduler.start()
        stack.push_async_callback(scheduler.stop)
        met = {"scheduler_addresses": [f"127.0.0.1:{scheduler.port}"], "runtime_dir": folder}
        agents = []
        for number in range(3):
            agent = AgentProcess(AgentSettings(agent_id=f"a-{number}", **common, **met))
            await agent.start()
            stack.push_async_callback(agent.stop)
            agents.append(agent)
        gateway = GatewayProcess(
            GatewaySettings(grpc_port=0, http_port=0, admin_port=0, **common, **met)
        )
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        await gateway.wait_ready(60)
        for agent in agents:
            slow_down(agent)
        endpoint = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}")
        admin = grpc.aio.insecure_channel(f"127.0.0.1:{scheduler.port}")
        stack.push_async_callback(endpoint.close)
        stack.push_async_callback(admin.close)
        yield Parts(
            scheduler,
            gateway,
            agents,
            stubs.GenerationStub(endpoint),
            admin_pb2_grpc.AdminStub(admin),
        )


def slow_down(agent: AgentProcess) -> None:
    for decoder in agent.generation.decoders:
        executor: Any = decoder.batcher.executor
        step = executor.step

        def slow(items: Any, step: Any = step) -> Any:
            time.sleep(STEP_S)
            return step(items)

        executor.step = slow


async def test_streams_are_left_alone(parts: Parts) -> None:
    answers = await asyncio.gather(*(parts.answer() for _ in range(4)))
    assert answers == [answers[0]] * 4
    await parts.idle()
    assert parts.scheduler.leader().audits.audits >= 3
    assert parts.leaks() == {}


@pytest.mark.parametrize("forgetful", [0, 1, 2])
async def test_a_session_that_an_agent_forgets_goes_on_elsewhere(
    parts: Parts, forgetful: int
) -> None:
    expected = await parts.answer()
    answers = [asyncio.create_task(parts.answer()) for _ in range(4)]
    session_id = await parts.running(max(1, forgetful))
    engine = parts.agents[forgetful].generation

    def forget() -> None:
        sessions = engine._generation_loop.sessions
        session = sessions._open.pop(session_id)
        sessions.go(session, SessionState.CLOSED)
        session.batcher.executor.close_session(session_id)

    began_s = time.monotonic()
    await engine.on_thread(forget)
    engine._openings.pop(session_id)
    async with asyncio.timeout(20):
        while not parts.leaks():
            await asyncio.sleep(0.01)
    figures.report(
        f"a-{forgetful} forgets a session", "found after", time.monotonic() - began_s, "s"
    )
    assert await asyncio.gather(*answers) == [expected] * 4
    assert parts.leaks() == {"session_lost": 1}
    await parts.idle()


async def test_what_a_gateway_forgets_is_closed(parts: Parts) -> None:
    answers = [asyncio.create_task(parts.answer()) for _ in range(2)]
    await any_running(parts)
    plane = parts.gateway._sessions
    number, forgotten = next(iter(plane._requests.items()))
    plane._starts.leave(forgotten)
    del plane._requests[number]
    await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    await parts.idle()
    assert parts.leaks() == {"request_unwanted": 1}
    for answer in answers:
        answer.cancel()
    await asyncio.gather(*answers, return_exceptions=True)


async def test_a_session_whose_order_to_move_was_lost_may_move_again(parts: Parts) -> None:
    expected = await parts.answer()
    answer = asyncio.create_task(parts.answer())
    view = await any_running(parts)
    leader = parts.agents[int(view.hops[0].agent[-1])]
    post = leader.generation._post

    def deaf(events: Any) -> None:
        post([event for event in events if not isinstance(event, MoveMessage)])

    leader.generation._post = deaf  # type: ignore[method-assign]
    order = admin_pb2.MoveSessionRequest(session_id=view.session)
    assert (await parts.admin.MoveSession(order)).outcome == "begun"
    async with asyncio.timeout(10):
        while not parts.leaks():
            await asyncio.sleep(0.01)
    leader.generation._post = post  # type: ignore[method-assign]
    assert parts.leaks() == {"move_lost": 1}
    assert not any(v.moving_to for v in parts.scheduler.leader().dispatcher.chained.sessions())
    assert await answer == expected
    await parts.idle()


async def any_running(parts: Parts) -> Any:
    """Returns a session that has got tokens."""
    async with asyncio.timeout(20):
        while True:
            for view in parts.scheduler.leader().dispatcher.chained.sessions():
                if view.runs:
                    return view
            await asyncio.sleep(0.01)
