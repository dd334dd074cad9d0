"""Turns a scenario's keys into the simulator's input: a job for each run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from catenary_lab.packing.policies import PolicyChoice
from catenary_lab.scenarios.data import data_file
from catenary_lab.scenarios.packing.schema import Serving, Simulated
from catenary_lab.scenarios.packing.schema_parts import GpuSpec, PolicySpec, WorkloadSpec
from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import parse_arrivals
from catenary_simulator.packing.result import PackingResult
from catenary_simulator.packing.serve import GpuKind, PackingRun, serve_packing
from catenary_simulator.packing.transfers import TransferNetwork
from catenary_simulator.packing.workload import (
    LognormalLengths,
    RateStep,
    drawn_sessions,
    traced_sessions,
)
from catenary_simulator.placement.workload import LengthPopulation, RequestWorkload, read_lengths

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class PackingJob:
    """All settings that decide a run, so that equal runs are done once."""

    gpu: GpuSpec
    workload: WorkloadSpec
    data: Path | None
    """File that the workload's trace names; None without one."""
    policy: PolicySpec
    seed: int
    """Seed that decides drawn requests."""
    skip: int
    """Number of requests of a trace to skip."""
    warm_up_s: float
    duration_s: float
    epoch_s: float
    most_gpus: int | None
    patience_s: float | None
    timed: bool
    """Whether to time every epoch's decision."""

    def run(self) -> PackingResult:
        gpu, policy = self.gpu, self.policy
        chosen = PolicyChoice(policy.policy, policy.reserve)
        run = PackingRun(
            GpuKind(gpu.cache_tokens, gpu.token_bytes, gpu.token_ms),
            chosen,
            self.warm_up_s,
            self.duration_s,
            self.epoch_s,
            self.most_gpus,
            self.patience_s,
            self.workload.oversize == "cut",
            self._network(),
            time.perf_counter_ns if self.timed else None,
        )
        return serve_packing(run, self.sessions())

    def sessions(self) -> RequestWorkload:
        """Returns the requests.

        Raises:
            InvalidInput: The trace is too short.
        """
        spec, lasts_s = self.workload, self.warm_up_s + self.duration_s
        if spec.trace is not None:
            assert self.data is not None
            trace = spec.trace
            return traced_sessions(
                _lengths(self.data), lasts_s, every=trace.every, scale=trace.scale, first=self.skip
            )
        # The schema makes sure that these are there.
        assert spec.prompt is not None
        assert spec.answer is not None
        assert spec.rate_per_s is not None
        steps = tuple(RateStep(spec.rate_per_s * each.factor, each.seconds) for each in spec.steps)
        return drawn_sessions(
            LognormalLengths(spec.prompt.mean, spec.prompt.sigma),
            LognormalLengths(spec.answer.mean, spec.answer.sigma),
            parse_arrivals(spec.arrivals),
            steps or (RateStep(spec.rate_per_s, lasts_s),),
            self.seed,
        )

    def _network(self) -> TransferNetwork | None:
        machine = self.gpu.machine
        if machine is None:
            return None
        return TransferNetwork(
            machine.gpus,
            round(machine.bus_gb_per_s * _GIGA * self.epoch_s),
            round(machine.link_gb_per_s * _GIGA * self.epoch_s),
            round(machine.prefill_tokens_per_s * self.epoch_s),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A job with its names."""

    gpu: str
    workload: str
    policy: str
    seed: int
    job: PackingJob

    @property
    def case(self) -> str:
        """Name of the case, for tables."""
        return case_of(self.gpu, self.workload)


def case_of(gpu: str, workload: str) -> str:
    """Returns the name of a row of tables."""
    return f"{gpu}, {workload}"


def cases_of(scenario: Simulated) -> list[str]:
    """Returns the rows of tables, in order."""
    return [case_of(gpu, each.label) for gpu in scenario.gpus for each in scenario.workloads]


def rows_of(scenario: Simulated, *, timed: bool = False) -> list[Row]:
    """Returns every run of a scenario.

    Args:
        scenario: The scenario, validated.
        timed: Whether to time every epoch's decision.

    Raises:
        InvalidInput: The file of a trace is not there, or a process of arrivals does not exist.
    """
    data = {each.label: _file(number, each) for number, each in enumerate(scenario.workloads)}
    return [
        Row(
            name,
            workload.label,
            policy.label,
            seed,
            PackingJob(
                gpu,
                workload,
                data[workload.label],
                policy,
                *_beginning(workload, number, seed),
                scenario.warm_up_s,
                scenario.duration_s,
                scenario.epoch_s,
                scenario.most_gpus[name] if isinstance(scenario, Serving) else None,
                scenario.patience_s if isinstance(scenario, Serving) else None,
                timed,
            ),
        )
        for name, gpu in scenario.gpus.items()
        for workload in scenario.workloads
        for number, seed in enumerate(scenario.seeds)
        for policy in scenario.policies
    ]


def jobs_of(scenario: Simulated, *, timed: bool = False) -> list[PackingJob]:
    """Returns the jobs of all runs.

    Raises:
        InvalidInput: As in `rows_of`, or a trace is too short.
    """
    jobs = [row.job for row in rows_of(scenario, timed=timed)]
    for job in dict.fromkeys(jobs):
        if job.data is not None:
            job.sessions()
    return jobs


def _beginning(workload: WorkloadSpec, number: int, seed: int) -> tuple[int, int]:
    """Returns the seed and the requests to skip; runs on a trace differ by where they start."""
    trace = workload.trace
    return (seed, 0) if trace is None else (0, trace.first + number * trace.stride)


def _file(number: int, workload: WorkloadSpec) -> Path | None:
    """Returns the file of a workload's trace, and checks its arrivals before anything is run."""
    if workload.trace is not None:
        return data_file(workload.trace.file, f"workloads.{number}.trace.file")
    try:
        parse_arrivals(workload.arrivals)
    except InvalidInput as error:
        raise InvalidInput(
            f"workloads.{number}.{error.field}", str(error).partition(": ")[2]
        ) from None
    return None


@lru_cache(maxsize=4)
def _lengths(path: Path) -> LengthPopulation:
    return read_lengths(path)
