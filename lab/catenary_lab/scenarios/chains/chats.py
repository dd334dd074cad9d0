"""Chats on unlike agents: how evenly policies use them, first tokens, and objectives met.

Each agent holds the whole model, so it is a chain. Its steps take what its latency lines say for
the sessions it has at that moment, unlike in the other simulations of chains, where a session takes
as long beside seven others as it takes alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from catenary_lab.scenarios.chains.schema import Chats
from catenary_lab.scenarios.data import data_file
from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.placement.schema_parts import WorkerSpec
from catenary_lab.scenarios.placement.settings import halves_of, lines_of
from catenary_lab.scenarios.report import Cell, Findings, Lines, Measure, Panel, Table
from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.events import AgentJoined, PlanActivated
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    AgentId,
    PartitionKey,
    PlanId,
)
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.plan import CacheCapacity, Chain, ChainHop, ModelPlan, Plan
from catenary_simulator.arrivals import parse_arrivals
from catenary_simulator.kernel import NEVER
from catenary_simulator.placement.engine import SimulatedWorker
from catenary_simulator.placement.learned import trained
from catenary_simulator.placement.loop import PlacementLoop, ReportDelays
from catenary_simulator.placement.result import result_of
from catenary_simulator.placement.serve import MODEL, agent_of
from catenary_simulator.placement.workload import (
    LengthPopulation,
    RequestWorkload,
    drawn_workload,
)

Facts = dict[str, Any]
MEASURES = (
    Measure("unevenness", "Largest over mean utilisation of the agents", digits=2),
    Measure("ttft_p50_ms", "Median first token (ms)", digits=0, drawn=False),
    Measure("ttft_p99_ms", "P99 first token (ms)", digits=0),
    Measure("response_ms", "Mean response (ms)", digits=0),
    Measure("attainment", "SLO attainment (%)", 100.0),
)


@dataclass(frozen=True, slots=True)
class ChatsJob:
    """Serves chats by one policy at one rate.

    Attributes:
        scenario: The scenario as JSON, by which equal jobs are known.
        policy: The policy.
        rate_per_s: Chats a second.
        named: Whether requests name their objectives.
        seed: Seed of arrivals and lengths.
    """

    scenario: str
    policy: str
    rate_per_s: float
    named: bool
    seed: int

    def run(self) -> Facts:
        """Returns the figures of the run."""
        scenario = Chats.model_validate_json(self.scenario)
        spec, news = scenario.lengths, scenario.news
        learned, work = drawn_chats(scenario, self.rate_per_s, self.seed)
        objectives = TokenObjectives(
            _ns(scenario.objectives.ttft_ms), _ns(scenario.objectives.atgt_ms)
        )
        limits = ChainedConfig(max_queued=len(work) + 1, max_requests=len(work) + 1, max_moves=0)
        dispatcher = ChainedDispatcher(limits, policy=self.policy)
        dispatcher.restore_lengths(MODEL, trained(learned))
        names = [f"{kind}-{at}" for at, kind in enumerate(scenario.agents)]
        workers = {}
        for at, name in enumerate(names):
            dispatcher.handle(AgentJoined(agent_of(name)), 0)
            kind = scenario.workers[scenario.agents[at]]
            lines = lines_of(kind, scenario.chunk_tokens)
            workers[name] = SimulatedWorker(at, lines, kind.cache_tokens)
        dispatcher.handle(PlanActivated(_plan(scenario, names, learned)), 0)
        delays = ReportDelays(
            _ns(news.start_ms), _ns(news.notice_ms), _ns(news.report_every_ms), spec.answer_limit
        )
        loop = PlacementLoop(dispatcher, MODEL, work, workers, objectives, delays)
        loop.are_named = self.named
        loop.sweep = dispatcher.take_changes
        loop.run()
        busy = [worker.busy_ps for worker in workers.values()]
        responses = [each.last_ps - each.arrived_ps for each in loop.ended]
        return {
            **result_of(loop).to_json(),
            "unevenness": max(busy) / statistics.fmean(busy),
            "response_ms": statistics.fmean(responses) / (1000 * NANOSECONDS_PER_MILLISECOND),
        }


def drawn_chats(
    scenario: Chats, rate_per_s: float, seed: int
) -> tuple[LengthPopulation, RequestWorkload]:
    """Returns the lengths to learn from, and the chats of a run."""
    spec = scenario.lengths
    data = None if spec.file is None else data_file(spec.file, "lengths.file")
    learned, served = halves_of(spec, data)
    process = parse_arrivals(scenario.arrivals)
    return learned, drawn_workload(served, process, rate_per_s, scenario.duration_s, seed)


def jobs(scenario: Chats) -> Iterator[ChatsJob]:
    """Yields all runs."""
    for rate in scenario.rates_per_s:
        for named in scenario.named:
            for policy in scenario.policies:
                yield from _jobs(scenario, policy, rate, named)


def report(scenario: Chats, results: Results) -> Findings:
    """Returns a table per measure, plots and facts."""
    facts = [
        mean_facts(policy, rate, named, [results[job] for job in mine])
        for rate in scenario.rates_per_s
        for named in scenario.named
        for policy in scenario.policies
        for mine in [_jobs(scenario, policy, rate, named)]
    ]
    notes = (
        f"{' and '.join(scenario.agents)}, {scenario.slots} sessions each;"
        f" {scenario.duration_s:g} s of {scenario.arrivals} arrivals into idle agents; means of"
        f" {len(scenario.seeds)} seeds.",
    )
    tables = tuple(_table(scenario, facts, measure) for measure in MEASURES)
    panels = tuple(
        _panel(scenario, facts, measure, named)
        for measure in MEASURES
        if measure.drawn
        for named in scenario.named
    )
    return Findings(tables, panels, notes, {"policies": facts})


def _jobs(scenario: Chats, policy: str, rate: float, named: bool) -> list[ChatsJob]:
    document = scenario.model_dump_json()
    return [ChatsJob(document, policy, rate, named, seed) for seed in scenario.seeds]


def _plan(scenario: Chats, names: list[str], learned: LengthPopulation) -> Plan:
    """Returns the plan with a chain per agent, its service time that of a mean chat alone."""
    part = PartitionKey(MODEL, 0, 1)
    prompt = statistics.fmean(learned.prompts)
    answer = statistics.fmean(learned.answers)
    chains, caches = [], []
    for name, kind in zip(names, scenario.agents, strict=True):
        worker: WorkerSpec = scenario.workers[kind]
        lines = lines_of(worker, scenario.chunk_tokens)
        service = lines.prefill(prompt) + (answer - 1) * lines.decode(1, prompt + answer / 2)
        hop = ChainHop(AgentId(name), part, 0, 1)
        chains.append(
            Chain(
                f"chain-{name}",
                (hop,),
                scenario.slots,
                round(service),
                lines=lines,
                cache_tokens=worker.cache_tokens,
            )
        )
        caches.append(CacheCapacity(AgentId(name), part, scenario.slots))
    served = ModelPlan(MODEL, NEVER, (), chains=tuple(chains), caches=tuple(caches))
    return Plan(PlanId("simulated"), (served,))


def mean_facts(policy: str, rate: float, named: bool, runs: list[Facts]) -> Facts:
    """Returns the means of the figures of some seeds, with the names of the case."""
    figures = {
        key: None if None in values else statistics.fmean(values)
        for key in runs[0]
        for values in [[run[key] for run in runs]]
    }
    case = f"{rate:g}/s{', with objectives' if named else ''}"
    return {"case": case, "policy": policy, "rate_per_s": rate, "named": named, **figures}


def _row_of(rate: float, named: bool) -> str:
    return f"{rate:g}{' with objectives' if named else ''}"


def _value(facts: list[Facts], key: str, policy: str, rate: float, named: bool) -> float | None:
    (found,) = [
        fact[key]
        for fact in facts
        if (fact["policy"], fact["rate_per_s"], fact["named"]) == (policy, rate, named)
    ]
    return None if found is None else float(found)


def _table(scenario: Chats, facts: list[Facts], measure: Measure) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            _row_of(rate, named),
            *(
                measure.text(_value(facts, measure.key, policy, rate, named))
                for policy in scenario.policies
            ),
        )
        for named in scenario.named
        for rate in scenario.rates_per_s
    ]
    return Table(measure.caption, ("chats/s", *scenario.policies), tuple(rows))


def _panel(scenario: Chats, facts: list[Facts], measure: Measure, named: bool) -> Panel:
    series: dict[str, tuple[tuple[float, float], ...]] = {
        policy: tuple(
            (rate, measure.scale * value)
            for rate in scenario.rates_per_s
            if (value := _value(facts, measure.key, policy, rate, named)) is not None
        )
        for policy in scenario.policies
    }
    title = "with objectives" if named else "without objectives"
    return Lines(title, "chats per second", measure.caption, series)


def _ns(milliseconds: float) -> int:
    return round(milliseconds * NANOSECONDS_PER_MILLISECOND)
