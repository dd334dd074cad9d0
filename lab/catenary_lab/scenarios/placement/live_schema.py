"""Scenario files of placement on real processes; see `schema` for the others."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from catenary_lab.scenarios.placement.schema_parts import DrawnLengths
from catenary_lab.scenarios.schema import (
    Annotatable,
    Closed,
    Count,
    Fraction,
    NotNegative,
    Positive,
)


class StepSpec(Closed):
    """A stretch of time with one rate of Poisson arrivals."""

    load: NotNegative = Field(
        description="In workers' worth: 1 is what one worker sustains within the objectives."
    )
    seconds: Positive = Field(description="Length of the stretch.")


class LiveSteps(Annotatable):
    """A real language model on real agents under a load in steps; only with --live."""

    kind: Literal["live"]
    model: str = Field("smollm2-135m-int8", description="A demo model that generates text.")
    most_agents: Count = Field(2, description="Agents that may be started; one is always there.")
    prompt: DrawnLengths = Field(description="Tokens of prompts.")
    answer: DrawnLengths = Field(description="Tokens of answers.")
    session_tokens: Count = Field(512, description="Most tokens of a session.")
    max_batch: Count = Field(16, description="Most sessions of an agent at a time.")
    per_token_factor: Positive = Field(
        2.0, description="T_dec: so many times a step of a lone session, as measured at the start."
    )
    first_token_factor: Positive = Field(
        1.0, description="T_pre: so many times a prompt of `session_tokens`, as measured."
    )
    theta: Fraction = Field(0.8, description="Share of T_dec that a load of 1 uses.")
    steps: list[StepSpec] = Field(min_length=1, description="The load over time.")
    settle_s: NotNegative = Field(60.0, description="Longest wait for the last agent to go.")
    seed: int = Field(1, ge=0, description="Decides arrivals and lengths.")
    scheduler: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the scheduler beyond the usual."
    )
