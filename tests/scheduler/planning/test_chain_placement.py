from __future__ import annotations

import copy
from typing import Any

import pytest

from catenary_scheduler.planning import (
    ChainPlacement,
    HopPlacement,
    HostPlacement,
    Placement,
    complete_plan,
    hosts_for,
    parse_placement,
    placement_document,
)
from catenary_scheduler.planning.requirements import (
    CacheRequirement,
    PartitionRequirement,
    agents_of,
    can_go_back,
    changing,
    joined,
    missing,
    required_by_agent,
    without,
)
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, PlanId
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.plan import CacheCapacity, ChainHop
from catenary_services.errors import InvalidInput, PlanInfeasible
from scheduling_cases.sized_decoders import block_table

LLM = ModelKey("llm", "1")
A, B, C = (AgentId(name) for name in ("a", "b", "c"))
DOCUMENT: dict[str, Any] = {
    "models": [
        {
            "name": "llm",
            "version": "1",
            "slo_ms": 60_000,
            "float16_boundaries": True,
            "session_tokens": 512,
            "packing": "balance",
            "chains": [
                {
                    "capacity": 3,
                    "hops": [
                        {"agent": "a", "blocks": [0, 4], "entry": 0},
                        {"agent": "b", "blocks": [2, 6], "entry": 4},
                    ],
                },
                {
                    "capacity": 1,
                    "hops": [
                        {"agent": "c", "blocks": [0, 2], "entry": 0},
                        {"agent": "b", "blocks": [2, 6], "entry": 2},
                    ],
                },
            ],
            "hosts": [
                {"agent": "c", "blocks": [0, 2], "block_slots": 2},
                {"agent": "a", "blocks": [0, 4], "block_slots": 12},
                {"agent": "b", "blocks": [2, 6], "block_slots": 10},
            ],
        }
    ]
}


def test_chains_are_read_and_written_back_equal() -> None:
    placement = parse_placement(DOCUMENT)
    assert placement_document(placement) == DOCUMENT
    assert parse_placement(placement_document(placement)) == placement
    (model,) = placement.models
    assert model.session_tokens == 512
    assert model.chains[0].hops[1] == HopPlacement(B, 2, 6, 4)
    assert model.hosts[2] == HostPlacement(B, 2, 6, 10)
    assert not model.pipelines


@pytest.mark.parametrize(
    ("named", "objectives"),
    [
        ({}, None),
        (
            {"time_to_first_token_slo_ms": 800, "time_per_output_token_slo_ms": 80.5},
            TokenObjectives(800_000_000, 80_500_000),
        ),
        ({"time_per_output_token_slo_ms": 80}, TokenObjectives(0, 80_000_000)),
    ],
)
def test_objectives_are_read_written_back_and_part_of_the_plan(
    named: dict[str, Any], objectives: TokenObjectives | None
) -> None:
    document = {"models": [{**DOCUMENT["models"][0], **named}]}
    placement = parse_placement(document)
    assert placement.models[0].objectives == objectives
    assert placement_document(placement) == document
    (plan,) = complete_plan(placement, {LLM: block_table()}, {}, PlanId("p")).models
    assert plan.objectives == objectives


def test_roles_are_read_written_back_and_part_of_the_plan() -> None:
    document = copy.deepcopy(DOCUMENT)
    prefill, decode = document["models"][0]["chains"]
    prefill["role"], decode["role"] = "prefill", "decode"
    decode["hops"] = [{"agent": "c", "blocks": [0, 6], "entry": 0}]
    del document["models"][0]["hosts"]
    placement = parse_placement(document)
    assert [chain.role for chain in placement.models[0].chains] == ["prefill", "decode"]
    assert parse_placement(placement_document(placement)) == placement
    (plan,) = complete_plan(placement, {LLM: block_table()}, {}, PlanId("p")).models
    assert [chain.role for chain in plan.chains] == ["prefill", "decode"]
    decode["hops"][0]["agent"] = "a"
    with pytest.raises(InvalidInput, match="a is on a prefill and on a decode chain"):
        parse_placement(document)
    decode["role"] = "both"
    with pytest.raises(InvalidInput, match="role"):
        parse_placement(document)


def test_hosts_and_entries_that_are_left_out_follow_from_the_chains() -> None:
    document = copy.deepcopy(DOCUMENT)
    del document["models"][0]["hosts"]
    for chain in document["models"][0]["chains"]:
        for hop in chain["hops"]:
            del hop["entry"]
    (short,) = parse_placement(document).models
    (full,) = parse_placement(DOCUMENT).models
    assert short.chains == full.chains
    assert short.hosts == hosts_for(full.chains) == full.hosts


