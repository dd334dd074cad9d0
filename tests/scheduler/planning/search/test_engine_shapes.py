"""Agents whose engine serves a model whole, beside agents that run its blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catenary_scheduler.packing.transfers.migration_budget import MigrationBudget
from catenary_scheduler.planning import DeployedModel, Placement
from catenary_scheduler.planning.live import (
    ChainCluster,
    ChainLoad,
    GenerationCost,
    SessionShape,
    chain_jobs,
)
from catenary_scheduler.planning.search import (
    ChainSearch,
    SearchOrder,
    ShapeKind,
    idle_reasons,
    in_words,
    search_chains,
)
from catenary_scheduler.replanning.chain_builder import compose, compose_cluster
from catenary_services.domain.decoder import DecoderRuntime
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.plan import Agent, ChainHop
from catenary_services.errors import PlanInfeasible
from scheduling_cases.sized_decoders import BLOCKS, block_table, decoder_table

LLM = ModelKey("llm", "1")
MS = 1_000_000
ROOMY = 10**6
FAST = GenerationCost(2 * MS, MS // 10, 10 * MS, MS // 10)
SLOW = GenerationCost(9 * MS, MS // 2, 60 * MS, MS)
ENGINE = DecoderRuntime.VLLM
NOTHING = Placement(())


def agent(name: str, runtime: str = "onnx", memory_bytes: int = ROOMY) -> Agent:
    kind = "gpu" if runtime == ENGINE else "cpu"
    return Agent(
        AgentId(name),
        kind,
        ServerId(name),
        memory_bytes,
        10**9,
        commits_caches_on_use=True,
        runtime=runtime,
    )


def cluster(
    *agents: Agent,
    costs: dict[str, GenerationCost] | None = None,
    objectives: TokenObjectives | None = None,
    rate: float = 0.5,
    present: Placement = NOTHING,
    **facts: object,
) -> ChainCluster:
    model = DeployedModel(
        LLM,
        block_table(),
        10**9,
        4,
        True,
        decoder=decoder_table(),
        session_tokens=64,
        objectives=objectives,
        **({"engines": frozenset({ENGINE})} | facts),  # type: ignore[arg-type]
    )
    known = {"gpu": FAST, "cpu": SLOW} if costs is None else costs
    whole = PartitionKey(LLM, 0, BLOCKS)
    measured = {
        (each.agent_id, whole): known[each.device_class]
        for each in agents
        if each.device_class in known
    }
    load = ChainLoad(model, rate, SessionShape(20, 30))
    return ChainCluster(agents, (load,), {}, measured, present)


def found(there: ChainCluster, order: SearchOrder = SearchOrder.THROUGHPUT) -> ChainSearch:
    (job,) = chain_jobs(there)
    return search_chains(job, there, compose, order)


MIXED = (agent("e0", ENGINE), agent("b0"), agent("b1"))


def test_an_engine_is_a_chain_by_itself_beside_chains_of_blocks() -> None:
    search = found(cluster(*MIXED))
    chains = search.chosen.shape.chains
    of_engine = [chain for chain in chains if any(hop.agent == "e0" for hop in chain.hops)]
    ((hop,),) = [chain.hops for chain in of_engine]
    assert (hop.entry, hop.first_block, hop.last_block) == (0, 0, BLOCKS)
    assert search.chosen.shape.agents == {"e0", "b0", "b1"}


def test_all_ways_are_compared_and_said_in_words() -> None:
    search = found(cluster(*MIXED))
    names = {each.shape.name for each in (search.chosen, *search.others)}
    assert "engines alone" in names
    assert any(name.endswith("beside engines") for name in names)
    assert "composed chains" in names
    for priced in (search.chosen, *search.others):
        assert priced.figures is not None
        for chain in priced.shape.chains:
            assert len(chain.hops) == 1 or all(hop.agent != "e0" for hop in chain.hops)
    text = "\n".join(in_words(search))
    assert "engines alone would give" in text


def test_what_keeps_the_objectives_wins_over_what_does_more() -> None:
    """Only the engine keeps the time of a token, so blocks add nothing to what is attained."""
    objectives = TokenObjectives(0, 30 * MS)
    there = cluster(*MIXED, objectives=objectives, rate=0.2)
    search = found(there, SearchOrder.FEWEST_GPUS)
    assert search.chosen.shape.kind is ShapeKind.ENGINES
    assert search.chosen.shape.agents == {"e0"}


def test_an_engine_that_is_slower_than_blocks_is_left_out_of_the_fewest() -> None:
    objectives = TokenObjectives(0, 30 * MS)
    there = cluster(*MIXED, costs={"gpu": SLOW, "cpu": FAST}, objectives=objectives, rate=0.2)
    search = found(there, SearchOrder.FEWEST_GPUS)
    assert "e0" not in search.chosen.shape.agents


def test_only_engines_serve_a_model_without_blocks() -> None:
    search = found(cluster(*MIXED, has_blocks=False))
    assert search.chosen.shape.agents == {"e0"}
    assert "only vllm serves the model" in idle_reasons(search)[AgentId("b0")]


def test_an_engine_needs_files_that_it_reads() -> None:
    search = found(cluster(*MIXED, engines=frozenset()))
    assert search.chosen.shape.agents == {"b0", "b1"}
    assert "needs safetensors" in idle_reasons(search)[AgentId("e0")]


def test_an_engine_without_room_for_the_whole_model_is_idle() -> None:
    weights = decoder_table().weight_bytes(0, BLOCKS)
    small = agent("e0", ENGINE, memory_bytes=weights // 2)
    search = found(cluster(small, agent("b0"), agent("b1")))
    assert search.chosen.shape.agents == {"b0", "b1"}
    assert "the whole model" in idle_reasons(search)[AgentId("e0")]
    with pytest.raises(PlanInfeasible):
        found(cluster(small))


def test_nothing_measured_takes_all_there_is() -> None:
    composed = compose_cluster(cluster(*MIXED, costs={}))
    (model,) = composed.models
    assert {hop.agent for chain in model.chains for hop in chain.hops} == {"e0", "b0", "b1"}
    assert any("whole, by engines" in line for line in composed.lines)


def test_a_plan_with_engines_is_kept() -> None:
    first = compose_cluster(cluster(*MIXED))
    again = compose_cluster(cluster(*MIXED, present=Placement(first.models)))
    assert again.models == first.models


def test_sessions_move_to_and_from_engines_by_their_tokens() -> None:
    budget = MigrationBudget()
    for each in MIXED:
        budget.agent_joined(each)
    whole = PartitionKey(LLM, 0, BLOCKS)
    engine, blocks, other = (
        [ChainHop(AgentId(name), whole, 0, BLOCKS)] for name in ("e0", "b0", "b1")
    )
    assert budget.must_read_again(engine, blocks)
    assert budget.must_read_again(blocks, engine)
    assert not budget.must_read_again(blocks, other)
    assert replace(engine[0], agent=AgentId("b0")) == blocks[0]
