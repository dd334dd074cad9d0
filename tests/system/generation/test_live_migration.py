"""Running sessions move between real agents: whatever happens meanwhile, answers stay the same.

Real processes, the real model, greedy answers. Every prompt is answered once undisturbed; then its
session is moved by its caches and by its tokens, over rings that are cut differently, while agents
of either side or the scheduler are killed, and while an agent is drained. Every second session has a
grammar.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import catenary
from catenary_lab.live.packing.figures import RESTART, Answer
from catenary_lab.live.packing.load import MODES, Mover, answer_of
from cluster_harness import RunningCluster, running_cluster
from language_model import install
from shared_helpers.choices import all_scored, assert_equal
from small_models.prompts import PROMPTS

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

MODEL = "smollm2-135m"
SESSIONS = 6
TOKENS = 96
LONG = 192
CONFIG = {"agent": {"threads": 1}, "scheduler": {"packing": "off"}}
_PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
GRAMMAR = json.dumps(
    {"grammars": [{"json_schema": {"type": "array", "items": _PERSON, "minItems": LONG}}]}
)
"""A list that is longer than any answer."""
WHOLE = [[(agent, 0, 30)] for agent in range(3)]
CUT = [[(0, 0, 17), (1, 17, 30)], [(2, 0, 9), (1, 9, 30)]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("migration") / "models"
    install(root)
    return root


@dataclass
class World:
    """A cluster, and who asks and moves there."""

    cluster: RunningCluster
    client: catenary.AsyncClient

    def ask(self, tokens: int = TOKENS) -> list[asyncio.Task[Answer]]:
        return [
            asyncio.create_task(
                answer_of(self.client, MODEL, number, tokens, GRAMMAR if number % 2 else "")
            )
            for number in range(SESSIONS)
        ]

    def mover(self, wanted: int) -> Mover:
        return Mover(self.client, MODEL, wanted, seed=1)

    async def everything_is_free(self) -> None:
        async with asyncio.timeout(30):
            while True:
                try:
                    status = await self.client.status()
                    if not status.live_reservations and not await self.client.sessions():
                        return
                except catenary.CatenaryError:
                    pass  # no scheduler leads for a moment
                await asyncio.sleep(0.1)

    def kill(self, victim: str) -> None:
        """Sends SIGKILL to the process that is `victim` now."""
        for process in psutil.Process(self.cluster.process.pid).children(recursive=True):
            if f" {victim} " in f"{' '.join(process.cmdline())} ":
                process.kill()
                return
        raise AssertionError(f"there is no {victim}")


@asynccontextmanager
async def world(
    tmp_path: Path, models: Path, rings: list[list[tuple[int, int, int]]] | None
) -> AsyncIterator[World]:
    """Rings by agent, first block and end; None leaves them to the planner: one of each agent."""
    (tmp_path / "models").symlink_to(models)
    placement = None
    config = CONFIG
    if rings is None:
        config = {**CONFIG, "scheduler": {**CONFIG["scheduler"], "chain_agents": 1}}
    else:
        chains = [
            {"capacity": 8, "hops": [{"agent": f"agent-{a}", "blocks": [b, e]} for a, b, e in ring]}
            for ring in rings
        ]
        placement = {"models": [{"name": MODEL, "chains": chains}]}
    with running_cluster(
        tmp_path, models=(MODEL,), placement=placement, config=config, agents=3
    ) as cluster:
        async with catenary.AsyncClient(
            cluster.grpc, admin_target=cluster.admin, timeout_s=200.0
        ) as client:
            yield World(cluster, client)


async def undisturbed(here: World, tokens: int = TOKENS) -> list[tuple[int, ...]]:
    answers = await asyncio.gather(*here.ask(tokens))
    assert [each.problem for each in answers if each.problem] == []
    return [each.tokens for each in answers]


async def moved_until(
    here: World, mover: Mover, running: Sequence[asyncio.Task[Any]], enough: Callable[[], bool]
) -> None:
    """Moves sessions until enough have moved, or the answers are there."""
    moving = asyncio.create_task(mover.run(lambda: None))
    try:
        while not enough() and not all(task.done() for task in running) and not moving.done():
            await asyncio.sleep(0.02)
    finally:
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)


def how(answers: list[Answer]) -> list[str]:
    return [change.how for each in answers for change in each.changes]


@pytest.mark.parametrize("rings", [WHOLE, CUT], ids=["whole models", "different cuts"])
async def test_moved_sessions_answer_as_if_nothing_had_happened(
    tmp_path: Path, models: Path, rings: list[list[tuple[int, int, int]]], record_property
) -> None:
    async with world(tmp_path, models, rings) as here:
        expected = await undisturbed(here)
        mover = here.mover(wanted=8)
        answers: list[Answer] = []
        async with asyncio.timeout(240):
            while not mover.is_done:
                running = here.ask()
                await moved_until(here, mover, running, lambda: mover.is_done)
                answers += await asyncio.gather(*running)
        assert [each.problem for each in answers if each.problem] == []
        assert [each.tokens for each in answers] == expected * (len(answers) // SESSIONS)
        done = {mode: mover.done(mode) for mode in MODES}
        assert min(done.values()) >= 3, mover.moved
        seen = how(answers)
        assert RESTART not in seen
        assert {mode: seen.count(mode) for mode in MODES} == pytest.approx(done, abs=1)
        stalls = [stall for each in answers for stall in each.stalls()]
        record_property("stalls_in_steps", stalls)
        print(f"moved {done}, stalls in steps {[(m, round(s, 2)) for m, s in stalls]}")
        await here.everything_is_free()


async def test_choices_with_log_probabilities_move(tmp_path: Path, models: Path) -> None:
    """Two chats with four choices each, sampled, over rings that are cut differently."""
    prompts, facts = PROMPTS[:2], {"model": MODEL, "n": 4, "seed": 5, "max_tokens": TOKENS}
    async with world(tmp_path, models, CUT) as here:
        expected = await all_scored(here.cluster.http, prompts, **facts)
        assert [len(chat) for chat in expected] == [4, 4]
        assert all(len({choice.text for choice in chat}) > 1 for chat in expected)
        mover = here.mover(wanted=6)
        async with asyncio.timeout(240):
            while not mover.is_done:
                running = asyncio.create_task(all_scored(here.cluster.http, prompts, **facts))
                await moved_until(here, mover, [running], lambda: mover.is_done)
                assert_equal(await running, expected)
        assert min(mover.done(mode) for mode in MODES) >= 3, mover.moved
        await here.everything_is_free()


@pytest.mark.parametrize("side", ["source", "target"])
async def test_an_agent_killed_while_sessions_move_costs_no_token(
    tmp_path: Path, models: Path, side: str
) -> None:
    async with world(tmp_path, models, WHOLE) as here:
        expected = await undisturbed(here)
        running = here.ask()
        session, to = await movable(here)
        victim = (session.hops if side == "source" else chain_hops(await here.client.status(), to))[
            0
        ][0]
        for each in await here.client.sessions():
            if each.generates and each.chain_id == session.chain_id:
                await here.mover(1).move(each, to, "kv", wait_s=0.0)
        here.kill(victim)
        answers = await asyncio.gather(*running)
        assert [each.problem for each in answers if each.problem] == []
        assert [each.tokens for each in answers] == expected
        await here.everything_is_free()


async def test_a_scheduler_killed_while_sessions_move_costs_no_token(
    tmp_path: Path, models: Path
) -> None:
    async with world(tmp_path, models, WHOLE) as here:
        expected = await undisturbed(here)
        running = here.ask()
        mover = here.mover(wanted=50)
        await movable(here)
        moving = asyncio.create_task(mover.run(lambda: None))
        async with asyncio.timeout(60):
            while not any(each.moving_to for each in await here.client.sessions()):
                await asyncio.sleep(0.01)
        here.kill("scheduler")
        answers = await asyncio.gather(*running)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        assert [each.problem for each in answers if each.problem] == []
        assert [each.tokens for each in answers] == expected
        await here.everything_is_free()


async def test_a_drained_agents_sessions_go_on_elsewhere(
    tmp_path: Path, models: Path, record_property
) -> None:
    async with world(tmp_path, models, None) as here:
        expected = await undisturbed(here, LONG)
        running = here.ask(LONG)
        async with asyncio.timeout(60):
            while sum(each.generates for each in await here.client.sessions()) < SESSIONS:
                await asyncio.sleep(0.02)
        agent = (await here.client.sessions())[0].hops[0][0]
        held = [each for each in await here.client.sessions() if each.hops[0][0] == agent]
        started = time.monotonic()
        assert await here.client.drain(agent, timeout_s=60)
        seconds = time.monotonic() - started
        record_property("drained_in_s", seconds)
        print(f"{agent} with {len(held)} sessions was drained in {seconds:.2f} s")
        assert not all(task.done() for task in running), "it did not wait for the answers"
        assert not [each for each in await here.client.sessions() if each.hops[0][0] == agent]
        answers = await asyncio.gather(*running)
        assert [each.problem for each in answers if each.problem] == []
        assert [each.tokens for each in answers] == expected
        assert RESTART not in how(answers)
        assert len(how(answers)) >= len(held) > 0


async def movable(here: World) -> tuple[catenary.SessionInfo, str]:
    """A session that generates, and another chain."""
    async with asyncio.timeout(60):
        while True:
            chains = [
                chain.chain_id for m in (await here.client.status()).models for chain in m.chains
            ]
            for session in await here.client.sessions():
                others = [each for each in chains if each != session.chain_id]
                if session.generates and others:
                    return session, others[0]
            await asyncio.sleep(0.02)


def chain_hops(status: catenary.ClusterStatus, chain_id: str) -> tuple[tuple[str, int, int], ...]:
    return next(
        chain.hops for m in status.models for chain in m.chains if chain.chain_id == chain_id
    )
