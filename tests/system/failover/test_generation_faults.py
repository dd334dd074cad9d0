"""kill -9 in the middle of answers: streams go on without a gap, greedy tokens stay the same.

Two chains serve the model, one over agents 0, 1 and 2, one over agents 3 and 4. Twenty streams are
running on both when a process dies; each of them must end with exactly the tokens of an undisturbed
run. Every agent is killed twice, one after the other, and the scheduler once. Every second stream
has a grammar.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import openai
import psutil
import pytest

import catenary
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from cluster_harness import RunningCluster, running_cluster
from language_model import install
from shared_helpers.choices import all_scored, assert_equal
from small_models.prompts import PROMPTS

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

MODEL = "smollm2-135m"
TOKENS = 32
SESSIONS = 20
KILLS = 10
PLACEMENT = {
    "models": [
        {
            "name": MODEL,
            "chains": [
                {
                    "capacity": 12,
                    "hops": [
                        {"agent": "agent-0", "blocks": [0, 10]},
                        {"agent": "agent-1", "blocks": [10, 20]},
                        {"agent": "agent-2", "blocks": [20, 30]},
                    ],
                },
                {
                    "capacity": 12,
                    "hops": [
                        {"agent": "agent-3", "blocks": [0, 17]},
                        {"agent": "agent-4", "blocks": [17, 30]},
                    ],
                },
            ],
        }
    ]
}
AGENTS = 5
_PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
GRAMMAR = json.dumps(
    {"grammars": [{"json_schema": {"type": "array", "items": _PERSON, "minItems": TOKENS}}]}
)
"""A list that is longer than any answer."""


@dataclass
class Answer:
    """What a client saw of one session."""

    tokens: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    finish_reason: str = ""
    completion_tokens: int = 0
    error: str = ""
    text: str = ""

    @property
    def longest_pause_s(self) -> float:
        return max(
            (b - a for a, b in zip(self.moments, self.moments[1:], strict=False)), default=0.0
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults") / "models"
    install(root)
    return root


@pytest.fixture
def cluster(tmp_path: Path, models: Path) -> Iterator[RunningCluster]:
    (tmp_path / "models").symlink_to(models)
    with running_cluster(
        tmp_path,
        models=(MODEL,),
        placement=PLACEMENT,
        agents=AGENTS,
        config={"agent": {"threads": 1}},
    ) as running:
        yield running


async def answer(
    stub: generation_pb2_grpc.GenerationStub, prompt: str, grammar: str = ""
) -> Answer:
    seen = Answer()
    request = generation_pb2.GenerateRequest(
        model=MODEL,
        messages=[generation_pb2.ChatMessage(role="user", content=prompt)],
        sampling=generation_pb2.SamplingParameters(
            max_tokens=TOKENS, ignore_eos=True, grammar=grammar
        ),
    )
    try:
        async for response in stub.Generate(request, timeout=180):
            seen.tokens += response.token_ids
            seen.text += response.text
            seen.moments += [time.monotonic()] * len(response.token_ids)
            seen.finish_reason = response.finish_reason
            seen.completion_tokens = response.usage.completion_tokens
    except grpc.aio.AioRpcError as error:
        seen.error = f"{error.code().name}: {error.details()}"
    return seen


async def test_agents_killed_in_the_middle_of_answers_change_no_token(
    cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        undisturbed = await all_answers(stub)
        for kill in range(KILLS):
            answers = await answers_with_kill(cluster, stub, undisturbed, f"agent-{kill % AGENTS}")
            report(capsys, f"kill -9 agent-{kill % AGENTS}", answers, undisturbed)
            nothing_was_lost(answers, undisturbed)
            await settled(cluster)


async def test_a_scheduler_killed_in_the_middle_of_answers_changes_no_token(
    cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        undisturbed = await all_answers(stub)
        answers = await answers_with_kill(cluster, stub, undisturbed, "scheduler")
    report(capsys, "kill -9 scheduler", answers, undisturbed)
    nothing_was_lost(answers, undisturbed)
    await settled(cluster)


async def test_choices_with_log_probabilities_survive_a_killed_agent(
    cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five chats with four choices each, sampled; an agent of either chain is killed."""
    prompts, facts = PROMPTS[:5], {"model": MODEL, "n": 4, "seed": 11, "max_tokens": TOKENS}
    expected = await all_scored(cluster.http, prompts, **facts)
    choices = [choice for chat in expected for choice in chat]
    assert len(choices) == 20
    assert all(len({choice.text for choice in chat}) > 1 for chat in expected), "one and the same"
    assert all(len(choice.logprobs) >= len(choice.tokens) > 0 for choice in choices)
    took = max(c.moments[-1] for c in choices) - min(c.moments[0] for c in choices)
    for victim in ("agent-1", "agent-4"):
        running = asyncio.create_task(all_scored(cluster.http, prompts, **facts))
        await asyncio.wait([running], timeout=took / 2)
        assert not running.done()
        await asyncio.to_thread(kill, cluster, victim)
        assert_equal(await running, expected)
        await settled(cluster)
    with capsys.disabled():
        print(f"\nchoices: {len(choices)} of 4 each, {took:.1f} s undisturbed", end="")


