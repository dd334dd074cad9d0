"""The options that a search compares, for models of both kinds, and what each would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from catenary_scheduler.planning.placement import ModelPlacement
from catenary_services.domain.ids import AgentId, ModelKey


class SearchOrder(StrEnum):
    """The quantity that decides once the objectives are met."""

    THROUGHPUT = "throughput"
    FEWEST_GPUS = "gpus"


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """The service that a model gets at the load that was asked for, and at most.

    Attributes:
        sessions: Sessions at a time that caches hold; 0 for a model that does not generate text.
        rate_per_s: Sessions, or requests, per second that are sustained within the objectives.
        tokens_per_s: Tokens per second at that rate; 0 for a model that does not generate text, as
            for the next two.
        first_token_ns: Mean time to the first token at the load asked for, or at the sustained rate
            if that is less.
        per_token_ns: Mean time of each further token, likewise.
        response_ns: Mean time of a whole session, likewise; or the time of a full batch that never
            waits, of the slowest pipeline.
        attainment: Share of the load that is served within the objectives.
        gpus: Number of agents that it takes.
        survives: True if it is served within the objectives whichever single agent is lost.
        limit: What keeps it from sustaining more; empty if nobody knows.
    """

    sessions: int
    rate_per_s: float
    tokens_per_s: float
    first_token_ns: float
    per_token_ns: float
    response_ns: float
    attainment: float
    gpus: int
    survives: bool
    limit: str


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One way to serve a model, and what became of it in a search."""

    name: str
    placement: ModelPlacement | None
    """None if the agents cannot serve the model in this way."""
    figures: ServingFigures | None
    """None while nothing is measured, or without a placement."""
    why_not: str = ""
    """Reason in words why another one was taken; empty for the one that was."""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Outcome of a search for one model on given agents."""

    model: ModelKey
    options: tuple[PlanOption, ...]
    """All that were considered: the chosen one first, then the best ones first."""
    idle: Mapping[AgentId, str]
    """Reason for which an agent is idle in the chosen one."""
    notes: tuple[str, ...] = ()
    """Sentences for people: where the times come from, and the like."""
    groups: int = 1
    """Scheduler groups that the chosen one needs at the load; 0 if no number is enough."""
