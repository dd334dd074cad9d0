"""Scaling of a local cluster: agents are started and stopped as the scheduler advises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.log import get_logger

log = get_logger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 2.0
SILENCE_S = 30.0
"""Seconds after which a silent stream is opened anew; advice comes at least every ten seconds."""


class LocalAgents(Protocol):
    """The agents of a local cluster, which can be started and stopped."""

    def agent_ids(self) -> list[str]:
        """Returns the ids of agents that are started and not being stopped."""
        ...

    async def start_agent(self) -> str:
        """Starts one more agent and returns its id."""
        ...

    async def stop_agent(self, agent_id: str) -> None:
        """Stops an agent for good."""
        ...


@dataclass(frozen=True, slots=True)
class ScalingSteps:
    """The agents to stop, and how many to start, as an advice asks."""

    stop: tuple[str, ...]
    start: int


def steps_for(advice: admin_pb2.ScalingAdvice, running: Iterable[str], most: int) -> ScalingSteps:
    """Returns the steps that follow an advice. Only drained agents are ever stopped.

    Args:
        advice: The scheduler's advice.
        running: Agents that are started and not being stopped, whether or not the scheduler has
            seen them.
        most: The most agents at any time, including those that are being drained.
    """
    ids = list(running)
    retiring = {each.agent_id: each.drained for each in advice.retiring}
    stop = tuple(agent for agent in ids if retiring.get(agent))
    staying = sum(agent not in retiring for agent in ids)
    missing = min(advice.agents_wanted - staying, most - (len(ids) - len(stop)))
    return ScalingSteps(stop, max(0, missing))


class AgentScaling:
    """Follows the advice of the leading scheduler, and reconnects when the stream is lost.

    Args:
        target: Address at which `catenary.v1.Admin` is served.
        agents: The agents to scale.
        most: The most agents at any time.
    """

    def __init__(self, target: str, agents: LocalAgents, most: int) -> None:
        self._target = target
        self._agents = agents
        self._most = most

    async def run(self) -> None:
        """Follows advice until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with grpc.aio.insecure_channel(self._target) as channel:
                    await self._follow(channel)
                pause_s = FIRST_PAUSE_S
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                log.info("scaling_stream_ended", error=_reason(error))
            except OSError as error:
                log.error("agent_not_started", error=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        stub = admin_pb2_grpc.AdminStub(channel)
        call = stub.WatchScaling(admin_pb2.WatchScalingRequest())
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    advice = await call.read()
                if not isinstance(advice, admin_pb2.ScalingAdvice):
                    return
                await self._obey(advice)
        finally:
            call.cancel()

    async def _obey(self, advice: admin_pb2.ScalingAdvice) -> None:
        steps = steps_for(advice, self._agents.agent_ids(), self._most)
        for agent in steps.stop:
            log.warning("agent_stops", agent=agent, wanted=advice.agents_wanted)
            await self._agents.stop_agent(agent)
        for _ in range(steps.start):
            agent = await self._agents.start_agent()
            log.warning("agent_starts", agent=agent, wanted=advice.agents_wanted)


async def ended(task: asyncio.Task[None] | None) -> None:
    """Cancels a task and waits for its end, however it ends."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return "nothing was heard"