CHAIN = ("models", 0, "chains", 0)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ((*CHAIN, "capacity"), 0, "models[0].chains[0].capacity"),
        ((*CHAIN, "capacity"), "3", "models[0].chains[0].capacity"),
        ((*CHAIN, "hops"), [], "models[0].chains[0].hops"),
        ((*CHAIN, "hops", 0, "agent"), "", "models[0].chains[0].hops[0].agent"),
        ((*CHAIN, "hops", 1, "agent"), "a", "models[0].chains[0].hops[1].agent"),
        ((*CHAIN, "hops", 0, "blocks"), [1, 4], "models[0].chains[0].hops[0].blocks"),
        ((*CHAIN, "hops", 0, "blocks"), [0], "models[0].chains[0].hops[0].blocks"),
        ((*CHAIN, "hops", 1, "blocks"), [5, 6], "models[0].chains[0].hops[1].blocks"),
        ((*CHAIN, "hops", 1, "blocks"), [0, 4], "models[0].chains[0].hops[1].blocks"),
        ((*CHAIN, "hops", 1, "entry"), 3, "models[0].chains[0].hops[1].entry"),
        ((*CHAIN, "hops", 1, "gpu"), 1, "models[0].chains[0].hops[1].gpu"),
        (("models", 0, "hosts", 0, "block_slots"), 0, "models[0].hosts[0].block_slots"),
        (("models", 0, "hosts", 0, "blocks"), [0, 3], "models[0].chains[1].hops[0]"),
        (("models", 0, "hosts", 2, "block_slots"), 3, "models[0].chains[1].hops[1]"),
        (("models", 0, "session_tokens"), 1, "models[0].session_tokens"),
        (("models", 0, "pipelines"), [], "models[0].pipelines"),
    ],
)
def test_errors_in_chains_name_the_field(path: tuple[Any, ...], value: object, field: str) -> None:
    document: Any = copy.deepcopy(DOCUMENT)
    parent = document
    for part in path[:-1]:
        parent = parent[part]
    parent[path[-1]] = value
    with pytest.raises(InvalidInput) as caught:
        parse_placement(document)
    assert caught.value.field == field


def test_agents_must_host_their_blocks_with_slots_for_every_chain() -> None:
    placement = parse_placement(DOCUMENT)
    assert agents_of(placement) == {A, B, C}
    key = PartitionKey(LLM, 2, 6)
    assert required_by_agent(placement)[B] == {
        key: PartitionRequirement(4, False, CacheRequirement(10, 512, (2, 4)))
    }
    assert required_by_agent(placement)[A] == {
        PartitionKey(LLM, 0, 4): PartitionRequirement(3, False, CacheRequirement(12, 512, (0,)))
    }


def test_while_a_plan_changes_a_partition_serves_the_sessions_of_both() -> None:
    key, other = PartitionKey(LLM, 2, 6), PartitionKey(LLM, 0, 2)
    old = {key: PartitionRequirement(4, False, CacheRequirement(10, 512, (2, 4)))}
    new = {
        key: PartitionRequirement(2, False, CacheRequirement(4, 512, (2, 5))),
        other: PartitionRequirement(1, False, CacheRequirement(2, 512, (0,))),
    }
    both = joined(old, new)
    assert both[key] == PartitionRequirement(4, False, CacheRequirement(10, 512, (2, 4, 5)))
    assert both[other] == new[other]


def test_only_the_chains_of_an_agent_that_is_gone_are_lost() -> None:
    placement = parse_placement(DOCUMENT)
    (left,) = without(placement, {C}).models
    assert [len(chain.hops) for chain in left.chains] == [2]
    assert {host.agent for host in left.hosts} == {A, B}
    assert without(placement, {B}) == Placement(())
    assert changing(placement, without(placement, {C})) == {LLM}
    assert can_go_back(placement, placement, lambda agent: agent != C)
    assert not can_go_back(placement, placement, lambda agent: agent != B)


def test_an_excused_agent_is_waited_for_only_if_no_chain_is_left() -> None:
    placement = parse_placement(DOCUMENT)
    hosted = {A, B}

    def hosts(agent: AgentId, _: PartitionKey, need: PartitionRequirement) -> bool:
        assert need.cache is not None
        return agent in hosted

    assert missing(placement, hosts, lambda agent: True) == []
    assert missing(placement, hosts, lambda agent: False) == [(C, PartitionKey(LLM, 0, 2))]
    hosted.remove(B)
    absent = [(B, PartitionKey(LLM, 2, 6)), (C, PartitionKey(LLM, 0, 2))]
    assert sorted(missing(placement, hosts, lambda agent: True)) == absent


def test_a_plan_has_chains_caches_and_expected_times() -> None:
    placement = parse_placement(DOCUMENT)

    def slower_later(model: ModelKey, hops: Any) -> int:
        assert model == LLM
        return sum(hop.blocks * (2 if hop.agent == C else 1) for hop in hops)

    (plan,) = complete_plan(placement, {LLM: block_table()}, {}, PlanId("p"), slower_later).models
    first, second = plan.chains
    assert first.hops == (
        ChainHop(A, PartitionKey(LLM, 0, 4), 0, 4),
        ChainHop(B, PartitionKey(LLM, 2, 6), 4, 6),
    )
    assert (first.capacity, first.service_ns, second.service_ns) == (3, 6, 8)
    assert first.chain_id != second.chain_id
    assert CacheCapacity(B, PartitionKey(LLM, 2, 6), 10) in plan.caches
    assert (plan.session_tokens, plan.pipelines) == (512, ())


def test_chains_that_do_not_cover_the_model_are_infeasible() -> None:
    placement = parse_placement(DOCUMENT)
    with pytest.raises(PlanInfeasible, match="chain 0 ends at 6 of 7 blocks"):
        complete_plan(placement, {LLM: block_table(7)}, {}, PlanId("p"))
    (model,) = placement.models
    gap = ChainPlacement(1, (HopPlacement(A, 0, 3, 0), HopPlacement(B, 4, 6, 4)))
    broken = type(model)(
        LLM, 1, True, (), (gap,), hosts_for((gap,)), session_tokens=model.session_tokens
    )
    with pytest.raises(PlanInfeasible, match="enters b at block 4, not at 3"):
        complete_plan(Placement((broken,)), {LLM: block_table()}, {}, PlanId("p"))
