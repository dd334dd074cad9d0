from __future__ import annotations

from dataclasses import replace

import pytest

from catenary_scheduler.planning import ModelPlacement, Placement, complete_plan
from catenary_scheduler.planning.live import (
    ChainCluster,
    ChainCosts,
    ChainLoad,
    GenerationCost,
    SessionShape,
    chain_jobs,
    explain_chains,
    placed,
    solve_job,
    taken_by,
)
from catenary_scheduler.planning.live.rings import even_ranges
from catenary_scheduler.planning.placement import PipelinePlacement, StagePlacement
from catenary_scheduler.replanning.chain_builder import compose, compose_cluster
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, PlanId
from catenary_services.domain.plan import Agent, ChainHop
from catenary_services.errors import PlanInfeasible
from scheduling_cases.sized_decoders import (
    BLOCKS,
    decoder_table,
    served,
    sized_agent,
    sized_load,
    sized_model,
)

LLM, OTHER, CATS = (ModelKey(name, "1") for name in ("llm", "other", "cats"))
BLOCK_BYTES, ENDS_BYTES = 100, 100
SLOT_BYTES = 64
SESSION_BYTES = BLOCKS * SLOT_BYTES
MS = 1_000_000


def deployed(key: ModelKey = LLM, max_batch: int = 4, partitions: int | None = None) -> ChainLoad:
    return sized_load(sized_model(key, max_batch, partitions))


def cluster(*agents: Agent, load: ChainLoad | None = None, **changes: object) -> ChainCluster:
    usual = ChainCluster(agents, (load or deployed(),), {}, {}, Placement(()))
    return replace(usual, **changes)  # type: ignore[arg-type]


def used_bytes(model: ModelPlacement, name: str) -> int:
    return sum(
        (host.last_block - host.first_block) * BLOCK_BYTES + host.block_slots * SLOT_BYTES
        for host in model.hosts
        if host.agent == name
    )


def test_agents_with_room_for_the_whole_model_are_chains_of_their_own() -> None:
    model = served(cluster(sized_agent("a", 10**6), sized_agent("b", 10**6)))
    assert [(chain.capacity, len(chain.hops)) for chain in model.chains] == [(4, 1), (4, 1)]
    # As many slots as the sessions the manifest allows, whatever the memory.
    assert {host.block_slots for host in model.hosts} == {4 * BLOCKS}
    assert model.session_tokens == SLOT_BYTES


def test_small_agents_are_put_together_and_none_is_asked_for_more_than_it_has() -> None:
    sizes = {"a": 900, "b": 620, "c": 700, "d": 480}
    agents = [sized_agent(name, size) for name, size in sizes.items()]
    model = served(cluster(*agents))
    assert model.chains
    for name, size in sizes.items():
        assert used_bytes(model, name) + ENDS_BYTES <= size
    for chain in model.chains:
        assert chain.hops[0].entry == 0
        assert chain.hops[-1].last_block == BLOCKS
        assert len(chain.hops) > 1


def test_what_pooled_models_take_is_not_given_away() -> None:
    stage = StagePlacement(0, 2, (AgentId("a"),))
    pooled = Placement((ModelPlacement(CATS, 1, True, (PipelinePlacement(1, (stage,)),)),))
    taken = taken_by(pooled, {CATS: (4_000, 5_500, 7)})
    assert taken == {"a": 9_500}
    whole = BLOCKS * BLOCK_BYTES + SESSION_BYTES + ENDS_BYTES
    there = cluster(sized_agent("a", 9_500 + whole), sized_agent("b", whole - 1), taken_bytes=taken)
    model = served(there)
    assert [chain.hops[0].agent for chain in model.chains] == ["a"]
    with pytest.raises(PlanInfeasible, match="llm:1"):
        served(cluster(sized_agent("a", 9_500 + 300), taken_bytes=taken))


def test_models_share_an_agents_memory_by_their_weights() -> None:
    whole = BLOCKS * BLOCK_BYTES + 4 * SESSION_BYTES + ENDS_BYTES
    there = cluster(sized_agent("a", 2 * whole), loads=(deployed(), deployed(OTHER)))
    models = [placed(job, solve_job(job, compose)) for job in chain_jobs(there)]
    assert [model.model for model in models] == [LLM, OTHER]
    assert sum(used_bytes(model, "a") + ENDS_BYTES for model in models) <= 2 * whole


