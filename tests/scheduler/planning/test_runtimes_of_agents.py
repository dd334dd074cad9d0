"""Models that were imported for GPUs are not planned on agents whose runtime cannot load them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning import DeployedModel, Placement
from catenary_scheduler.planning.chain_placement import ChainPlacement
from catenary_scheduler.planning.live import (
    ChainCluster,
    chain_jobs,
    explain_chains,
    placed,
    solve_job,
    solve_roles,
)
from catenary_scheduler.planning.live.agent_memory import memories_of
from catenary_scheduler.replanning.chain_builder import compose, compose_cluster
from catenary_services.domain.decoder import DecoderRuntime, serves_whole, why_not_loaded
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.plan import Agent
from catenary_services.errors import PlanInfeasible
from scheduling_cases.sized_decoders import (
    sized_agent,
    sized_load,
    sized_model,
)

MEMORY = 10_000
TARGETS = ("both", "cpu", "gpu")
RUNTIMES = (*(each for each in DecoderRuntime if not serves_whole(each)), "")
"""Those that run blocks; `search/test_engine_shapes.py` has engines."""
WHY = "it runs decoders with ONNX Runtime, and the model was imported for GPUs"


def agent(name: str, runtime: str, memory_bytes: int = MEMORY) -> Agent:
    return sized_agent(name, memory_bytes, runtime=runtime, prefill_chunk_tokens=16)


def model(target: str, name: str = "llm", partitions: int | None = None) -> DeployedModel:
    return sized_model(ModelKey(name, "1"), partitions=partitions, target=target)


def cluster(agents: list[Agent], *models: DeployedModel, prefill_agents: int = 0) -> ChainCluster:
    loads = tuple(map(sized_load, models))
    return ChainCluster(tuple(agents), loads, {}, {}, Placement(()), prefill_agents=prefill_agents)


def used(chains: tuple[ChainPlacement, ...]) -> set[str]:
    return {str(hop.agent) for chain in chains for hop in chain.hops}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("target", TARGETS)
def test_only_a_graph_that_was_not_made_keeps_a_runtime_from_loading(
    runtime: str, target: str
) -> None:
    cannot = runtime == DecoderRuntime.ONNX and target == "gpu"
    assert bool(why_not_loaded(runtime, target)) is cannot
    assert bool(model(target).why_not_loaded(agent("a", runtime))) is cannot


@pytest.mark.parametrize("partitions", [None, 1, 2])
def test_a_mixed_cluster_serves_with_the_agents_that_can_load(partitions: int | None) -> None:
    agents = [
        agent("cpu-0", DecoderRuntime.ONNX),
        agent("cpu-1", DecoderRuntime.ONNX),
        agent("gpu-0", DecoderRuntime.TORCH_BFLOAT16),
        agent("old", ""),
        agent("slow", DecoderRuntime.TORCH_FLOAT32),
    ]
    (job,) = chain_jobs(cluster(agents, model("gpu", partitions=partitions)))
    composed = solve_job(job, compose)
    assert used(placed(job, composed).chains) <= {"gpu-0", "old", "slow"}
    (line,) = [each for each in explain_chains(job, composed) if "cannot load" in each]
    assert line.startswith(f"llm:1: cpu-0, cpu-1 cannot load it: {WHY}")
    (free,) = chain_jobs(cluster(agents, model("both", partitions=partitions)))
    composed = solve_job(free, compose)
    assert len(used(placed(free, composed).chains)) > (3 if partitions != 2 else 2)
    assert not any("cannot load" in each for each in explain_chains(free, composed))


def test_where_nobody_can_load_a_model_the_plan_says_who_and_why() -> None:
    agents = [agent("b", DecoderRuntime.ONNX), agent("a", DecoderRuntime.ONNX)]
    for partitions in (None, 2):
        (job,) = chain_jobs(cluster(agents, model("gpu", partitions=partitions)))
        with pytest.raises(PlanInfeasible, match=f"llm:1: a, b cannot load it: {WHY}"):
            solve_job(job, compose)
    composed = compose_cluster(cluster(agents, model("gpu"), model("both", "other")))
    assert [model.model.name for model in composed.models] == ["other"]
    (problem,) = composed.problems
    assert "a, b cannot load it" in problem


def test_memory_of_who_cannot_load_a_model_is_for_the_others() -> None:
    agents = [agent("cpu", DecoderRuntime.ONNX), agent("gpu", DecoderRuntime.TORCH_BFLOAT16)]
    both, only_gpus = model("both"), model("gpu", "large")
    alone = memories_of(both, agents, [both], {})
    beside = memories_of(both, agents, [both, only_gpus], {})
    assert beside["cpu"] == alone["cpu"]
    half, whole = beside["gpu"].memory, alone["gpu"].memory
    assert half is not None
    assert whole is not None
    assert half < whole
    assert set(memories_of(only_gpus, agents, [both, only_gpus], {})) == {"gpu"}


def test_who_runs_prompts_is_chosen_among_those_that_can_load() -> None:
    agents = [
        agent("cpu", DecoderRuntime.ONNX),
        agent("gpu-0", DecoderRuntime.TORCH_BFLOAT16),
        agent("gpu-1", DecoderRuntime.TORCH_BFLOAT16),
    ]
    (job,) = chain_jobs(cluster(agents, model("gpu"), prefill_agents=1))
    found = solve_roles(job, compose)
    assert [part.role for part, _ in found] == ["prefill", "decode"]
    assert set.union(*(used(placed(*each).chains) for each in found)) == {"gpu-0", "gpu-1"}


def test_an_agent_that_comes_back_with_another_runtime_leaves_its_chains() -> None:
    agents = [agent("a", DecoderRuntime.TORCH_FLOAT32), agent("b", DecoderRuntime.TORCH_FLOAT32)]
    before = cluster(agents, model("gpu"))
    (job,) = chain_jobs(before)
    present = Placement((placed(job, solve_job(job, compose)),))
    assert used(present.models[0].chains) == {"a", "b"}
    changed = [replace(agents[0], runtime=DecoderRuntime.ONNX), agents[1]]
    (job,) = chain_jobs(replace(before, agents=tuple(changed), present=present))
    assert used(placed(job, solve_job(job, compose)).chains) == {"b"}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3_000), st.sampled_from(RUNTIMES)), min_size=1, max_size=5),
    st.lists(st.sampled_from(TARGETS), min_size=1, max_size=3),
    st.sampled_from((None, 1, 2)),
)
def test_nobody_is_planned_for_what_it_cannot_load(
    there: list[tuple[int, str]], targets: list[str], partitions: int | None
) -> None:
    agents = [agent(f"a{i}", runtime, memory) for i, (memory, runtime) in enumerate(there)]
    models = [model(target, f"m{i}", partitions) for i, target in enumerate(targets)]
    by_name = {str(each.agent_id): each for each in agents}
    composed = compose_cluster(cluster(agents, *models))
    assert len(composed.models) + len(composed.problems) == len(models)
    deployed = {each.key: each for each in models}
    for found in composed.models:
        for name in used(found.chains):
            assert not deployed[found.model].why_not_loaded(by_name[name])
