"""The Admin service of the scheduler: it converts requests, calls, and converts answers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import NoReturn, Protocol, TypeVar

from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_scheduler.admin import operations
from catenary_scheduler.admin.cluster_view import ClusterView
from catenary_scheduler.admin.imports import ModelImporter, import_model
from catenary_scheduler.admin.plan_search import search_plan
from catenary_scheduler.admin.plan_summary import promises_of
from catenary_scheduler.admin.plan_text import explain
from catenary_scheduler.admin.sessions import move_session, session_list, sessions_of, story_of
from catenary_scheduler.admin.status import status_of
from catenary_scheduler.admin.timelines import timelines_of
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.leadership.takeover_failures import TakeoverFailures
from catenary_scheduler.planning import placement_document
from catenary_scheduler.rollout.report import RolloutReport
from catenary_scheduler.rpc.leader_lookup import Context, LeaderLookup, group_of
from catenary_scheduler.storage.values.stored import DeploymentSpec
from catenary_services.domain.ids import AgentId
from catenary_services.domain.packing import packing_goal
from catenary_services.errors import (
    CatenaryError,
    InternalError,
    NoActivePlan,
    NotSupported,
    Unavailable,
)
from catenary_services.grpc.error_tables import abort, error_of_exception

_LONGEST_S = 60.0
_MARGIN_S = 0.2
_LOOK_S = 1.0
"""A client that watches scaling advice learns within this time that another term began."""
_SAY_AGAIN_S = 10.0
"""Unchanged advice is repeated this often, so that silence means a broken stream."""

T = TypeVar("T")


class LeadershipStatus(LeaderLookup[LeaderRuntime], Protocol):
    """The part of a scheduler process that knows which groups the process leads."""

    def takeover_failures(self, group: int | None = None) -> TakeoverFailures:
        """Returns the failed attempts of this process to lead a group, of group 0 if it is None."""
        ...

    @property
    def leads(self) -> bool:
        """True while this process leads a group and serves it."""
        ...


class AdminService(admin_pb2_grpc.AdminServicer):
    """Implements the Admin service; it refuses calls for groups that other processes lead."""

    def __init__(self, leadership: LeadershipStatus, importer: ModelImporter | None = None) -> None:
        self._leadership = leadership
        self._importer = importer

    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.GetStatusResponse:
            return status_of(ClusterView(leader))

        try:
            takeover_failures = self._leadership.takeover_failures(group_of(context))
        except (CatenaryError, IndexError):  # `_answer` reports a wrong group
            takeover_failures = None
        said = takeover_failures.in_words() if takeover_failures is not None else ""
        if said and not self._leadership.leads:
            return admin_pb2.GetStatusResponse(takeover_problems=[said])
        return await self._answer(context, answer)

    async def GetPlan(  # noqa: N802
        self, request: admin_pb2.GetPlanRequest, context: Context
    ) -> admin_pb2.GetPlanResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.GetPlanResponse:
            view = ClusterView(leader)
            active, report, provenance = view.active, view.rollout_report(), view.provenance
            if active is None:
                raise NoActivePlan("no plan is active yet")
            return admin_pb2.GetPlanResponse(
                plan_json=json.dumps(placement_document(active.placement), indent=2),
                explanation=explain(view, active.plan),
                plan_id=active.plan.plan_id,
                planner=provenance.planner if provenance is not None else "",
                last_switch=report.as_message() if report is not None else None,
                promises=promises_of(view),
            )

        return await self._answer(context, answer)

    async def SearchPlan(  # noqa: N802
        self, request: admin_pb2.SearchPlanRequest, context: Context
    ) -> admin_pb2.SearchPlanResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.SearchPlanResponse:
            return await search_plan(leader, request, _time_left(context))

        return await self._answer(context, answer)

    async def ApplyPlan(  # noqa: N802
        self, request: admin_pb2.ApplyPlanRequest, context: Context
    ) -> admin_pb2.ApplyPlanResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.ApplyPlanResponse:
            before = leader.cluster.last_switch
            plan_id = await operations.apply_plan(leader, request.plan_json, _time_left(context))
            return admin_pb2.ApplyPlanResponse(
                plan_id=plan_id, plan_switch=_switch_since(leader, before)
            )

        return await self._answer(context, answer)

    async def Replan(  # noqa: N802
        self, request: admin_pb2.ReplanRequest, context: Context
    ) -> admin_pb2.ReplanResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.ReplanResponse:
            plan_id, before = leader.cluster.plan_id, leader.cluster.last_switch
            new_id = await operations.replan(leader, _time_left(context))
            return admin_pb2.ReplanResponse(
                plan_id=new_id, changed=new_id != plan_id, plan_switch=_switch_since(leader, before)
            )

        return await self._answer(context, answer)

    async def DeployModel(  # noqa: N802
        self, request: admin_pb2.DeployModelRequest, context: Context
    ) -> admin_pb2.DeployModelResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.DeployModelResponse:
            reference = f"{request.model}:{request.version}" if request.version else request.model
            packing = packing_goal(request.packing, "packing") if request.packing else None
            spec = DeploymentSpec(
                request.slo_ns, request.max_batch, request.partitions or None, packing
            )
            plan_id = await operations.deploy_model(leader, reference, spec, _time_left(context))
            return admin_pb2.DeployModelResponse(plan_id=plan_id)

        return await self._answer(context, answer)

    async def UndeployModel(  # noqa: N802
        self, request: admin_pb2.UndeployModelRequest, context: Context
    ) -> admin_pb2.UndeployModelResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.UndeployModelResponse:
            key, plan_id = await operations.undeploy_model(
                leader, request.model, request.version, _time_left(context)
            )
            return admin_pb2.UndeployModelResponse(plan_id=plan_id, version=key.version)

        return await self._answer(context, answer)

    async def ImportModel(  # noqa: N802
        self, request: admin_pb2.ImportModelRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ImportProgress]:
        try:
            agents = self._leadership.leader(group_of(context)).cluster.registry
            async with aclosing(import_model(self._importer, request, agents)) as steps:
                async for step in steps:
                    yield step
        except Exception as error:
            await abort(context, error_of_exception(error))

    async def DrainAgent(  # noqa: N802
        self, request: admin_pb2.DrainAgentRequest, context: Context
    ) -> admin_pb2.DrainAgentResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.DrainAgentResponse:
            agent = AgentId(request.agent_id)
            drained = await operations.drain_agent(leader, agent, _time_left(context))
            return admin_pb2.DrainAgentResponse(drained=drained)

        return await self._answer(context, answer)

    async def UndrainAgent(  # noqa: N802
        self, request: admin_pb2.UndrainAgentRequest, context: Context
    ) -> admin_pb2.UndrainAgentResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.UndrainAgentResponse:
            operations.undrain_agent(leader, AgentId(request.agent_id))
            return admin_pb2.UndrainAgentResponse()

        return await self._answer(context, answer)

    async def ListSessions(  # noqa: N802
        self, request: admin_pb2.ListSessionsRequest, context: Context
    ) -> admin_pb2.ListSessionsResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.ListSessionsResponse:
            view = ClusterView(leader)
            return session_list(view, sessions_of(view, request))

        return await self._answer(context, answer)

    async def GetStory(  # noqa: N802
        self, request: admin_pb2.GetStoryRequest, context: Context
    ) -> admin_pb2.GetStoryResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.GetStoryResponse:
            return story_of(ClusterView(leader), request)

        return await self._answer(context, answer)

    async def MoveSession(  # noqa: N802
        self, request: admin_pb2.MoveSessionRequest, context: Context
    ) -> admin_pb2.MoveSessionResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.MoveSessionResponse:
            return await move_session(leader.moves, request, _time_left(context))

        return await self._answer(context, answer)

    async def GetTrace(  # noqa: N802
        self, request: admin_pb2.GetTraceRequest, context: Context
    ) -> NoReturn:
        await abort(context, NotSupported("traces are kept by the gateways; ask one of them"))

    async def GetTimelines(  # noqa: N802
        self, request: admin_pb2.GetTimelinesRequest, context: Context
    ) -> admin_pb2.GetTimelinesResponse:
        async def answer(leader: LeaderRuntime) -> admin_pb2.GetTimelinesResponse:
            return await timelines_of(ClusterView(leader), request)

        return await self._answer(context, answer)

    async def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> NoReturn:
        await abort(context, NotSupported("requests are known to their gateways; ask one of them"))

    async def WatchScaling(  # noqa: N802
        self, request: admin_pb2.WatchScalingRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ScalingAdvice]:
        try:
            group = group_of(context)
            leader = self._leadership.leader(group)
            told: admin_pb2.ScalingAdvice | None = None
            told_s = 0.0
            while self._leadership.leader(group) is leader:
                advice = leader.autoscaler.advice()
                now_s = time.monotonic()
                if advice != told or now_s - told_s >= _SAY_AGAIN_S:
                    told, told_s = advice, now_s
                    yield advice
                await leader.autoscaler.changed(_LOOK_S)
            raise Unavailable("another term began; ask again")
        except CatenaryError as error:
            await abort(context, error)

    async def _answer(self, context: Context, work: Callable[[LeaderRuntime], Awaitable[T]]) -> T:
        error: CatenaryError
        try:
            return await work(self._leadership.leader(group_of(context)))
        except CatenaryError as known:
            error = known
        except Exception as unknown:
            error = error_of_exception(unknown)
        await abort(context, error)
        raise InternalError("abort returned")


def _switch_since(
    leader: LeaderRuntime, before: RolloutReport | None
) -> admin_pb2.PlanSwitch | None:
    """Returns the last change of plan if it is a later one than `before`, else None."""
    last = leader.cluster.last_switch
    return None if last is None or last is before else last.as_message()


def _time_left(context: Context) -> float:
    """Returns the seconds an operation may take so that its answer still reaches the caller."""
    left = context.time_remaining()
    return _LONGEST_S if left is None else max(0.0, min(_LONGEST_S, left - _MARGIN_S))