def test_a_model_without_room_gives_its_share_to_the_others() -> None:
    small, large = deployed(), deployed(OTHER)
    assert large.deployed.decoder is not None
    decoder = replace(large.deployed.decoder, block_bytes=10**9)
    large = replace(large, deployed=replace(large.deployed, decoder=decoder))
    composed = compose_cluster(cluster(sized_agent("a", 10**6), loads=(large, small)))
    (model,) = composed.models
    assert model.model == small.deployed.key
    assert model.chains[0].capacity >= 4
    (problem,) = composed.problems
    assert "other:1" in problem


@pytest.mark.parametrize(
    ("agents", "spec", "lengths"),
    [(3, 3, [3]), (7, 3, [3, 3]), (2, 3, [2]), (4, 1, [1, 1, 1, 1])],
)
def test_a_request_for_so_many_agents_per_chain_is_kept_as_far_as_they_go(
    agents: int, spec: int, lengths: list[int]
) -> None:
    there = [sized_agent(f"a{number}", 10**6) for number in range(agents)]
    model = served(cluster(*there, load=deployed(partitions=spec)))
    assert [len(chain.hops) for chain in model.chains] == lengths
    for chain in model.chains:
        sizes = [hop.blocks for hop in chain.hops]
        assert max(sizes) - min(sizes) <= 1
        assert chain.capacity == 4
    assert served(cluster(*there, partitions=spec)).chains == model.chains