async def test_forced_calls_survive_a_killed_agent(cluster: RunningCluster) -> None:
    """Five chats that must call a tool, streamed; an agent of either chain is killed."""
    expected = await forced_calls(cluster.http)
    assert len(set(expected)) == len(expected)
    assert all(name == "invite" and len(arguments) > TOKENS for name, arguments in expected)
    for victim in ("agent-1", "agent-4"):
        began_s = time.monotonic()
        running = asyncio.create_task(forced_calls(cluster.http))
        await asyncio.sleep(1.0)
        assert not running.done()
        await asyncio.to_thread(kill, cluster, victim)
        assert await running == expected, time.monotonic() - began_s
        await settled(cluster)


async def forced_calls(http: str) -> list[tuple[str, str]]:
    """Returns the names and arguments of the calls in the answers to five chats."""
    people = {"type": "array", "items": _PERSON, "minItems": TOKENS}
    parameters = {"type": "object", "properties": {"people": people}, "required": ["people"]}
    facts: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "invite", "parameters": parameters}}],
        "tool_choice": "required",
        "temperature": 0.8,
        "seed": 5,
        "max_tokens": TOKENS,
    }

    async def call(client: openai.AsyncOpenAI, prompt: str) -> tuple[str, str]:
        name = arguments = ""
        async for chunk in await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            stream=True,
            **facts,
        ):
            for piece in chunk.choices[0].delta.tool_calls or []:
                assert piece.function is not None
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
        return name, arguments

    async with openai.AsyncOpenAI(
        base_url=f"{http}/v1", api_key="any", max_retries=0, timeout=180
    ) as client:
        return list(await asyncio.gather(*(call(client, each) for each in PROMPTS[:5])))


async def all_answers(stub: generation_pb2_grpc.GenerationStub) -> list[Answer]:
    return list(await asyncio.gather(*all_of(stub)))


def all_of(stub: generation_pb2_grpc.GenerationStub) -> list[Coroutine[None, None, Answer]]:
    return [
        answer(stub, prompt, GRAMMAR if number % 2 else "")
        for number, prompt in enumerate(PROMPTS[:SESSIONS])
    ]


async def answers_with_kill(
    cluster: RunningCluster,
    stub: generation_pb2_grpc.GenerationStub,
    undisturbed: list[Answer],
    victim: str,
) -> list[Answer]:
    running = [asyncio.create_task(each) for each in all_of(stub)]
    await half_of(running, undisturbed)
    await asyncio.to_thread(kill, cluster, victim)
    return list(await asyncio.gather(*running))


def kill(cluster: RunningCluster, victim: str) -> None:
    """Sends SIGKILL to the process that is `victim` now: it may have been restarted before."""
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        command = " ".join(process.cmdline())
        if f" {victim} " in f"{command} ":
            process.kill()
            return
    raise AssertionError(f"there is no {victim}")


def report(
    capsys: pytest.CaptureFixture[str], what: str, answers: list[Answer], undisturbed: list[Answer]
) -> None:
    pauses = sorted(each.longest_pause_s for each in answers)
    equal = sum(a.tokens == b.tokens for a, b in zip(answers, undisturbed, strict=True))
    with capsys.disabled():
        print(
            f"\n{what}: {equal} of {SESSIONS} answers unchanged,"
            f" errors {[each.error for each in answers if each.error]},"
            f" longest pause {pauses[-1]:.2f} s, median {pauses[len(pauses) // 2]:.2f} s",
            end="",
        )


def nothing_was_lost(answers: list[Answer], undisturbed: list[Answer]) -> None:
    assert [each.error for each in answers if each.error] == []
    assert [each.tokens for each in answers] == [each.tokens for each in undisturbed]
    assert {each.finish_reason for each in answers} == {"length"}
    assert {each.completion_tokens for each in answers} == {TOKENS}
    constrained = ["".join(each.text.split()) for each in answers[1::2]]
    assert all(each.startswith('[{"name":') for each in constrained), constrained[0]


async def half_of(running: list[asyncio.Task[Answer]], undisturbed: list[Answer]) -> None:
    """Waits about half as long as the undisturbed answers took."""
    took = max(each.moments[-1] for each in undisturbed) - min(
        each.moments[0] for each in undisturbed
    )
    await asyncio.wait(running, timeout=took / 2)


async def settled(cluster: RunningCluster) -> None:
    """Waits until every slot is free and every agent is back; fails if that takes too long."""
    async with catenary.AsyncClient(cluster.grpc, admin_target=cluster.admin) as client:
        status = None
        for _ in range(300):
            try:
                status = await client.status()
                states = [agent.state for agent in status.agents]
                if status.live_reservations == 0 and states == ["ready"] * AGENTS:
                    return
            except catenary.CatenaryError:
                pass  # no scheduler leads for a moment
            await asyncio.sleep(0.1)
    raise AssertionError(f"not everything is free and back: {status}")
