"""Shared routes of a live cluster: placements, memory of agents, and plans of what is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from catenary_scheduler.planning import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
    complete_plan,
    parse_placement,
    placement_document,
)
from catenary_scheduler.planning.comparing import promise_of
from catenary_scheduler.planning.pooled.problem import GpuClass, PooledModel, PoolingProblem
from catenary_scheduler.planning.requirements import missing, needs_any, required_by_agent
from catenary_scheduler.planning.shared_placement import with_shared_pipelines
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, PlanId
from catenary_services.domain.model import BlockTable, Boundary
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import InvalidInput

MS = 1_000_000
CATS, DOGS = ModelKey("cats", "1"), ModelKey("dogs", "1")
A, B, C = AgentId("a"), AgentId("b"), AgentId("c")
GROUPS = {A: "l4", B: "p4", C: "p4"}
RATES = {str(CATS): 100.0, str(DOGS): 100.0}
EVERYBODY = {CATS: {A, B, C}, DOGS: {A, B, C}}


def task(memory: int | None = None, block_bytes: int = 10) -> PoolingProblem:
    """Two models of two blocks, 1 ms each on the one l4, 2 ms on both p4."""
    latency = {("l4", 1): np.full((2, 2), 1_000.0), ("p4", 1): np.full((2, 2), 2_000.0)}
    models = tuple(
        PooledModel(
            str(key), 2, latency, (0, 0, 0), 50_000.0, block_weight_bytes=(block_bytes,) * 2
        )
        for key in (CATS, DOGS)
    )
    classes = (GpuClass("l4", 1, memory_bytes=memory), GpuClass("p4", 2, memory_bytes=memory))
    return PoolingProblem(classes, models)


def placed(key: ModelKey, *stages: tuple[int, int, tuple[AgentId, ...]]) -> ModelPlacement:
    pipeline = PipelinePlacement(2, tuple(StagePlacement(*stage) for stage in stages))
    return ModelPlacement(key, 50 * MS, True, (pipeline,))


OWN = Placement((placed(CATS, (0, 2, (A,))), placed(DOGS, (0, 1, (B,)), (1, 2, (C,)))))


def shared(problem: PoolingProblem, able: Any = None) -> Placement:
    return with_shared_pipelines(problem, OWN, GROUPS, RATES, able or EVERYBODY)


def test_every_agent_hosts_its_guests_too_and_promises_stay_as_they_are() -> None:
    found = shared(task())
    cats, dogs = found.models
    assert [pipeline.is_shared for pipeline in cats.pipelines] == [False, True]
    assert cats.pipelines[1].stages == (StagePlacement(0, 1, (B,)), StagePlacement(1, 2, (C,)))
    assert dogs.pipelines[1].stages == (StagePlacement(0, 2, (A,)),)
    assert {agent: set(needs) for agent, needs in required_by_agent(found).items()} == {
        A: {PartitionKey(CATS, 0, 2), PartitionKey(DOGS, 0, 2)},
        B: {PartitionKey(DOGS, 0, 1), PartitionKey(CATS, 0, 1)},
        C: {PartitionKey(DOGS, 1, 2), PartitionKey(CATS, 1, 2)},
    }
    before, after = (promise_of(task(), each, GROUPS) for each in (OWN, found))
    assert after == before
    assert after.in_time == OWN


def test_an_agent_without_room_or_ability_hosts_no_guests() -> None:
    # "a" would hold four blocks of 10 bytes, "b" and "c" two.
    cats, dogs = shared(task(memory=39)).models
    assert (len(cats.pipelines), len(dogs.pipelines)) == (2, 1)
    assert shared(task(memory=40)) == shared(task())
    assert shared(task(memory=19)) == OWN
    cats, dogs = shared(task(), {CATS: {A, B}, DOGS: {A, B, C}}).models
    assert (len(cats.pipelines), len(dogs.pipelines)) == (1, 2)


def test_a_model_gets_no_shared_route_where_it_has_pools_of_its_own() -> None:
    both = Placement((placed(CATS, (0, 2, (A, B))), placed(DOGS, (0, 2, (B,)))))
    assert with_shared_pipelines(task(), both, GROUPS, RATES, EVERYBODY) == both


def test_documents_say_what_is_shared() -> None:
    found = shared(task())
    document = placement_document(found)
    assert parse_placement(document) == found
    assert "shared" not in str(placement_document(OWN))
    pipelines = document["models"][0]["pipelines"]  # type: ignore[index]
    pipelines[1]["shared"] = "yes"
    with pytest.raises(InvalidInput) as error:
        parse_placement(document)
    assert error.value.details["field"] == "models[0].pipelines[1].shared"


def test_a_plan_needs_no_times_of_guests() -> None:
    spec = TensorSpec("x", "FP32", (ANY, 4))
    table = BlockTable("0" * 64, True, (Boundary((spec,), 16),) * 3, (MS, MS))
    found = shared(task())
    times = {
        (agent, key): (MS, MS) for agent, need in required_by_agent(found).items() for key in need
    }
    tables = {CATS: table, DOGS: table}
    cats, dogs = complete_plan(found, tables, times, PlanId("p")).models
    assert [pipeline.is_shared for pipeline in cats.pipelines] == [False, True]
    assert cats.shared_pipelines[0].stages[1].agents == (C,)
    assert len({pipeline.pipeline_id for pipeline in cats.pipelines}) == 2
    del times[C, PartitionKey(CATS, 1, 2)]
    cats, dogs = complete_plan(found, tables, times, PlanId("p")).models
    assert (cats.shared_pipelines, len(dogs.shared_pipelines)) == ((), 1)


def test_guests_that_cannot_be_loaded_are_not_waited_for() -> None:
    found = shared(task())
    cats = Placement((found.models[0],))

    def hosts_own(agent: AgentId, *_: object) -> bool:
        return agent == A

    lacking = missing(cats, hosts_own, lambda agent: False)
    assert [agent for agent, _ in lacking] == [B, C]
    assert missing(cats, hosts_own, lambda agent: True) == []
    assert not needs_any(found.models[0], {B, C})
    assert needs_any(found.models[0], {A})
    assert replace(found.models[0], pipelines=found.models[0].pipelines[:1]) == OWN.models[0]
