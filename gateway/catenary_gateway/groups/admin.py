"""The Admin service of all groups: it calls every scheduler and joins their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import grpc.aio

from catenary_gateway.endpoints.admin import HasChannel, SchedulerAdmin
from catenary_gateway.groups import sums
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.domain.groups import GROUP_METADATA
from catenary_services.errors import InvalidInput, NoActivePlan, Unavailable
from catenary_services.grpc.rpc_errors import error_of_rpc

_RETRY_NS = 1_000_000_000
_NOTHING_TO_SAY = (Unavailable, NoActivePlan)
"""Errors of a group that has no leader or no plan; its answer is left out."""


class GroupsAdmin(SchedulerAdmin):
    """The Admin service of all groups' schedulers; a call's metadata may name one of the groups."""

    def __init__(self, links: Sequence[HasChannel]) -> None:
        """Joins the schedulers behind `links`, of which link N belongs to group N."""
        super().__init__(links[0])
        self._each = [SchedulerAdmin(link) for link in links]

    async def call(
        self, method: str, request: Any, timeout_s: float | None, group: str | None = None
    ) -> Any:
        """Returns the answer of the named group, or the joint answer of all groups.

        Raises:
            InvalidInput: There is no such group, or the call needs one to be named.
            Unavailable: No scheduler leads a group that is needed.
            grpc.aio.AioRpcError: A scheduler answered with an error.
        """
        if group is not None:
            return await self._named(group).call(method, request, timeout_s)
        over_all: dict[str, Callable[[Any, float | None], Awaitable[Any]]] = {
            "GetStatus": self._status,
            "GetPlan": self._plan,
            "SearchPlan": self._search,
            "Replan": self._replan,
            "DeployModel": self._deploy,
            "UndeployModel": self._undeploy,
            "ApplyPlan": self._apply,
            "DrainAgent": self._drain,
            "UndrainAgent": self._undrain,
            "ListSessions": self._sessions,
            "GetStory": self._story,
            "GetTimelines": self._timelines,
            "MoveSession": self._move,
        }
        if method not in over_all:
            raise InvalidInput(GROUP_METADATA, f"name the scheduler group that {method} is for")
        return await over_all[method](request, timeout_s)

    async def watch_scaling(
        self, request: admin_pb2.WatchScalingRequest
    ) -> AsyncGenerator[admin_pb2.ScalingAdvice, None]:
        """Yields the sum of all groups' advice, at once and whenever one of them changes.

        A sum without one group would look like advice to stop its agents, so the stream ends when
        the stream of any group does.

        Raises:
            Unavailable: No scheduler leads one of the groups.
            grpc.aio.AioRpcError: A group's stream ended with an error.
        """
        latest: dict[int, admin_pb2.ScalingAdvice] = {}
        changed = asyncio.Event()

        async def follow(group: int, scheduler: SchedulerAdmin) -> None:
            async for advice in scheduler.watch_scaling(request):
                latest[group] = advice
                changed.set()

        tasks = {asyncio.create_task(follow(*each)) for each in enumerate(self._each)}
        try:
            while not any(task.done() for task in tasks):
                news = asyncio.create_task(changed.wait())
                try:
                    await asyncio.wait({news, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                is_new = changed.is_set()
                changed.clear()
                if is_new and len(latest) == len(self._each):
                    yield sums.joint_advice([latest[group] for group in sorted(latest)])
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _named(self, group: str) -> SchedulerAdmin:
        if not group.isdecimal() or int(group) >= len(self._each):
            raise InvalidInput(GROUP_METADATA, f"there are groups 0 to {len(self._each) - 1}")
        return self._each[int(group)]

    async def _all(self, method: str, request: Any, timeout_s: float | None) -> list[Any]:
        return await asyncio.gather(*(each.call(method, request, timeout_s) for each in self._each))

    async def _those_that_answer(
        self, method: str, request: Any, timeout_s: float | None
    ) -> dict[int, Any]:
        """Returns answers by group, without groups that have no leader or no plan at the moment."""
        answers = await asyncio.gather(
            *(each.call(method, request, timeout_s) for each in self._each), return_exceptions=True
        )
        found: dict[int, Any] = {}
        for group, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                said = error_of_rpc(answer) if isinstance(answer, grpc.aio.AioRpcError) else answer
                if not isinstance(said, _NOTHING_TO_SAY):
                    raise answer
            else:
                found[group] = answer
        if not found:
            raise Unavailable("no scheduler group has an answer", retry_after_ns=_RETRY_NS)
        return found

    async def _status(self, request: Any, timeout_s: float | None) -> admin_pb2.GetStatusResponse:
        statuses = await self._those_that_answer("GetStatus", request, timeout_s)
        return sums.joint_status(statuses, len(self._each))

    async def _replan(self, request: Any, timeout_s: float | None) -> admin_pb2.ReplanResponse:
        return sums.joint_replan(await self._all("Replan", request, timeout_s))

    async def _deploy(self, request: Any, timeout_s: float | None) -> admin_pb2.DeployModelResponse:
        answers = await self._all("DeployModel", request, timeout_s)
        return admin_pb2.DeployModelResponse(plan_id=sums.joint_ids(answers))

    async def _undeploy(
        self, request: Any, timeout_s: float | None
    ) -> admin_pb2.UndeployModelResponse:
        answers = await self._all("UndeployModel", request, timeout_s)
        return admin_pb2.UndeployModelResponse(
            plan_id=sums.joint_ids(answers), version=answers[0].version
        )

    async def _plan(self, request: Any, timeout_s: float | None) -> admin_pb2.GetPlanResponse:
        return sums.joint_plan(await self._those_that_answer("GetPlan", request, timeout_s))

    async def _apply(
        self, request: admin_pb2.ApplyPlanRequest, timeout_s: float | None
    ) -> admin_pb2.ApplyPlanResponse:
        """Applies plans in the form that `GetPlan` returns; groups may be left out."""
        parts = sums.plans_by_group(request.plan_json, len(self._each))
        answers = await asyncio.gather(
            *(
                self._each[group].call(
                    "ApplyPlan", admin_pb2.ApplyPlanRequest(plan_json=text), timeout_s
                )
                for group, text in parts.items()
            )
        )
        joint = admin_pb2.ApplyPlanResponse(plan_id=sums.joint_ids(answers))
        for answer in answers:
            if answer.HasField("plan_switch"):
                joint.plan_switch.CopyFrom(answer.plan_switch)
        return joint

    async def _drain(self, request: Any, timeout_s: float | None) -> Any:
        return await self._at_its_group("DrainAgent", request, timeout_s)

    async def _undrain(self, request: Any, timeout_s: float | None) -> Any:
        return await self._at_its_group("UndrainAgent", request, timeout_s)

    async def _at_its_group(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Returns the answer of the group whose scheduler knows the agent of a request."""
        status = admin_pb2.GetStatusRequest()
        statuses = await self._those_that_answer("GetStatus", status, timeout_s)
        for group, answer in statuses.items():
            if any(agent.agent_id == request.agent_id for agent in answer.agents):
                return await self._each[group].call(method, request, timeout_s)
        raise InvalidInput("agent_id", f"{request.agent_id!r} is not connected")

    async def _sessions(self, request: Any, timeout_s: float | None) -> Any:
        lists = await self._those_that_answer("ListSessions", request, timeout_s)
        return sums.joint_sessions(lists)

    async def _story(self, request: admin_pb2.GetStoryRequest, timeout_s: float | None) -> Any:
        return await self._first_that_knows("GetStory", request, timeout_s)

    async def _search(self, request: admin_pb2.SearchPlanRequest, timeout_s: float | None) -> Any:
        """Asks the groups in turn: a class of devices may be known to the agents of one only."""
        return await self._first_that_knows("SearchPlan", request, timeout_s)

    async def _first_that_knows(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Returns the first answer of a group that does not say that the request names nothing."""
        unknown: InvalidInput | None = None
        for each in self._each:
            try:
                return await each.call(method, request, timeout_s)
            except (grpc.aio.AioRpcError, InvalidInput, *_NOTHING_TO_SAY) as error:
                said = error_of_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error
                if isinstance(said, InvalidInput):
                    unknown = said
                elif not isinstance(said, _NOTHING_TO_SAY):
                    raise
        if unknown is not None:
            raise unknown
        raise Unavailable("no scheduler group has an answer", retry_after_ns=_RETRY_NS)

    async def _timelines(self, request: Any, timeout_s: float | None) -> Any:
        answers = await self._those_that_answer("GetTimelines", request, timeout_s)
        return sums.joint_timelines(answers)

    async def _move(self, request: admin_pb2.MoveSessionRequest, timeout_s: float | None) -> Any:
        wanted = admin_pb2.ListSessionsRequest()
        lists = await self._those_that_answer("ListSessions", wanted, timeout_s)
        group = next(
            (
                group
                for group, answer in lists.items()
                if any(each.session_id == request.session_id for each in answer.sessions)
            ),
            None,
        )
        if group is None:
            raise InvalidInput("session_id", f"{request.session_id} does not generate")
        own = admin_pb2.MoveSessionRequest()
        own.CopyFrom(request)
        # `joint_status` puts the group in front of a chain's name.
        own.chain_id = request.chain_id.removeprefix(f"{group}/")
        return await self._each[group].call("MoveSession", own, timeout_s)
