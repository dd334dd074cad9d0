"""What the processes of a live run of server chains are given: the simulator's own times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.emulated import EmulatedDecoder
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_lab.live.chains.emulation import KEY, VOCABULARY, Emulation, plan_document
from catenary_lab.live.chains.load import Answered
from catenary_lab.live.chains.run import ChainsMeasured, ChainsRun, accounts_of, asked_of
from catenary_lab.scenarios.chains import live_chains, serve
from catenary_lab.scenarios.chains.jobs import Outcome
from catenary_lab.scenarios.chains.schema import FILES, Serve
from catenary_lab.scenarios.chains.schema_parts import System
from catenary_lab.scenarios.chains.settings import cases_of
from catenary_lab.scenarios.report import Report
from catenary_scheduler.planning.chains import Composition, compose
from catenary_scheduler.planning.live import ChainCosts, GenerationCost, SessionShape
from catenary_scheduler.planning.placement import Placement, parse_placement
from catenary_services.domain.ids import AgentId, PartitionKey, ServerId
from catenary_services.domain.plan import Agent, ChainHop
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.models.model_repository import ModelRepository
from catenary_simulator.chains.cluster import ChainsCluster, CommunicationCost
from catenary_simulator.chains.loop import SessionDurations
from catenary_simulator.chains.plan import plan_of
from catenary_simulator.chains.result import ChainResult
from catenary_simulator.chains.workload import SessionWorkload
from catenaryd.command_line import cli
from cluster_harness import ROOT
from small_models.text_here import codec_of, model_text

SCENARIO = ROOT / "scenarios" / "chains" / "table-1-live.yaml"
SESSIONS = SessionWorkload(
    [0, 10**9, 2 * 10**9], [1.0] * 3, [2000.0, 37.0, 7000.0], [30.0, 400.0, 2.0]
)
TOKENS = 8192


@pytest.fixture(scope="module")
def cluster() -> ChainsCluster:
    scenario = FILES.load(SCENARIO)
    assert isinstance(scenario, Serve)
    return cases_of(scenario, [1], 4.0)[0].settings[0].cluster()


@pytest.fixture(scope="module", params=[1, 12, 35])
def composition(cluster: ChainsCluster, request: pytest.FixtureRequest) -> Composition:
    made = compose(cluster.task(2.57), request.param)
    assert made.feasible
    return made


class Agents:
    """The executors nine agents would load for a composition."""

    def __init__(self, emulation: Emulation, composition: Composition, folder: Path) -> None:
        repository = ModelRepository(folder / "models")
        emulation.write_model(repository)
        self.settings = {each["agent_id"]: each for each in emulation.write_agents(folder)}
        document = plan_document(composition, emulation.session_tokens)
        self.placement: Placement = parse_placement(json.loads(json.dumps(document)))
        (placed,) = self.placement.models
        entries: dict[str, set[int]] = {}
        for chain in placed.chains:
            for hop in chain.hops:
                entries.setdefault(hop.agent, set()).add(hop.entry)
        self.executors: dict[str, EmulatedDecoder] = {}
        for host in placed.hosts:
            own: dict[str, Any] = self.settings[host.agent]
            device = Device.parse(own["device"], profile=own["emulated_profile"])
            every = sorted({host.first_block, *entries.get(host.agent, ())})
            layout = CacheLayout(host.block_slots, emulation.session_tokens, tuple(every))
            key = PartitionKey(KEY, host.first_block, host.last_block)
            made = load_decoder(repository, key, device, layout)
            assert isinstance(made, EmulatedDecoder)
            self.executors[host.agent] = made

    def waited_ns(self, hops: tuple[ChainHop, ...], inputs: int, outputs: int) -> int:
        """Returns how long a session alone is under way: a pass for each token."""
        total = 0
        for hop in hops:
            executor = self.executors[hop.agent]
            executor.open_session(7, hop.first_block)
            total += executor.waiting_ns(7, inputs) + (outputs - 1) * executor.waiting_ns(7, 1)
            executor.close_session(7)
        return total


def test_a_session_alone_takes_the_simulated_time_on_every_chain(
    cluster: ChainsCluster, composition: Composition, tmp_path: Path
) -> None:
    dilation = 0.75
    agents = Agents(Emulation(cluster, dilation, TOKENS), composition, tmp_path)
    durations = SessionDurations(cluster, SESSIONS)
    for chain in plan_of(composition, KEY).models[0].chains:
        for number, (inputs, outputs) in enumerate(
            zip(SESSIONS.inputs, SESSIONS.outputs, strict=True)
        ):
            waited_ns = agents.waited_ns(chain.hops, int(inputs), int(outputs))
            assert waited_ns == pytest.approx(dilation * durations.of(number, chain.hops), rel=1e-6)


def test_sessions_side_by_side_keep_no_device_busy(
    cluster: ChainsCluster, composition: Composition, tmp_path: Path
) -> None:
    agents = Agents(Emulation(cluster, 1.0, TOKENS), composition, tmp_path)
    for executor in agents.executors.values():
        assert executor.step_ns([]) == 0


def test_sessions_that_share_a_device_only_wait_for_the_way_to_it(
    cluster: ChainsCluster, composition: Composition, tmp_path: Path
) -> None:
    agents = Agents(Emulation(cluster, 2.0, TOKENS, shared_device=True), composition, tmp_path)
    servers = {server.name: server for server in cluster.servers}
    for name, executor in agents.executors.items():
        executor.open_session(7, executor.key.first_block)
        way_ns = round(2e6 * servers[name].speed.per_output_ms)
        assert executor.waiting_ns(7, 500) == executor.waiting_ns(7, 1) == way_ns
        assert "prefill_chunk_tokens" not in agents.settings[name]


def test_the_scheduler_ranks_the_chains_as_the_simulator_does(
    cluster: ChainsCluster, composition: Composition, tmp_path: Path
) -> None:
    emulation = Emulation(cluster, 1.0, TOKENS)
    agents = Agents(emulation, composition, tmp_path)
    table = ModelRepository(tmp_path / "models").decoder_table(KEY)
    known = [
        Agent(AgentId(name), own["device_class"], ServerId(name), own["memory_bytes"], 2 * 10**9)
        for name, own in agents.settings.items()
    ]
    measured = {
        (AgentId(name), executor.key): GenerationCost(
            executor.cost.prefill_ns,
            executor.cost.prefill_token_ns,
            executor.cost.decode_ns,
            executor.cost.decode_session_ns,
        )
        for name, executor in agents.executors.items()
    }
    shape = SessionShape(cluster.model.input_tokens, cluster.model.output_tokens)
    costs = ChainCosts(table, known, measured, KEY, shape)
    chains = plan_of(composition, KEY).models[0].chains
    by_simulator = sorted(chains, key=lambda chain: chain.service_ns)
    by_scheduler = sorted(chains, key=lambda chain: costs.service_ns(chain.hops))
    assert [each.chain_id for each in by_scheduler] == [each.chain_id for each in by_simulator]


def test_weights_and_caches_fill_the_memory_of_the_servers(
    cluster: ChainsCluster, composition: Composition, tmp_path: Path
) -> None:
    agents = Agents(Emulation(cluster, 1.0, TOKENS), composition, tmp_path)
    for name, executor in agents.executors.items():
        caches = executor.layout.block_slots * executor.table.slot_bytes(TOKENS)
        room = agents.settings[name]["memory_bytes"]
        one_more = executor.table.slot_bytes(TOKENS)
        assert (
            executor.memory_bytes + caches <= room < executor.memory_bytes + caches + 2 * one_more
        )
    (placed,) = agents.placement.models
    assert [chain.capacity for chain in placed.chains] == [
        chain.capacity for chain in composition.chains
    ]


def test_the_gateway_reads_the_tokenizer(cluster: ChainsCluster, tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    Emulation(cluster, 1.0, TOKENS).write_model(repository)
    codec = codec_of(model_text(repository.folder(KEY)))
    assert codec.vocabulary_size == repository.decoder_table(KEY).vocabulary_size == VOCABULARY
    assert not codec.chats


def test_sessions_are_asked_at_dilated_moments_and_must_fit(cluster: ChainsCluster) -> None:
    asked = asked_of(SESSIONS, Emulation(cluster, 0.5, TOKENS))
    assert [each.due_s for each in asked] == [0.0, 0.5, 1.0]
    assert [each.output_tokens for each in asked] == [30, 400, 2]
    with pytest.raises(InvalidInput, match="7002 tokens"):
        asked_of(SESSIONS, Emulation(cluster, 0.5, 7001))
    with pytest.raises(InvalidInput, match="tokens of a trace"):
        asked_of(replace(SESSIONS, sizes=[1.0, 2.0, 1.0]), Emulation(cluster, 0.5, TOKENS))


def test_a_round_trip_once_per_session_cannot_be_emulated() -> None:
    scenario = FILES.load(SCENARIO)
    assert isinstance(scenario, Serve)
    setting = cases_of(scenario, [1])[0].settings[0]
    other = replace(setting, communication=CommunicationCost("session", 18.0)).cluster()
    with pytest.raises(NotSupported, match="per: token"):
        Emulation(other, 1.0, TOKENS).times_of(other.servers[0])


def test_live_scenarios_name_systems_the_scheduler_has() -> None:
    for path in sorted(SCENARIO.parent.glob("table-1-live*.yaml")):
        for quick in (False, True):
            scenario = FILES.load(path, quick=quick)
            assert isinstance(scenario, Serve)
            assert scenario.live is not None
            assert all(
                isinstance(each, System) and each.planner == "catenary" for each in scenario.systems
            )


def test_live_without_anything_to_serve_live_is_refused_at_once() -> None:
    plain = str(SCENARIO.parent / "table-1.yaml")
    result = CliRunner().invoke(cli, ["simulate", "chains", plain, "--live"])
    assert isinstance(result.exception, InvalidInput)
    assert "`live` section" in result.exception.message


def test_the_report_sets_live_beside_simulated_and_counts_what_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = FILES.load(SCENARIO, quick=True)
    assert isinstance(scenario, Serve)
    row = next(serve.rows(scenario))
    (job,) = row.jobs(scenario.systems[0])
    waits, services = np.array([0.0, 1.0, 2.0]), np.array([2.0, 4.0, 6.0])
    outcome = Outcome(ChainResult(waits, services), 35)
    slower = ChainsMeasured(
        ChainResult(waits, 1.1 * services), 0, (), 0, 0, 0, 12, 0.2, 0.004, 30.0
    )

    async def measured(run: ChainsRun, folder: Path, progress: object) -> ChainsMeasured:
        assert run.policy == "jffc"
        assert run.composition.c == 35
        return slower

    monkeypatch.setattr(live_chains, "run_live", measured)
    found = live_chains.beside(scenario, {job: outcome}, lambda _line: None)
    report = Report("small", scenario.title, (), ()).beside(found)
    (facts,) = report.facts["live"]
    assert facts["live"]["mean_service_s"] == pytest.approx(1.1 * 4.0)
    assert facts["service_ratio"] == pytest.approx({"p10": 1.1, "p50": 1.1, "p90": 1.1})
    text = report.markdown()
    assert "+8.0 %" in text  # (1 + 4.4) / (1 + 4) as long
    assert "| 3 | 0 | 0 | 0 | 12 |" in text


def test_lost_sessions_are_those_without_all_their_tokens() -> None:
    whole, cut = Answered(1.0), Answered(2.0, "4 of 5 tokens")
    result, lost, problems, moved = accounts_of((whole, cut, whole), 1.0)
    assert (lost, result.rejected, problems, moved) == (1, 1, ("4 of 5 tokens",), 0)
