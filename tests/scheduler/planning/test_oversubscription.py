"""Slots for more sessions than memory holds at full length, where memory is taken as it is used."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.planning import ModelPlacement, Placement, complete_plan
from catenary_scheduler.planning.live import (
    ChainCluster,
    chain_jobs,
    explain_chains,
    placed,
    solve_job,
)
from catenary_scheduler.planning.live.rings import composition_of
from catenary_scheduler.planning.placement import parse_placement, placement_document
from catenary_scheduler.planning.requirements import CacheRequirement, required_by_agent
from catenary_scheduler.replanning.chain_builder import compose
from catenary_scheduler.rpc.agent_streams import _loaded
from catenary_scheduler.runtime.statistics_collector import sessions_of
from catenary_scheduler.scaling.workers.workers_line import SessionLengths
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.wire.messages import agent_of
from catenary_scheduler.wire.session_messages import cache_message
from catenary_services.domain.ids import AgentId, ModelKey, PlanId
from catenary_services.domain.model import ModelManifest
from catenary_services.domain.plan import Agent, Chain
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from scheduling_cases.sized_decoders import (
    BLOCKS,
    block_table,
    served,
    sized_agent,
    sized_load,
    sized_model,
)

LLM = ModelKey("llm", "1")
BLOCK_BYTES, ENDS_BYTES = 100, 100
SESSION_TOKENS = 64
WEIGHTS = BLOCKS * BLOCK_BYTES + ENDS_BYTES
SESSION_BYTES = BLOCKS * SESSION_TOKENS
TABLE = block_table()


def agent(name: str, memory_bytes: int, on_use: bool = True) -> Agent:
    return sized_agent(name, memory_bytes, commits_caches_on_use=on_use)


def cluster(
    *agents: Agent, factor: float = 4.0, own: float | None = None, max_batch: int = 32
) -> ChainCluster:
    load = sized_load(sized_model(LLM, max_batch, cache_oversubscription=own))
    return ChainCluster(agents, (load,), {}, {}, Placement(()), oversubscription=factor)


def cache_bytes(model: ModelPlacement, name: str) -> int:
    return sum(
        host.cache_tokens or host.block_slots * SESSION_TOKENS
        for host in model.hosts
        if host.agent == name
    )


def test_slots_are_multiplied_and_memory_is_not() -> None:
    memory = WEIGHTS + 3 * SESSION_BYTES
    (chain,) = served(cluster(agent("a", memory))).chains
    assert (chain.capacity, chain.cache_tokens) == (12, 3 * SESSION_TOKENS)
    model = served(cluster(agent("a", memory)))
    (host,) = model.hosts
    assert (host.block_slots, host.cache_tokens) == (12 * BLOCKS, 3 * BLOCKS * SESSION_TOKENS)
    assert WEIGHTS + cache_bytes(model, "a") <= memory
    (plain,) = served(cluster(agent("a", memory), factor=1.0)).chains
    assert (plain.capacity, plain.cache_tokens) == (3, 0)


@pytest.mark.parametrize("factor", [1.0, 1.4, 2.5, 4.0, 7.0])
def test_no_agent_is_asked_for_more_than_it_has_and_any_session_fits_alone(factor: float) -> None:
    sizes = {"a": 900, "b": 620, "c": 700, "d": 480}
    model = served(cluster(*(agent(*each) for each in sizes.items()), factor=factor))
    assert model.chains
    for name, size in sizes.items():
        weights = sum(
            (h.last_block - h.first_block) * BLOCK_BYTES for h in model.hosts if h.agent == name
        )
        assert weights + ENDS_BYTES + cache_bytes(model, name) <= size
    for chain in model.chains:
        assert chain.cache_tokens == 0 or chain.cache_tokens >= SESSION_TOKENS
        whole = (chain.cache_tokens or chain.capacity * SESSION_TOKENS) // SESSION_TOKENS
        assert chain.capacity == max(whole, math.floor(whole * factor))


def test_agents_that_allocate_caches_at_once_keep_a_slot_per_session_that_fits() -> None:
    memory = WEIGHTS + 3 * SESSION_BYTES
    model = served(cluster(agent("a", memory), agent("b", memory, on_use=False)))
    by_agent = {chain.hops[0].agent: chain for chain in model.chains}
    assert (by_agent[AgentId("a")].capacity, by_agent[AgentId("b")].capacity) == (12, 3)
    assert by_agent[AgentId("b")].cache_tokens == 0


def test_a_chain_over_such_an_agent_does_too() -> None:
    model = served(cluster(agent("a", 700), agent("b", 900, on_use=False)))
    (chain,) = model.chains
    assert len(chain.hops) == 2
    assert chain.cache_tokens == 0


def test_the_models_own_factor_goes_first() -> None:
    memory = WEIGHTS + 3 * SESSION_BYTES
    (chain,) = served(cluster(agent("a", memory), own=2.0)).chains
    assert chain.capacity == 6
    (chain,) = served(cluster(agent("a", memory), own=1.0)).chains
    assert (chain.capacity, chain.cache_tokens) == (3, 0)


def test_the_largest_batch_is_the_limit_all_the_same() -> None:
    memory = WEIGHTS + 3 * SESSION_BYTES
    (chain,) = served(cluster(agent("a", memory), max_batch=8)).chains
    assert (chain.capacity, chain.cache_tokens) == (8, 3 * SESSION_TOKENS)
    (chain,) = served(cluster(agent("a", memory), max_batch=2)).chains
    assert (chain.capacity, chain.cache_tokens) == (2, 0)


def test_the_planner_finds_its_own_composition_again() -> None:
    sizes = {"a": 900, "b": 620, "c": 700, "d": 480}
    there = cluster(*(agent(*each) for each in sizes.items()))
    (job,) = chain_jobs(there)
    composition = solve_job(job, compose)
    before = composition_of(placed(job, composition), 0.1)
    assert before is not None
    assert [chain.capacity for chain in before.chains] == [c.capacity for c in composition.chains]
    assert sum(h.slots for h in before.hosted) == sum(
        hop.blocks * chain.capacity for chain in composition.chains for hop in chain.hops
    )
    (again,) = chain_jobs(replace(there, present=Placement((placed(job, composition),))))
    assert solve_job(again, compose).moved_blocks == 0


def test_plans_and_orders_say_what_memory_holds() -> None:
    there = cluster(agent("a", WEIGHTS + 3 * SESSION_BYTES))
    model = served(there)
    (planned,) = complete_plan(Placement((model,)), {LLM: TABLE}, {}, PlanId("p")).models
    assert planned.chains[0].cache_tokens == 3 * SESSION_TOKENS
    assert planned.caches[0].cache_tokens == 3 * BLOCKS * SESSION_TOKENS
    ((key, need),) = required_by_agent(Placement((model,)))[AgentId("a")].items()
    assert need.cache is not None
    ordered = cache_message(need.cache)
    assert ordered.cache_tokens == 3 * BLOCKS * SESSION_TOKENS
    told = scheduler_pb2.PartitionLoaded(
        key=scheduler_pb2.PartitionKey(first_block=key.first_block),
        generation=scheduler_pb2.GenerationCost(
            block_slots=ordered.block_slots,
            session_tokens=ordered.session_tokens,
            cache_tokens=ordered.cache_tokens,
        ),
    )
    assert _loaded(told, need.cache).cache == need.cache
    (job,) = chain_jobs(there)
    text = " ".join(explain_chains(job, solve_job(job, compose)))
    assert f"chains hold {3 * SESSION_TOKENS} tokens" in text


def test_a_placement_is_read_back_as_it_was_written() -> None:
    placement = Placement((served(cluster(agent("a", 700), agent("b", 900))),))
    assert placement.models[0].chains[0].cache_tokens
    assert parse_placement(placement_document(placement)) == placement


def test_a_plan_file_may_say_what_chains_hold() -> None:
    hops = [{"agent": "a", "blocks": [0, 6]}]
    entry = {
        "name": "llm",
        "session_tokens": 64,
        "chains": [
            {"capacity": 9, "cache_tokens": 128, "hops": hops},
            {"capacity": 2, "hops": [{"agent": "b", "blocks": [0, 6]}]},
        ],
    }
    (model,) = parse_placement({"models": [entry]}).models
    assert [host.cache_tokens for host in model.hosts] == [128 * BLOCKS, 0]
    entry["chains"][0]["cache_tokens"] = 63  # type: ignore[index]
    with pytest.raises(InvalidInput, match=r"chains\[0\].cache_tokens"):
        parse_placement({"models": [entry]})


def test_an_agent_says_how_it_takes_memory() -> None:
    hello = scheduler_pb2.AgentHello(agent_id="a", device="cpu", link_bytes_per_second=5)
    assert not agent_of(hello).commits_caches_on_use
    hello.commits_caches_on_use = True
    assert agent_of(hello).commits_caches_on_use


def test_needs_are_compared_by_memory_too() -> None:
    plain, more = CacheRequirement(3, 64, (0,)), CacheRequirement(12, 64, (0,), 3 * 64)
    assert more.includes(plain)
    assert not plain.includes(more)
    assert not replace(more, cache_tokens=2 * 64).includes(plain)
    assert plain.joined(more) == more
    assert replace(more, cache_tokens=0).joined(more) == replace(more, cache_tokens=0)
    assert CacheRequirement(4, 64, (0,)).joined(more) == CacheRequirement(12, 64, (0,), 4 * 64)


def test_a_manifest_may_say_how_many_slots_a_model_gets(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    manifest = ModelManifest(LLM, "decoder", "model.safetensors", 10**9, 4, True)
    repository.write_manifest(manifest)
    assert repository.manifest(LLM).cache_oversubscription is None
    repository.write_manifest(replace(manifest, cache_oversubscription=2.5))
    assert repository.manifest(LLM).cache_oversubscription == 2.5


@pytest.mark.parametrize("line", ["0.5", "65", "many", "true"])
def test_a_factor_below_one_or_out_of_reason_is_refused(line: str, tmp_path: Path) -> None:
    folder = tmp_path / "llm" / "1"
    folder.mkdir(parents=True)
    text = f"platform: decoder\nfile: m\ncache_oversubscription: {line}\n"
    (folder / "model.yaml").write_text(text)
    with pytest.raises(InvalidInput, match="cache_oversubscription"):
        ModelRepository(tmp_path).manifest(LLM)


def test_the_cluster_has_a_factor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SchedulerSettings().cache_oversubscription == 1.0
    monkeypatch.setenv("CATENARY_CACHE_OVERSUBSCRIPTION", "4")
    assert SchedulerSettings().cache_oversubscription == 4.0
    with pytest.raises(ValidationError):
        SchedulerSettings(cache_oversubscription=0.9)


@pytest.mark.parametrize(
    ("cache_tokens", "sessions"), [(0.0, 12), (12.0 * 64, 12), (3.0 * 64, 6), (16.0, 1)]
)
def test_scaling_counts_the_sessions_that_really_fit(cache_tokens: float, sessions: int) -> None:
    chain = Chain("c", (), 12, 1, cache_tokens=cache_tokens)
    assert sessions_of(chain, SESSION_TOKENS, SessionLengths(20.0, 12.0)) == sessions
