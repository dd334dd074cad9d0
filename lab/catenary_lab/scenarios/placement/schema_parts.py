"""The parts of scenarios of placement: workers, engines, lengths, policies."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from catenary_lab.scenarios.schema import Closed, Count, NotNegative, Positive

PolicyName = Literal["slo", "jsq", "power-of-two", "least-loaded"]
ScalingName = Literal["fixed", "scaled"]
_GIGA = 1e9


class WorkerSpec(Closed):
    """A worker: one replica of the model on some GPUs, by its latency lines (eq. 1-3)."""

    gpus: Count = Field(1, description="GPUs of one worker, N_g.")
    prefill_token_ms: NotNegative = Field(description="k1.")
    prefill_ms: NotNegative = Field(description="c1.")
    decode_context_token_ms: NotNegative = Field(description="k2.")
    decode_session_ms: NotNegative = Field(description="c2.")
    decode_ms: NotNegative = Field(description="c3.")
    decode_lone_ms: NotNegative = Field(0.0, description="t1; 0: as the line says.")
    gpu_memory_gb: Positive = Field(description="Memory of one GPU, m_gpu.")
    weights_gb: NotNegative = Field(description="Weights of the whole model, m_model.")
    token_bytes: Positive = Field(description="Cache of one token, h.")
    memory_kept_back: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the memory that is neither weights nor cache."
    )

    @property
    def cache_tokens(self) -> float:
        """M in tokens: N_g m_gpu - m_model."""
        memory_gb = self.gpus * self.gpu_memory_gb * (1 - self.memory_kept_back)
        return (memory_gb - self.weights_gb) * _GIGA / self.token_bytes

    @model_validator(mode="after")
    def _has_room(self) -> WorkerSpec:
        if self.cache_tokens < 1:
            raise ValueError("the weights leave no memory for a cache")
        if self.decode_session_ms + self.decode_ms <= 0:
            raise ValueError("a decode step must take time: decode_session_ms or decode_ms")
        return self


class EngineSpec(Closed):
    """An engine: the way in which a worker runs prompts."""

    label: str = Field(min_length=1, description="Name in tables and plots.")
    chunk_tokens: int = Field(
        0, ge=0, description="Prompt tokens beside every decode step; 0: whole prompts, first."
    )
    decode_only: bool = Field(
        False, description="Prompts are run elsewhere (split phase); only ATGT counts."
    )


class ObjectivesSpec(Closed):
    """The latency objectives that requests are held to."""

    ttft_ms: Positive = Field(description="T_pre: most time to the first token.")
    atgt_ms: Positive = Field(description="T_dec: most mean time per token after the first.")


class DrawnLengths(Closed):
    """A lognormal distribution."""

    median: Positive = Field(description="Tokens.")
    sigma: NotNegative = Field(description="Standard deviation of the logarithm.")

    @property
    def mean(self) -> float:
        """Mean of the distribution in tokens, before long lengths are cut."""
        return self.median * math.exp(self.sigma**2 / 2)


class LengthsSpec(Closed):
    """Lengths of prompts and answers: every other one is learned from, the rest is served."""

    file: str | None = Field(
        None,
        description="CSV with l_in and l_out (a trace: and t); looked up below CATENARY_DATA, then "
        "tests/data.",
    )
    prompt: DrawnLengths | None = Field(None, description="Without a file.")
    answer: DrawnLengths | None = Field(None, description="Without a file.")
    count: Count = Field(4000, description="Without a file: how many lengths there are.")
    context_tokens: Count = Field(4096, description="Longer ones are left out.")
    answer_limit: Count = Field(2048, description="Most tokens a request asks for.")

    @model_validator(mode="after")
    def _one_source(self) -> LengthsSpec:
        drawn = self.prompt is not None and self.answer is not None
        if drawn == (self.file is not None) or (self.prompt is None) != (self.answer is None):
            raise ValueError("give either a file, or prompt and answer")
        return self


class NewsSpec(Closed):
    """Delays of messages between scheduler, gateways and workers."""

    start_ms: NotNegative = Field(1.0, description="From the decision to the worker.")
    notice_ms: NotNegative = Field(1.0, description="From gateway or worker to the scheduler.")
    report_every_ms: Positive = Field(100.0, description="Gateways report progress so often.")


class PolicySpec(Closed):
    """A policy that places sessions, and its kind of workers."""

    label: str = Field(min_length=1, description="Name in tables and plots.")
    policy: PolicyName = Field(
        description="slo: the default of a deployment with objectives. jsq: fewest sessions. "
        "power-of-two: fewer sessions of two random workers. least-loaded: fewest tokens."
    )
    workers: str = Field(description="One of `workers`.")
    most_workers: Count | None = Field(
        None, description="Where a search gives up, if that is earlier than for the others."
    )


class ClusterSpec(Closed):
    """A cluster to compare: its rule of scaling and its cold starts."""

    label: str = Field(min_length=1, description="Name in tables and plots.")
    scaling: ScalingName = Field(description="fixed: for the highest rate, from the start.")
    cold_start_s: NotNegative = Field(30.0, description="From the order to a worker that serves.")


class ChatsSpec(Closed):
    """Conversations: a head that many share, and turns that follow each other."""

    heads: Count = Field(description="Different heads, all equally frequent.")
    head_tokens: Count = Field(description="Tokens of each.")
    turns: Annotated[float, Field(ge=1)] = Field(description="Mean of a geometric distribution.")
    pause_s: Positive = Field(description="Mean pause between turns, beside the least one.")
    least_pause_s: NotNegative = Field(description="From one turn to the next at least.")


class ChatPolicySpec(Closed):
    """A policy that places turns of conversations."""

    label: str = Field(min_length=1, description="Name in tables.")
    policy: Literal["least-time", "slo"] = Field(description="least-time: a deployment's default.")
    told: bool = Field(True, description="The scheduler hears how prompts begin.")
    objectives: ObjectivesSpec | None = Field(None, description="Of all requests, if any.")
