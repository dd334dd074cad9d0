"""Conversations that begin alike: hits, load and first tokens, with and without being told."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from catenary_lab.scenarios.data import data_file
from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.placement.schema import SharedBeginnings
from catenary_lab.scenarios.placement.schema_parts import ChatPolicySpec
from catenary_lab.scenarios.placement.settings import halves_of, lines_of, nanoseconds
from catenary_lab.scenarios.report import Cell, Findings, Measure, Table
from catenary_services.domain.latency import TokenObjectives
from catenary_simulator.arrivals import parse_arrivals
from catenary_simulator.placement.chats import Chats, chat_workload
from catenary_simulator.placement.loop import ReportDelays
from catenary_simulator.placement.serve import PlacementRun, WorkerKind, serve_placement

MEASURES = (
    Measure("hits", "hits, of those possible (%)", 100.0),
    Measure("busiest", "busiest worker over the mean", digits=2),
    Measure("first_token_ms", "mean time to the first token (ms)"),
    Measure("first_token_p99_ms", "P99 of it (ms)"),
    Measure("per_token_ms", "mean time per token after it (ms)"),
)


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """Hits, times and balance of one policy at one rate of conversations."""

    requests: int
    hits: float
    """Tokens of prompts that were not computed, over those that requests before had."""
    possible: float
    """These over all tokens of prompts."""
    busiest: float
    first_token_ms: float
    first_token_p99_ms: float
    per_token_ms: float


@dataclass(frozen=True)
class ChatJob:
    """Serves conversations at one rate, by one policy."""

    scenario: str
    """The scenario as JSON, so that equal jobs are equal."""
    data: Path | None
    policy: int
    rate_per_s: float
    seed: int

    def run(self) -> ChatFigures:
        scenario = SharedBeginnings.model_validate_json(self.scenario)
        policy, shape = scenario.policies[self.policy], scenario.chats
        learned, served = halves_of(scenario.lengths, self.data)
        chats = Chats(
            shape.heads,
            shape.head_tokens,
            shape.turns,
            shape.pause_s,
            shape.least_pause_s,
            scenario.lengths.context_tokens,
        )
        arrivals, rate, seconds = scenario.arrivals, self.rate_per_s, scenario.duration_s
        workload = chat_workload(chats, served, parse_arrivals(arrivals), rate, seconds, self.seed)
        news = scenario.news
        lines = lines_of(scenario.worker, scenario.chunk_tokens)
        run = PlacementRun(
            WorkerKind(lines, scenario.worker.cache_tokens),
            scenario.workers,
            policy.policy,
            TokenObjectives()
            if policy.objectives is None
            else TokenObjectives(
                nanoseconds(policy.objectives.ttft_ms), nanoseconds(policy.objectives.atgt_ms)
            ),
            learned,
            ReportDelays(
                nanoseconds(news.start_ms),
                nanoseconds(news.notice_ms),
                nanoseconds(news.report_every_ms),
                scenario.lengths.answer_limit,
            ),
            tells_beginnings=policy.told,
        )
        result = serve_placement(run, workload)
        return ChatFigures(
            result.requests,
            result.reused_tokens / max(1, result.shared_tokens),
            result.shared_tokens / max(1, sum(workload.prompts)),
            result.busiest,
            float(np.mean(result.first_token_ms)),
            float(np.percentile(result.first_token_ms, 99)),
            float(np.mean(result.per_token_ms)),
        )


def jobs(scenario: SharedBeginnings) -> Iterator[ChatJob]:
    """Yields a run for each policy, rate and seed."""
    for job, _ in _runs(scenario):
        yield job


def report(scenario: SharedBeginnings, results: Results) -> Findings:
    """Returns a table per measure, and facts."""
    facts: list[dict[str, Any]] = [
        {
            "policy": policy.label,
            "rate_per_s": job.rate_per_s,
            "seed": job.seed,
            **asdict(results[job]),
        }
        for job, policy in _runs(scenario)
    ]
    share = statistics.fmean(fact["possible"] for fact in facts)
    notes = (
        f"{scenario.workers} workers; conversations begin for {scenario.duration_s:g} s; "
        f"{100 * share:.0f} % of all prompt tokens were in texts before.",
    )
    tables = tuple(_table(scenario, facts, measure) for measure in MEASURES)
    return Findings(tables, (), notes, {"policies": facts})


def _runs(scenario: SharedBeginnings) -> Iterator[tuple[ChatJob, ChatPolicySpec]]:
    file = scenario.lengths.file
    data = data_file(file, "lengths.file") if file is not None else None
    document = scenario.model_dump_json()
    for rate in scenario.rates_per_s:
        for seed in scenario.seeds:
            for index, policy in enumerate(scenario.policies):
                yield ChatJob(document, data, index, rate, seed), policy


def _table(scenario: SharedBeginnings, facts: list[dict[str, Any]], measure: Measure) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for rate in scenario.rates_per_s:
        means = [
            statistics.fmean(
                fact[measure.key]
                for fact in facts
                if fact["rate_per_s"] == rate and fact["policy"] == policy.label
            )
            for policy in scenario.policies
        ]
        rows.append((f"{rate:g}", *map(measure.text, means)))
    header = ("req/s", *(policy.label for policy in scenario.policies))
    return Table(measure.caption, header, tuple(rows))