def test_blocks_are_cut_evenly() -> None:
    assert even_ranges(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert even_ranges(30, 3) == [(0, 10), (10, 20), (20, 30)]


def test_a_ring_is_infeasible_where_its_agents_lack_room_for_one_session() -> None:
    there = [sized_agent(name, 330) for name in "abc"]
    with pytest.raises(PlanInfeasible, match="a chain of 3 agents needs room for 2 blocks"):
        served(cluster(*there, load=deployed(partitions=3)))


def test_agents_keep_their_blocks_when_others_come_and_go() -> None:
    before = [sized_agent(name, 10**6) for name in "abcd"]
    load = deployed(partitions=2)
    old = served(cluster(*before, load=load))
    ranges = {host.agent: (host.first_block, host.last_block) for host in old.hosts}
    gone = old.chains[0].hops[0].agent
    left = [each for each in before if each.agent_id != gone]
    there = cluster(*left, sized_agent("z", 10**6), load=load, present=Placement((old,)))
    (job,) = chain_jobs(there)
    new = placed(job, solve_job(job, compose))
    for host in new.hosts:
        if host.agent != "z":
            assert ranges[host.agent] == (host.first_block, host.last_block)
    assert "host 0 block(s) that they did not" in " ".join(
        explain_chains(job, solve_job(job, compose))
    )


def test_chains_composed_anew_after_a_loss_serve_without_the_lost_agent() -> None:
    sizes = {"a": 900, "b": 900, "c": 900, "d": 900}
    agents = [sized_agent(name, size) for name, size in sizes.items()]
    old = served(cluster(*agents))
    there = cluster(*agents[1:], present=Placement((old,)))
    (job,) = chain_jobs(there)
    assert job.previous is not None
    new = placed(job, solve_job(job, compose))
    assert new.chains
    assert "a" not in {host.agent for host in new.hosts}


def test_an_unmeasured_agent_counts_as_slow_as_the_slowest_of_its_class() -> None:
    key = PartitionKey(LLM, 0, 3)
    fast, slow = GenerationCost(0, MS, 2 * MS, 0), GenerationCost(0, 3 * MS, 6 * MS, 0)
    agents = [
        sized_agent("a", 1),
        sized_agent("b", 1),
        sized_agent("c", 1),
        sized_agent("g", 1, "gpu"),
    ]
    measured = {(AgentId("a"), key): fast, (AgentId("b"), key): slow}
    costs = ChainCosts(decoder_table(), agents, measured, LLM, SessionShape(100, 11))
    # 100 ms of prefill and 10 steps of 2 ms, over three blocks.
    assert costs.block_s(AgentId("a")) == pytest.approx(0.04)
    assert costs.block_s(AgentId("c")) == costs.block_s(AgentId("b")) == pytest.approx(0.12)
    assert costs.block_s(AgentId("g")) == costs.block_s(AgentId("b"))
    assert ChainCosts(decoder_table(), agents, {}, LLM, SessionShape()).block_s(AgentId("a")) > 0


def test_more_hops_and_slower_agents_take_longer() -> None:
    measured = {
        (AgentId("a"), PartitionKey(LLM, 0, 6)): GenerationCost(0, MS, MS, 0),
        (AgentId("b"), PartitionKey(LLM, 0, 6)): GenerationCost(0, 2 * MS, 2 * MS, 0),
    }
    agents = [sized_agent("a", 1), sized_agent("b", 1)]
    costs = ChainCosts(decoder_table(), agents, measured, LLM, SessionShape(10, 10))

    def hop(name: str, first: int, last: int) -> ChainHop:
        return ChainHop(AgentId(name), PartitionKey(LLM, first, last), first, last)

    alone, slower = costs.service_ns([hop("a", 0, 6)]), costs.service_ns([hop("b", 0, 6)])
    both = costs.service_ns([hop("a", 0, 3), hop("b", 3, 6)])
    assert alone < slower
    assert both > alone
    # Measured: 10 tokens of prefill and 9 steps of 1 ms; told: 10 frames of 1 ms, and the prompt.
    assert alone == pytest.approx(29 * MS, rel=0.01)


# ---- split phase ----


def divided(there: ChainCluster) -> ModelPlacement:
    (model,) = compose_cluster(there).models
    return model


def by_role(model: ModelPlacement) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for chain in model.chains:
        found.setdefault(chain.role, set()).update(hop.agent for hop in chain.hops)
    return found


def roomy(names: str, prefill_agents: int, **changes: object) -> ChainCluster:
    there = [sized_agent(name, 10**6) for name in names]
    return cluster(*there, prefill_agents=prefill_agents, **changes)


def test_some_agents_run_prompts_and_the_others_generate() -> None:
    model = divided(roomy("abcd", 1))
    assert by_role(model) == {"prefill": {"a"}, "decode": {"b", "c", "d"}}
    assert {host.agent for host in model.hosts} == set("abcd")
    (plan,) = complete_plan(
        Placement((model,)), {LLM: deployed().deployed.table}, {}, PlanId("p")
    ).models
    assert [chain.role for chain in plan.chains] == ["prefill", "decode", "decode", "decode"]


def test_the_fastest_at_prompts_run_them_and_keep_doing_so() -> None:
    key = PartitionKey(LLM, 0, BLOCKS)
    measured = {
        (AgentId(name), key): GenerationCost(0, prefill_ns, MS, 0)
        for name, prefill_ns in {"a": 3 * MS, "b": 2 * MS, "c": MS, "d": 4 * MS}.items()
    }
    model = divided(roomy("abcd", 2, measured=measured))
    assert by_role(model)["prefill"] == {"b", "c"}
    later = roomy("abcde", 2, present=Placement((model,)))  # nobody is known to be faster now
    assert by_role(divided(later)) == {"prefill": {"b", "c"}, "decode": {"a", "d", "e"}}
    without_c = roomy("abde", 2, present=Placement((model,)))
    assert by_role(divided(without_c))["prefill"] == {"b", "e"}  # the newcomer, none that generates


@pytest.mark.parametrize("prefill_agents", [0, 2, 3])
def test_where_too_few_agents_are_there_for_both_roles_all_do_both(prefill_agents: int) -> None:
    assert by_role(divided(roomy("ab", prefill_agents))) == {"mixed": {"a", "b"}}


def test_where_one_role_has_no_room_all_do_both_and_the_explanation_says_so() -> None:
    there = cluster(sized_agent("a", 450), sized_agent("b", 10**6), prefill_agents=1)
    composed = compose_cluster(there)
    (model,) = composed.models
    assert {chain.role for chain in model.chains} == {"mixed"}
    assert "no room for prefill and for decode chains" in " ".join(composed.lines)


def test_rings_of_a_requested_length_are_made_of_either_part() -> None:
    model = divided(roomy("abcdef", 2, load=deployed(partitions=2)))
    assert [(chain.role, len(chain.hops)) for chain in model.chains] == [
        ("prefill", 2),
        ("decode", 2),
        ("decode", 2),
    ]
