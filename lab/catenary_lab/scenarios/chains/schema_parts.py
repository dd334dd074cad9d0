"""The parts of scenarios of server chains: models, servers, systems, workloads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from catenary_lab.scenarios.schema import (
    Closed,
    Count,
    Fraction,
    Load,
    NotNegative,
    Positive,
)

PolicyName = Literal["jffc", "jsq", "sa-jsq", "jiq", "sed"]
Tune = Literal["lower", "upper", "surrogate", "replay"]


class ModelSpec(Closed):
    """A decoder model."""

    name: str = Field(min_length=1, description="For the report.")
    blocks: Count = Field(description="Transformer blocks, L.")
    block_gb: Positive = Field(description="Weights of one block, s_m.")
    cache_gb: Positive = Field(description="Cache of one session in one block, s_c.")
    hidden_size: Count = Field(4096, description="For PETALS' own arithmetic.")
    parameters_per_block: Count = Field(10**8, description="For PETALS' own arithmetic.")
    attention_heads: Count = Field(1, description="For PETALS' own arithmetic.")
    kv_heads: Count = Field(1, description="For PETALS' own arithmetic.")
    gflop_per_token: NotNegative = Field(0.0, description="Work of one block.")
    overhead_ms: NotNegative = Field(1.0, description="Overhead of one block, per session.")
    input_tokens: Positive = Field(2000.0, description="Mean per session.")
    output_tokens: Positive = Field(20.0, description="Mean per session.")


class GpuSpec(Closed):
    """A kind of GPU."""

    memory_gb: Positive = Field(description="For weights and caches, M.")
    tflops: Positive = Field(1.0, description="For prefill.")
    bandwidth_gb_per_ms: Positive = Field(1.0, description="For decoding.")
    block_ms: Positive | None = Field(
        None,
        description="Time of a session of mean size in one block, tau_p; empty: overhead + "
        "gflop_per_token / tflops * inputs + block_gb / bandwidth * (outputs - 1).",
    )
    forward_rps: Positive = Field(1.0, description="Blocks per second, as PETALS measures.")
    network_rps: Positive = Field(1.0, description="Requests per second, as PETALS measures.")


class FixedServer(Closed):
    """A server that the scenario names."""

    name: str = Field(min_length=1, description="For reports and errors.")
    gpu: str = Field(description="One of `gpus`.")
    rtt_ms: NotNegative = Field(description="Round trip to the orchestrator.")


class RandomServers(Closed):
    """Servers at random anchors around a random orchestrator."""

    anchors: str = Field(
        "chain/ripe_anchors_eu.csv",
        description="Places; looked up below CATENARY_DATA, then tests/data.",
    )
    count: list[Count] = Field([20], min_length=1, description="Servers, J; one case each.")
    big: str = Field(description="The kind of GPU of the lucky ones, of `gpus`.")
    small: str = Field(description="The kind of GPU of the others, of `gpus`.")
    big_share: list[Fraction] = Field([0.2], min_length=1, description="eta; one case each.")
    topologies: Count = Field(5, description="Independent draws of every case.")
    seed: int = Field(1, ge=0, description="Decides all draws.")


class CommunicationSpec(Closed):
    """tau_c: what a session spends on the way to a server."""

    per: Literal["session", "token"] = Field(
        "token", description="Round trip and overhead once per session or per output token."
    )
    overhead_ms: NotNegative = Field(18.0, description="Serialisation, once per round trip.")


class System(Closed):
    """A system to compare: its placement, its chains and its routing."""

    label: str = Field(min_length=1, description="Name in tables and plots.")
    planner: Literal["catenary", "petals", "bprr"] = Field("catenary", description="Whose system.")
    policy: PolicyName = Field("jffc", description="Ours: how sessions are given to chains.")
    c: Count | Tune = Field(
        "lower",
        description="Ours: sessions at a time that every block has room for; or by which measure "
        "the best is chosen. replay: by simulating the workload itself.",
    )
    stop: Literal["rate", "all"] = Field(
        "all", description="Ours: place until the rate is reached (Algorithm 1) or everywhere."
    )
    target_load: Load = Field(0.7, description="Ours: rho_bar of stop: rate.")
    replay_first: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="c: replay: tune on as many requests of the trace from this one on, instead "
        "of those that are served.",
    )
    peak: Positive | None = Field(
        None, description="Ours: choose c for this rate per second instead of the workload's."
    )
    cache_gb: Positive | None = Field(
        None, description="Cache of one session in one block, if it is not the model's."
    )
    ends: Literal["true", "expected"] = Field(
        "true",
        description="Theirs: by which ends of sessions requests are routed. true: those that come; "
        "expected: those of sessions of mean size, as in the papers.",
    )


class LiveSpec(Closed):
    """Settings of a run on real processes, with an emulated agent for each server."""

    dilation: Positive = Field(1.0, description="So many times slower than what they emulate.")
    session_tokens: Count = Field(8192, description="Most tokens of a session.")
    shared_device: bool = Field(
        False,
        description="Sessions share an agent's device step by step, as real ones do; else each "
        "computes as if it were alone, as the paper assumes.",
    )


class LiveChatsSpec(Closed):
    """Settings of chats on real processes, with an emulated agent for each worker."""

    dilation: Positive = Field(1.0, description="So many times slower than what they emulate.")
    warm_up: Count = Field(
        20, description="Chats before the others, by whose answers the scheduler learns."
    )


class TraceSpec(Closed):
    """Requests of an Azure LLM inference trace."""

    file: str = Field(
        description="Looked up below CATENARY_DATA, then CATENARY_TRACES, then tests/data."
    )
    first: int = Field(0, ge=0, description="Requests to skip.")
    speed: Positive = Field(1.0, description="How many times as fast its moments come.")


class WorkloadSpec(Closed):
    """The requests that the servers are given."""

    label: str = Field("", description="Name in tables.")
    requests: Count = Field(description="Of one run.")
    arrivals: str = Field(
        "poisson",
        description="poisson, gamma:CV, onoff:ON_S:OFF_S, or trace: the moments of `trace`.",
    )
    rate_per_s: Positive | None = Field(
        None, description="Mean rate; of a trace: the rate to plan for, empty: its own mean."
    )
    trace: TraceSpec | None = Field(
        None, description="Tokens of each request; empty: exponential sizes with mean 1."
    )
    compute_factor: Positive = Field(1.0, description="Multiplies all computation times.")

    @model_validator(mode="after")
    def _consistent(self) -> WorkloadSpec:
        if self.arrivals == "trace" and self.trace is None:
            raise ValueError("arrivals: trace needs a trace")
        if self.arrivals != "trace" and self.rate_per_s is None:
            raise ValueError("rate_per_s is needed unless arrivals are those of a trace")
        return self
