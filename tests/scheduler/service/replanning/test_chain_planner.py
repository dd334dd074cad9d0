"""The planner with models that generate text: when chains are composed, and beside what."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from catenary_protos.catenary.v1 import common_pb2
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.registry import AgentRegistry, AgentState
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.observed.links import MeasuredLink
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.live import (
    ChainCluster,
    GenerationCost,
    LinkFigures,
    PlanningRules,
)
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.requirements import agents_of
from catenary_scheduler.replanning.agent_stability import AgentStability
from catenary_scheduler.replanning.chain_builder import (
    ChainBuilder,
    ComposedChains,
    compose_cluster,
)
from catenary_scheduler.replanning.plan_builder import PlanBuilder
from catenary_scheduler.replanning.planner import Planner
from catenary_scheduler.replanning.provenance import CHAINS, EVEN, PlanProvenance
from catenary_scheduler.replanning.solver import Solver, SolverResult
from catenary_scheduler.scaling import DemandPolicy, LoadReplanning, ReplanPolicy, SessionDemand
from catenary_scheduler.storage.values.codec import decode_document, encode_document
from catenary_scheduler.storage.values.stored import DeploymentSpec, StoredProvenance
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    PartitionKey,
    ServerId,
)
from catenary_services.domain.plan import Agent
from catenary_services.errors import Unavailable
from catenary_services.models.model_repository import ModelRepository
from scheduler_harness import LLM, MS, TOY, add_decoder, add_model, unconnected, until

S = NANOSECONDS_PER_SECOND


def registry(*names: str, memory_bytes: int = 10**6) -> AgentRegistry:
    found: AgentRegistry = {}
    for name in names:
        agent = Agent(AgentId(name), "cpu", ServerId(name), memory_bytes, 10**9)
        session = unconnected()
        found[agent.agent_id] = AgentState(agent, 1, common_pb2.Peer(), "cpu", 0.0, session)
    return found


async def no_solver(_: PoolingProblem) -> SolverResult:
    raise Unavailable("nobody should ask for a pooled plan here")


class Bench:
    """A planner over two models, one of which generates text."""

    def __init__(self, deployments: Deployments, agents: AgentRegistry) -> None:
        self.deployments, self.agents = deployments, agents
        self.elsewhere: list[ChainCluster] = []
        policy = DemandPolicy(lasting_ns=0, interval_ns=0, time_constant_ns=60 * S)
        self.demand = SessionDemand(policy)
        self.measured = MeasuredProfiles()
        chains = ChainBuilder(deployments, self.measured, self.compose_elsewhere)
        maker = PlanBuilder("even", PlanningRules(), deployments, self.measured, no_solver, chains)
        self.availability = Availability()
        self.planner = Planner(
            maker,
            AgentStability(),
            LoadReplanning(ReplanPolicy()),
            0.0,
            self.demand,
            self.availability,
        )

    async def compose_elsewhere(self, cluster: ChainCluster) -> ComposedChains:
        self.elsewhere.append(cluster)
        return compose_cluster(cluster)

    def follow(self, now_s: float = 100.0) -> Placement | None:
        models = [each.for_planning() for each in self.deployments.ready.values()]
        return self.planner.follow(models, self.agents, now_s)


@pytest.fixture
async def deployments(tmp_path: Path) -> Deployments:
    add_model(tmp_path / "models")
    add_decoder(tmp_path / "models")
    found = Deployments(ModelRepository(tmp_path / "models"))
    await found.want(["toy", "llm"])
    assert not found.problems
    return found


async def test_both_kinds_of_models_are_in_one_plan_at_once(deployments: Deployments) -> None:
    bench = Bench(deployments, registry("a", "b"))
    placement = bench.follow()
    assert placement is not None
    toy, llm = placement.models
    assert (toy.model, len(toy.pipelines), toy.chains) == (TOY, 1, ())
    assert (llm.model, llm.pipelines, len(llm.chains)) == (LLM, (), 2)
    assert bench.planner.provenance is not None
    assert bench.planner.provenance.planner == EVEN
    assert "2 chain(s) over 2 agent(s)" in " ".join(bench.planner.provenance.in_words())


async def test_only_the_chains_are_composed_anew_when_demand_drifts(
    deployments: Deployments,
) -> None:
    bench = Bench(deployments, registry("a", "b"))
    before = bench.follow()
    assert before is not None
    for number in range(3_000):
        bench.planner.session_arrived(LLM, 40, (100 + number // 50) * S)
    after = bench.follow(160.0)
    assert after is not None
    assert after.models[0] == before.models[0]
    assert bench.planner.provenance is not None
    assert "llm:1 is asked for" in bench.planner.cause
    assert bench.planner.provenance.planner == EVEN
    assert bench.planner.answers == 2
    bench.follow(161.0)
    assert bench.planner.answers == 2  # composed for this load now


async def test_chains_are_tuned_by_a_replay_of_what_was_answered_beside_the_event_loop(
    deployments: Deployments,
) -> None:
    bench = Bench(deployments, registry("a", "b"))
    before = bench.follow()
    assert before is not None
    assert bench.elsewhere == []
    for number in range(199):
        bench.planner.answered(LLM, (number - 199) * S, 10 + number % 7, 5 + number % 50)
    bench.follow(101.0)
    assert bench.planner.answers == 1
    bench.planner.answered(LLM, 0, 10, 20)
    after = bench.follow(102.0)
    assert after == before  # serves until the others are composed
    await until(lambda: bench.planner.answers == 2, "an answer")
    (cluster,) = bench.elsewhere
    (load,) = cluster.loads
    assert load.log is not None
    assert len(load.log) == 200
    assert bench.planner.provenance is not None
    said = " ".join(bench.planner.provenance.in_words())
    assert "by a replay of the last 200 sessions" in said
    assert "llm:1 has answered 200 sessions" in bench.planner.cause
    bench.follow(300.0)
    assert bench.planner.answers == 2


async def test_chains_are_searched_for_anew_once_all_their_agents_have_measured_the_model(
    deployments: Deployments,
) -> None:
    bench = Bench(deployments, registry("a", "b"))
    placement = bench.follow()
    assert placement is not None
    assert bench.planner.provenance is not None
    assert "nothing is measured yet" in " ".join(bench.planner.provenance.chain_lines)
    first, *others = placement.models[1].hosts
    cost = GenerationCost(2 * MS, MS, 10 * MS, MS)
    for host in first, *others:
        assert bench.follow(101.0) == placement
        assert bench.planner.answers == 1, "some have not measured it yet"
        key = PartitionKey(LLM, host.first_block, host.last_block)
        bench.measured.put_generation(host.agent, key, cost)
    assert bench.follow(102.0) == placement, "what runs is as good as any"
    assert (bench.planner.answers, bench.planner.cause) == (
        2,
        "agents have measured llm:1 for the first time",
    )
    assert "sessions/s (" in " ".join(bench.planner.provenance.chain_lines)
    bench.follow(103.0)
    assert bench.planner.answers == 2


async def test_every_agent_that_no_model_uses_is_told_why(deployments: Deployments) -> None:
    agents = registry("a", "b", "tiny")
    tiny = agents[AgentId("tiny")]
    tiny.agent = replace(tiny.agent, memory_bytes=20)
    del deployments.ready[TOY]  # which is so small that it fits anywhere
    bench = Bench(deployments, agents)
    bench.follow()
    assert bench.planner.provenance is not None
    (idle,) = bench.planner.provenance.idle
    assert idle.startswith("tiny is idle: ")
    assert "of llm:1, one block with the cache of a session takes" in idle
    assert idle in bench.planner.provenance.in_words()
    told = PlanProvenance.of(bench.planner.provenance.stored())
    assert told.idle == (idle,)


async def test_only_the_chains_are_composed_anew_when_a_link_turns_out_to_be_slow(
    deployments: Deployments,
) -> None:
    # Room for three of six blocks, so that a chain needs two of the three agents.
    bench = Bench(deployments, registry("a", "b", "c", memory_bytes=1_000))

    def placed(now_s: float) -> tuple[object, set[frozenset[str]]]:
        placement = bench.follow(now_s)
        assert placement is not None
        toy, llm = placement.models
        return toy, {frozenset(str(hop.agent) for hop in chain.hops) for chain in llm.chains}

    toy, (used,) = placed(100.0)
    assert len(used) == 2
    slow, near = LinkFigures(60_000_000, 5_000_000), LinkFigures(400_000, 10**9)
    for one, other in permutations("abc", 2):
        figures = slow if {one, other} == used else near
        pair = ServerId(one), ServerId(other)
        bench.measured.links.put(pair, MeasuredLink(figures, 1_790_000_000, "10.0.0.5>10.0.0.6"))
    assert placed(101.0) == (toy, {used})
    assert placed(105.0) == (toy, {used})  # it has to last
    after, chains = placed(145.0)
    assert after == toy
    assert used not in chains
    assert "the link from" in bench.planner.cause
    assert bench.planner.answers == 2
    placed(246.0)
    placed(347.0)
    assert bench.planner.answers == 2  # composed for these links now


async def test_a_given_length_of_chains_is_a_reason_to_plan(
    deployments: Deployments,
) -> None:
    bench = Bench(deployments, registry("a", "b", "c"))
    bench.follow()
    await deployments.deploy("llm", DeploymentSpec(partitions=3))
    placement = bench.follow()
    assert placement is not None
    (chain,) = placement.models[1].chains
    assert [hop.blocks for hop in chain.hops] == [2, 2, 2]


async def test_many_agents_are_composed_beside_the_event_loop(deployments: Deployments) -> None:
    names = [f"agent-{number:02}" for number in range(60)]
    bench = Bench(deployments, registry(*names))
    assert bench.follow() is None
    assert bench.planner.is_thinking
    await until(lambda: bench.planner.answers == 1, "an answer")
    placement = bench.follow()
    assert placement is not None
    assert len(placement.models[1].chains) == 60
    assert len(bench.elsewhere) == 1


async def test_chains_of_a_draining_agent_are_kept_while_the_planner_thinks(
    deployments: Deployments,
) -> None:
    names = [f"agent-{number:02}" for number in range(130)]
    # Room for four blocks at most: every chain runs through several agents.
    bench = Bench(deployments, registry(*names, memory_bytes=800))
    bench.follow()
    await until(lambda: bench.planner.answers == 1, "an answer")
    before = bench.follow()
    assert before is not None
    for chain in before.models[1].chains:
        assert len(chain.hops) > 1
        bench.availability.impair(chain.hops[0].agent, Impairment.DRAINING)
    during = bench.follow(200.0)
    assert bench.planner.is_thinking
    assert during is not None
    assert during.models[1].chains == before.models[1].chains
    await until(lambda: bench.planner.answers == 2, "an answer")
    after = bench.follow(201.0)
    assert after is not None
    assert LLM in {model.model for model in after.models}
    assert not any(bench.availability.rank(agent) for agent in agents_of(after))


async def test_memory_of_a_model_without_a_profile_is_taken_from_its_file(tmp_path: Path) -> None:
    root = tmp_path / "models"
    add_model(root)
    add_decoder(root)
    table = ModelRepository(root).block_table(TOY)
    ModelRepository(root).model_file(TOY).write_bytes(b"x" * 1_000)
    digest = ModelRepository(root).model_hash(TOY)
    ModelRepository(root).write_block_table(TOY, replace(table, model_hash=digest))
    deployments = Deployments(ModelRepository(root))
    await deployments.want(["toy", "llm"])
    one_session = 6 * (100 + 64) + 100
    bench = Bench(deployments, registry("a", memory_bytes=1_000 + one_session - 1))
    placement = bench.follow()
    assert placement is not None
    assert [model.model for model in placement.models] == [TOY]
    bench = Bench(deployments, registry("a", memory_bytes=1_000 + one_session))
    placement = bench.follow()
    assert placement is not None
    assert [model.model for model in placement.models] == [TOY, LLM]


async def test_a_model_without_room_is_named_and_the_others_are_served(
    deployments: Deployments,
) -> None:
    bench = Bench(deployments, registry("a", memory_bytes=120))
    placement = bench.follow()
    assert placement is not None
    assert [model.model for model in placement.models] == [TOY]
    assert "llm:1" in bench.planner.problem


async def test_an_agent_that_comes_is_used_and_those_there_keep_their_blocks(
    deployments: Deployments,
) -> None:
    agents = registry("a", "b", "c", memory_bytes=700)
    bench = Bench(deployments, agents)
    before = bench.follow()
    assert before is not None
    bench.agents.update(registry("d", memory_bytes=700))
    after = bench.follow(200.0)
    assert after is not None
    assert LLM in {model.model for model in after.models}
    assert agents_of(after) <= {*bench.agents}
    assert bench.planner.provenance is not None
    assert "block(s) that they did not" in " ".join(bench.planner.provenance.in_words())


async def test_the_solver_process_composes_chains(deployments: Deployments) -> None:
    bench = Bench(deployments, registry(*[f"agent-{number}" for number in range(41)]))
    bench.follow()
    await until(lambda: bench.planner.answers == 1, "an answer")
    (cluster,) = bench.elsewhere
    composed = await Solver(10.0).compose(cluster)
    assert composed == compose_cluster(cluster)
    none = await Solver(10.0).compose(replace(cluster, agents=()))
    assert not none.models
    assert none.problems


def test_notes_on_chains_survive_redis() -> None:
    provenance = PlanProvenance(CHAINS, "it was asked for", chain_lines=("one chain",))
    assert (
        PlanProvenance.of(decode_document(encode_document(provenance.stored()), StoredProvenance))
        == provenance
    )
    assert provenance.in_words()[-1] == "one chain"
