"""Turns a scenario's keys into the simulator's input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from catenary_lab.scenarios.data import data_file
from catenary_lab.scenarios.placement.schema import Simulated
from catenary_lab.scenarios.placement.schema_parts import (
    EngineSpec,
    LengthsSpec,
    NewsSpec,
    ObjectivesSpec,
    PolicyName,
    WorkerSpec,
)
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import parse_arrivals
from catenary_simulator.placement.loop import ReportDelays
from catenary_simulator.placement.serve import WorkerKind
from catenary_simulator.placement.workload import (
    LengthPopulation,
    RequestWorkload,
    drawn_workload,
    lognormal_lengths,
    read_lengths,
    replayed_workload,
)

_LENGTHS_SEED = 7
"""Seed of the population of lognormal lengths, from which the requests of a run are drawn."""


@dataclass(frozen=True, slots=True)
class Case:
    """All settings that decide a run, except the number of workers."""

    worker: WorkerSpec
    engine: EngineSpec
    objectives: ObjectivesSpec
    lengths: LengthsSpec
    data: Path | None
    """File that `lengths` names; None without one."""
    arrivals: str
    rate_per_s: float
    duration_s: float
    seed: int
    policy: PolicyName
    news: NewsSpec

    @property
    def kind(self) -> WorkerKind:
        """Kind of all workers."""
        worker, engine = self.worker, self.engine
        lines = lines_of(worker, engine.chunk_tokens)
        if not engine.decode_only:
            return WorkerKind(lines, worker.cache_tokens)
        # Prompts hold nothing up here; only preempted sessions run theirs again.
        believed = replace(lines, prefill_token_ns=0.0, prefill_ns=0.0)
        return WorkerKind(lines, worker.cache_tokens, True, believed)

    @property
    def held_to(self) -> TokenObjectives:
        """Objectives of requests; in the split phase TTFT is left to the prompt workers."""
        ttft_ms = 0.0 if self.engine.decode_only else self.objectives.ttft_ms
        return TokenObjectives(nanoseconds(ttft_ms), nanoseconds(self.objectives.atgt_ms))

    @property
    def delays(self) -> ReportDelays:
        """Delays of messages; policies that only look at sessions need no progress reports."""
        news = self.news
        told = self.policy in ("slo", "least-loaded")
        return ReportDelays(
            nanoseconds(news.start_ms),
            nanoseconds(news.notice_ms),
            nanoseconds(news.report_every_ms) if told else 0,
            self.lengths.answer_limit,
        )

    @property
    def halves(self) -> tuple[LengthPopulation, LengthPopulation]:
        """The lengths to learn from, and those to serve."""
        return halves_of(self.lengths, self.data)

    def workload(self) -> RequestWorkload:
        """Returns the requests."""
        served = self.halves[1]
        if self.arrivals == "trace":
            return replayed_workload(served, self.rate_per_s, self.duration_s, self.seed)
        process = parse_arrivals(self.arrivals)
        return drawn_workload(served, process, self.rate_per_s, self.duration_s, self.seed)


@dataclass(frozen=True, slots=True)
class Row:
    """A case with its names."""

    policy: str
    """Label of the policy."""
    engine: str
    rate_per_s: float
    seed: int
    case: Case

    @property
    def named(self) -> dict[str, Any]:
        """The names of the case, for facts."""
        return {
            "policy": self.policy,
            "case": f"{self.engine}, {self.rate_per_s:g}/s, seed {self.seed}",
            "engine": self.engine,
            "rate_per_s": self.rate_per_s,
            "seed": self.seed,
        }


def rows_of(scenario: Simulated) -> list[Row]:
    """Returns every case of a scenario.

    Raises:
        InvalidInput: The file of lengths is not there.
    """
    file = scenario.lengths.file
    data = None if file is None else data_file(file, "lengths.file")
    return [
        Row(
            policy.label,
            engine.label,
            rate,
            seed,
            Case(
                scenario.workers[policy.workers],
                engine,
                scenario.objectives,
                scenario.lengths,
                data,
                scenario.arrivals,
                rate,
                scenario.duration_s,
                seed,
                policy.policy,
                scenario.news,
            ),
        )
        for engine in scenario.engines
        for rate in scenario.rates_per_s
        for seed in scenario.seeds
        for policy in scenario.policies
    ]


def lines_of(worker: WorkerSpec, chunk_tokens: int) -> LatencyLines:
    """Returns the latency lines of a worker, whose engine may run prompts in chunks."""
    return LatencyLines(
        worker.prefill_token_ms * NANOSECONDS_PER_MILLISECOND,
        worker.prefill_ms * NANOSECONDS_PER_MILLISECOND,
        worker.decode_context_token_ms * NANOSECONDS_PER_MILLISECOND,
        worker.decode_session_ms * NANOSECONDS_PER_MILLISECOND,
        worker.decode_ms * NANOSECONDS_PER_MILLISECOND,
        worker.decode_lone_ms * NANOSECONDS_PER_MILLISECOND,
        prefill_chunk_tokens=chunk_tokens,
    )


@lru_cache(maxsize=8)
def halves_of(spec: LengthsSpec, data: Path | None) -> tuple[LengthPopulation, LengthPopulation]:
    """Returns the lengths to learn from, and those to serve."""
    if data is not None:
        lengths = read_lengths(data)
    else:
        assert spec.prompt is not None  # the schema makes sure of it
        assert spec.answer is not None
        prompt = (spec.prompt.median, spec.prompt.sigma)
        answer = (spec.answer.median, spec.answer.sigma)
        lengths = lognormal_lengths(prompt, answer, spec.count, _LENGTHS_SEED)
    lengths = lengths.within(spec.context_tokens)
    if len(lengths.prompts) < 2:
        raise InvalidInput("lengths.context_tokens", "leaves fewer than two lengths")
    return lengths.halves()


def nanoseconds(milliseconds: float) -> int:
    """Returns milliseconds as nanoseconds."""
    return round(milliseconds * NANOSECONDS_PER_MILLISECOND)
