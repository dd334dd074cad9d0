"""The parts of scenarios of packing: GPUs, workloads, policies, limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from catenary_lab.packing.policies import PolicyName
from catenary_lab.scenarios.schema import Closed, Count, NotNegative, Positive

MeasureName = Literal[
    "gpus_mean",
    "gpus_peak",
    "utilisation",
    "migrations_per_s",
    "migrated_bytes_per_s",
    "preemptions_per_s",
    "transfers",
    "decisions",
]


class MachineSpec(Closed):
    """Bandwidth that moves may take beside the work (the paper's boundaries)."""

    gpus: Count = Field(description="GPUs in one machine, on one bus.")
    bus_gb_per_s: Positive = Field(description="Caches inside the machine.")
    link_gb_per_s: Positive = Field(description="Caches up, and as many down, its network link.")
    prefill_tokens_per_s: NotNegative = Field(
        description="Tokens of moved sessions that one GPU can read again."
    )


class GpuSpec(Closed):
    """A kind of GPU with a model on it."""

    cache_tokens: Annotated[int, Field(ge=16)] = Field(description="Capacity C.")
    token_bytes: Count = Field(description="Cache of one token.")
    token_ms: Positive = Field(25.0, description="Time of a decode step, whatever the batch.")
    machine: MachineSpec | None = Field(
        None, description="Boundaries to divide moves by; empty: moves are only counted."
    )


class LognormalSpec(Closed):
    """A lognormal distribution of tokens."""

    mean: Positive = Field(description="Tokens.")
    sigma: NotNegative = Field(1.0, description="Standard deviation of the logarithm.")


class TraceSpec(Closed):
    """Requests of a recorded trace, at their own moments."""

    file: str = Field(
        description="CSV with t, l_in and l_out; looked up below CATENARY_DATA, then tests/data."
    )
    every: Count = Field(1, description="Only every so manieth request.")
    scale: Count = Field(1, description="Lengths are multiplied by it.")
    first: int = Field(0, ge=0, description="Requests to skip, for the first seed.")
    stride: int = Field(0, ge=0, description="Requests that each further seed skips more.")


class StepSpec(Closed):
    """A stretch of time with one rate of arrivals."""

    factor: NotNegative = Field(description="Times `rate_per_s`.")
    seconds: Positive = Field(
        description="Length of the stretch; the warm-up is part of the first ones."
    )


class WorkloadSpec(Closed):
    """The requests that the GPUs are given."""

    label: str = Field(min_length=1, description="Name in tables and plots.")
    prompt: LognormalSpec | None = Field(None, description="Without a trace.")
    answer: LognormalSpec | None = Field(None, description="Without a trace.")
    arrivals: str = Field("poisson", description="poisson, gamma:CV, onoff:ON_S:OFF_S or a file.")
    rate_per_s: Positive | None = Field(None, description="Mean rate, without a trace.")
    steps: tuple[StepSpec, ...] = Field((), description="The rate over time; empty: it stays.")
    trace: TraceSpec | None = Field(None, description="Instead of drawn requests.")
    oversize: Literal["refuse", "cut"] = Field(
        "refuse", description="What becomes of requests that no GPU could hold to their end."
    )

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSpec:
        drawn = (self.prompt, self.answer, self.rate_per_s)
        if self.trace is None and None in drawn:
            raise ValueError("give either a trace, or prompt, answer and rate_per_s")
        if self.trace is not None and (drawn != (None, None, None) or self.steps):
            raise ValueError("a trace has its own lengths and moments")
        return self


class PolicySpec(Closed):
    """A policy that decides where sessions live."""

    label: str = Field(min_length=1, description="Name in tables and plots.")
    policy: PolicyName = Field(description="Mell in one of its forms, or a rival.")
    reserve: bool = Field(
        False,
        description="Sessions count with their final length from the start (best, worst fit).",
    )

    @model_validator(mode="after")
    def _can_reserve(self) -> PolicySpec:
        if self.reserve and self.policy not in ("best-fit", "worst-fit"):
            raise ValueError("only best-fit and worst-fit reserve")
        return self


class LimitSpec(Closed):
    """A limit on a figure, which holds for the mean of the seeds."""

    measure: Literal["gpus_mean", "migrations_per_s"] = Field(description="Which figure.")
    workloads: list[str] = Field(min_length=1, description="Labels; each has to reach it.")
    beside: str = Field(description="Label of the policy that is compared with.")
    at_most: Positive = Field(description="Most share of that policy's figure.")
