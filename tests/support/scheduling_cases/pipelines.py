"""Agents, requests and plans of pipelines by short names, for dispatchers driven step by step."""

from __future__ import annotations

from typing import Any

from catenary_scheduler.dispatch.events import AgentJoined
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.plan import Agent, ModelPlan, Pipeline, Plan, Stage

MS = 1_000_000
CATS, DOGS = ModelKey("cats", "1"), ModelKey("dogs", "1")


def joins(name: str, **facts: Any) -> AgentJoined:
    """Returns the event that an agent on a server of its own is there."""
    return AgentJoined(Agent(AgentId(name), "x", ServerId(name), 1, 10**9, **facts))


def request(number: int) -> RequestId:
    return RequestId(GatewayId("g"), number)


def stage(
    at: int, agents: str, *compute_ms: float, row_bytes: int = 0, model: ModelKey = CATS
) -> Stage:
    """Returns the stage of one block; agents are letters, times are those of 1, 2 .. rows."""
    times = tuple(round(ms * MS) for ms in compute_ms)
    return Stage(PartitionKey(model, at, at + 1), tuple(map(AgentId, agents)), times, row_bytes)


def pipeline(batch: int, *stages: Stage) -> Pipeline:
    return Pipeline("/".join("".join(each.agents) for each in stages), batch, stages)


def served(*pipelines: Pipeline, slo_ms: float = 100) -> ModelPlan:
    model = pipelines[0].stages[0].partition.model
    return ModelPlan(model, round(slo_ms * MS), pipelines)


def plan(*models: ModelPlan, name: str = "p") -> Plan:
    return Plan(PlanId(name), models)
