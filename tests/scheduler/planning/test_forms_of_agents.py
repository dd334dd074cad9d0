"""Chains over agents that hold a model in different numbers: each is asked for what it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning import DeployedModel, ModelPlacement, Placement
from catenary_scheduler.planning.chain_placement import ChainPlacement, HopPlacement
from catenary_scheduler.planning.latency import ClusterLines
from catenary_scheduler.planning.live import (
    ChainCluster,
    ChainCosts,
    ChainLoad,
    GenerationCost,
    SessionShape,
    chain_jobs,
    explain_chains,
    solve_job,
)
from catenary_scheduler.planning.live.agent_memory import memories_of, within_memory
from catenary_scheduler.planning.requirements import hosts_of
from catenary_scheduler.replanning.chain_builder import compose
from catenary_services.domain import decoder
from catenary_services.domain.decoder import (
    AllocatedSizes,
    DecoderForm,
    DecoderRuntime,
    LargestStep,
    StepSizes,
)
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
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

LLM = ModelKey("llm", "1")
TOKENS = 64
CHUNK = 16


@pytest.fixture(autouse=True, scope="module")
def small_graphs() -> Iterator[None]:
    """Graphs as small as everything else here."""
    with mock.patch.object(decoder, "GRAPH_BYTES", 3):
        yield


def sizes(form: DecoderForm, factor: int, steps: StepSizes) -> AllocatedSizes:
    return AllocatedSizes(
        form,
        (100 * factor,) * BLOCKS,
        50 * factor,
        60 * factor,
        40 * factor,
        3,
        7,
        2 * factor,
        steps,
    )


STEPS = StepSizes(20, 5, 1, 9, 1, 1, 1)
TABLE = decoder_table(
    block_bytes=50,
    cache_bytes_per_token=4,
    forms=(
        sizes(DecoderForm.ONNX_INT4, 1, STEPS),
        sizes(DecoderForm.TORCH_BFLOAT16, 2, STEPS),
        sizes(DecoderForm.TORCH_FLOAT32, 4, StepSizes()),
    ),
)
RUNTIMES = (
    DecoderRuntime.ONNX,
    DecoderRuntime.TORCH_BFLOAT16,
    DecoderRuntime.TORCH_FLOAT32,
    DecoderRuntime.TORCH_FLOAT16,
    "",
)


def agent(name: str, memory_bytes: int, runtime: str) -> Agent:
    return sized_agent(name, memory_bytes, runtime=runtime, prefill_chunk_tokens=CHUNK)


def model(max_batch: int = 4, partitions: int | None = None) -> DeployedModel:
    return sized_model(LLM, max_batch, partitions, decoder=TABLE, precision="int4")


def planned(deployed: DeployedModel, *agents: Agent) -> ModelPlacement:
    return served(ChainCluster(agents, (sized_load(deployed),), {}, {}, Placement(())))


def asked_bytes(deployed: DeployedModel, found: ModelPlacement, at: Agent) -> int:
    """What a plan asks an agent to load, as `Hosting` and the agent itself count it."""
    held, total = deployed.held_by(at), 0
    for name, key, need in hosts_of(found):
        if name == at.agent_id:
            assert need.cache is not None
            step = LargestStep(need.batch, CHUNK, TOKENS, len(need.cache.entry_blocks))
            total += held.partition_bytes(
                (key.first_block, key.last_block), need.cache.tokens, step
            )
    return total


def whole_bytes(runtime: str, sessions: int) -> int:
    """What is kept free for the whole model, with so many sessions."""
    held = TABLE.held_by(runtime, "int4")
    caches = sessions * BLOCKS * TOKENS
    return held.partition_bytes((0, BLOCKS), caches, LargestStep(4, CHUNK, TOKENS, 2))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_agent_takes_as_many_sessions_as_its_own_form_has_room_for(runtime: str) -> None:
    for sessions in (1, 2, 3):
        exact = agent("a", whole_bytes(runtime, sessions), runtime)
        assert [chain.capacity for chain in planned(model(), exact).chains] == [sessions]
        less = replace(exact, memory_bytes=exact.memory_bytes - 1)
        if sessions > 1:
            assert [chain.capacity for chain in planned(model(), less).chains] == [sessions - 1]
        else:
            with pytest.raises(PlanInfeasible):
                planned(model(), less)


def test_a_request_for_rings_counts_each_agent_in_its_own_numbers() -> None:
    small = TABLE.held_by(DecoderRuntime.TORCH_BFLOAT16, "int4")
    large = TABLE.held_by(DecoderRuntime.TORCH_FLOAT32, "int4")

    def part(held: AllocatedSizes) -> int:
        step = held.step_bytes(LargestStep(40, CHUNK, TOKENS, 2)) + 2 * held.entry_bytes
        sessions = 3 * (held.largest_block_bytes + 30 * held.slot_bytes(TOKENS))
        return held.ends_bytes + step + sessions

    one = agent("a", part(large), DecoderRuntime.TORCH_FLOAT32)
    other = agent("b", part(small), DecoderRuntime.TORCH_BFLOAT16)

    def capacity(*runtimes: str) -> int:
        there = [replace(a, runtime=r) for a, r in zip((one, other), runtimes, strict=True)]
        (chain,) = planned(model(40, partitions=2), *there).chains
        assert len(chain.hops) == 2
        return chain.capacity

    assert capacity(DecoderRuntime.TORCH_FLOAT32, DecoderRuntime.TORCH_BFLOAT16) == 30
    assert capacity(DecoderRuntime.TORCH_FLOAT32, DecoderRuntime.TORCH_FLOAT32) < 30
    roomy = replace(other, memory_bytes=one.memory_bytes)
    one, other = roomy, replace(roomy, agent_id=AgentId("c"))
    assert capacity(DecoderRuntime.TORCH_BFLOAT16, DecoderRuntime.TORCH_BFLOAT16) == 40


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12_000), st.sampled_from(RUNTIMES)), min_size=1, max_size=5),
    st.integers(1, 6),
    st.sampled_from((None, 2)),
)
def test_no_agent_is_asked_for_more_than_it_has(
    there: list[tuple[int, str]], max_batch: int, partitions: int | None
) -> None:
    agents = [agent(f"a{i}", memory or 1, runtime) for i, (memory, runtime) in enumerate(there)]
    deployed = model(max_batch, partitions)
    try:
        found = planned(deployed, *agents)
    except PlanInfeasible:
        return
    for each in agents:
        assert asked_bytes(deployed, found, each) <= each.memory_bytes
    assert all(chain.capacity >= 1 for chain in found.chains)


def test_the_slowest_chain_makes_room_for_rows_and_entries_beyond_what_was_kept_free() -> None:
    deployed, at = model(max_batch=4), agent("a", 10**6, DecoderRuntime.ONNX)
    held = deployed.held_by(at)
    entries = (0, 2, 4)
    chains = tuple(
        ChainPlacement(4, (HopPlacement(at.agent_id, 0, BLOCKS, entry),)) for entry in entries
    )

    def bytes_of(found: tuple[ChainPlacement, ...]) -> int:
        tokens = sum(chain.capacity * chain.hops[0].blocks * TOKENS for chain in found)
        sessions = sum(chain.capacity for chain in found)
        step = LargestStep(sessions, CHUNK, TOKENS, len({0, *(c.hops[0].entry for c in found)}))
        return held.partition_bytes((0, BLOCKS), tokens, step)

    for memory in range(bytes_of(chains[:1]), bytes_of(chains) + 1, 61):
        memories = memories_of(deployed, [replace(at, memory_bytes=memory)], [deployed], {})
        found = within_memory(deployed, memories, chains)
        assert found[0] == chains[0]
        assert bytes_of(found) <= memory or len(found) == 1
        if bytes_of(chains) <= memory:
            assert found == chains
            continue
        # One session more of the last that has fewer would be too much.
        last = chains[len(found) - 1]
        more = (
            (*found[:-1], replace(found[-1], capacity=found[-1].capacity + 1))
            if found[-1].capacity < last.capacity
            else (*found, replace(chains[len(found)], capacity=1))
        )
        assert bytes_of(more) > memory


def test_what_was_planned_is_told_in_the_bytes_of_each_form() -> None:
    agents = (
        agent("a", 10**6, DecoderRuntime.TORCH_BFLOAT16),
        agent("b", 10**6, DecoderRuntime.ONNX),
        agent("c", 10**6, ""),
    )
    load = ChainLoad(model(), 0.1, SessionShape(10, 10))
    (job,) = chain_jobs(ChainCluster(agents, (load,), {}, {}, Placement(())))
    lines = explain_chains(job, solve_job(job, compose))
    assert "llm:1: as imported on 1 agent(s): 400 bytes of weights, 24 bytes a token." in lines
    assert "llm:1: as onnx-int4 on 1 agent(s): 680 bytes of weights, 12 bytes a token." in lines
    assert (
        "llm:1: as torch-bfloat16 on 1 agent(s): 1,350 bytes of weights, 24 bytes a token." in lines
    )


def test_the_head_counts_as_large_as_the_agent_holds_it() -> None:
    head = replace(sizes(DecoderForm.TORCH_BFLOAT16, 2, STEPS), head_bytes=600)
    table = replace(TABLE, forms=(head, sizes(DecoderForm.TORCH_FLOAT32, 4, STEPS)))
    agents = [
        agent("a", 0, DecoderRuntime.TORCH_BFLOAT16),
        agent("b", 0, DecoderRuntime.TORCH_FLOAT32),
    ]
    cost = GenerationCost(0, 0, 9_000_000, 0)
    for name, worth in (("a", 3.0), ("b", 0.6)):
        whole = PartitionKey(LLM, 0, BLOCKS)
        measured = {(AgentId(name), whole): cost}
        costs = ChainCosts(table, agents, measured, LLM, SessionShape(0, 2), "int4")
        assert costs.block_s(AgentId(name)) == pytest.approx(0.009 / (BLOCKS + worth))
        lines = ClusterLines(table, agents, measured, LLM, hop_ns=0.0, precision="int4")
        hop = ChainHop(AgentId(name), PartitionKey(LLM, 3, BLOCKS), 3, BLOCKS)
        found = lines.lines([hop])
        assert found is not None
        assert found.decode_ns == pytest.approx(9_000_000 * (3 + worth) / (BLOCKS + worth))
