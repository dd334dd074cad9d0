"""The demo's third and fifth screen: a chat whose agent is killed, and one that moves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

import catenary
from catenary.moving import SessionInfo, SessionMove
from catenary.text.generation import ChainChange, GenerationResult
from catenary_services.errors import Unavailable
from catenaryd.demo import screens
from catenaryd.demo.plans import CHAT_MODEL, PROCESSORS
from catenaryd.local.local_cluster import LocalCluster

QUESTION = "What is the heart for?"
TOKENS = 71
"""Most tokens of an answer: a sentence of the answer to this question ends there."""
_DISTURBED_AT = 12
"""Number of tokens behind which the chat is disturbed."""
_BACK_S = 120.0
"""Longest time until a killed agent serves again."""
_POLL_S = 0.1

Disturbance = Callable[[SessionInfo], Awaitable[str]]
"""Does something to a session that generates, and returns it in words as soon as it has begun."""


async def undisturbed(client: catenary.AsyncClient) -> GenerationResult:
    """Returns the answer that nothing happens to."""
    return await client.chat(CHAT_MODEL, QUESTION, max_tokens=TOKENS)


async def survive_a_kill(
    client: catenary.AsyncClient, cluster: LocalCluster, expected: GenerationResult
) -> bool:
    """Kills an agent under a chat; False unless the chat goes on with the same tokens."""
    screens.begin(
        3,
        "a chat that outlives its agent",
        f"""SmolLM2-135M-Instruct, cut in two halves, answers over one of two chains of agents.
        Behind token {_DISTURBED_AT} the agent with its first half is killed (kill -9). The other
        chain reads again what was said, and goes on with the next token. The same question was
        asked before, undisturbed: {len(expected.token_ids)} tokens in {expected.total_s:.1f} s.""",
    )

    async def kill(session: SessionInfo) -> str:
        agent = session.hops[0][0]
        pid = cluster.children[agent].pid
        if pid is None:
            raise Unavailable(f"{agent} has ended before it was killed")
        os.kill(pid, signal.SIGKILL)
        return f"kill -9 {pid}, which is {agent}"

    result = await _disturbed(client, "demo-killed", kill)
    return judged(result, expected, "restart")


async def move(client: catenary.AsyncClient, expected: GenerationResult) -> bool:
    """Moves a chat while it streams; False unless it arrives, with the same tokens."""
    await _all_back(client)
    screens.begin(
        5,
        "a session that moves while it streams",
        """The agent that was killed is back: it was started again, and has loaded its part. To
        empty an agent, or to spread the load, a running session can be moved to another chain:
        its caches travel while it goes on.""",
    )
    moves: list[asyncio.Task[SessionMove]] = []

    async def begin(session: SessionInfo) -> str:
        moves.append(asyncio.create_task(client.move_session(session.session_id)))
        return f"catenary move {session.session_id}"

    result = await _disturbed(client, "demo-moved", begin)
    found = await moves[0] if moves else None
    if found is None or found.outcome != "moved":
        screens.say(f"It did not move: {found.problem if found else 'it was over before'}.")
        return False
    screens.say(
        f"Moved to {found.chain_id} by {found.mode} ({found.tokens} tokens) in"
        f" {found.duration_ns / 1e6:.0f} ms, of which it was held for {found.held_ns / 1e6:.1f} ms."
    )
    return judged(result, expected, found.mode)


async def _all_back(client: catenary.AsyncClient) -> None:
    """Waits until every chain of the plan is there.

    Raises:
        Unavailable: It takes too long.
    """
    deadline = time.monotonic() + _BACK_S
    while time.monotonic() < deadline:
        agents = {each.agent_id: each for each in (await client.status()).agents}
        here = [agents[name] for name in PROCESSORS if name in agents]
        if len(here) == len(PROCESSORS) and all(
            each.state == "ready" and _hosts_chat(each.partitions) for each in here
        ):
            return
        await asyncio.sleep(_POLL_S)
    raise Unavailable(f"a killed agent was not back after {_BACK_S:.0f} s")


def _hosts_chat(partitions: tuple[str, ...]) -> bool:
    return any(part.startswith(CHAT_MODEL) for part in partitions)


async def _disturbed(
    client: catenary.AsyncClient, request_id: str, disturb: Disturbance
) -> GenerationResult:
    """Prints an answer as it comes, and what is done to it meanwhile."""
    screens.show(f"> {QUESTION}\n")
    column = 0
    stream = client.chat(
        CHAT_MODEL, QUESTION, stream=True, max_tokens=TOKENS, request_id=request_id
    )
    disturbing: asyncio.Task[str] | None = None
    said = False
    async with stream as pieces:
        async for piece in pieces:
            column = screens.flow(piece.text, column)
            if disturbing is None and len(pieces.so_far.token_ids) >= _DISTURBED_AT:
                disturbing = asyncio.create_task(_of_request(client, request_id, disturb))
            if disturbing is not None and disturbing.done() and not said:
                said = True
                column = screens.flow(f" [{disturbing.result()}]", column, reverse=True)
            await asyncio.sleep(0)
        result = pieces.so_far
    screens.show("\n")
    if disturbing is not None:
        await disturbing
    return result


async def _of_request(client: catenary.AsyncClient, request_id: str, disturb: Disturbance) -> str:
    """Disturbs the session of a request.

    Raises:
        Unavailable: No session generates for it any more.
    """
    for session in await client.sessions(CHAT_MODEL):
        if session.request_id == request_id and session.generates:
            return await disturb(session)
    raise Unavailable(f"the answer {request_id} was over before anything was done to it")


def judged(result: GenerationResult, expected: GenerationResult, how: str) -> bool:
    """Prints where an answer went on, and whether it is the undisturbed one."""
    changes = [change for change in result.chain_changes if change.how == how]
    for change in changes:
        screens.say(_in_words(change))
    same = result.token_ids == expected.token_ids
    screens.say(
        f"{len(result.token_ids)} tokens, the very ones of the undisturbed answer: none is missing,"
        " none came twice."
        if same
        else f"The tokens DIFFER from the undisturbed ones: {list(result.token_ids)} instead of"
        f" {list(expected.token_ids)}."
    )
    return same and bool(changes)


def _in_words(change: ChainChange) -> str:
    before, after = ", ".join(change.from_agents), ", ".join(change.to_agents)
    return (
        f"Token {change.generated_tokens} was the last from {before}; token"
        f" {change.generated_tokens + 1} came {change.stall_ns / 1e6:.0f} ms later, from {after}."
    )
