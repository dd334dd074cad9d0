"""The load of live placement: requests for answers, from a process of their own.

A request names no objectives: those of the model hold. The gateway says at the end of a request
what was predicted, measured and met; that all its tokens came is checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import catenary
from catenary_lab.live.generator import problem_of

_TIMEOUT_S = 120.0
"""Longest duration of each request, in seconds."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to be sent."""

    due_s: float
    """Time at which it is due, in seconds from the start."""
    step: int
    """Step of the load that it belongs to."""
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of one request; times in milliseconds, 0: none."""

    step: int
    due_s: float
    problem: str
    """Reason why it does not have all its tokens; empty if it has."""
    first_token_ms: float = 0.0
    """Time to the first token as the gateway measured it; so are the next figures."""
    per_token_ms: float = 0.0
    predicted_first_token_ms: float = 0.0
    predicted_per_token_ms: float = 0.0
    met_first_token: bool = False
    met_per_token: bool = False
    held: bool = False
    """Whether the scheduler held the request to the model's objectives."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The requests of a load."""

    model: str
    most_ns: tuple[int, int]
    """Objectives of the model, which requests do not name: most nanoseconds to the first token and
    per further one. (The compiled `TokenObjectives` cannot be pickled.)"""
    asked: Sequence[Asked]
    prompts: Sequence[Sequence[int]]
    """Tokens of each request's prompt."""

    async def send(self, client: catenary.AsyncClient, number: int, _due: float) -> Answered:
        """Returns the outcome of a request."""
        asked = self.asked[number]
        stream = client.generate(
            self.model,
            self.prompts[number],
            stream=True,
            max_tokens=asked.answer_tokens,
            ignore_eos=True,
            timeout_s=_TIMEOUT_S,
        )
        problem = await problem_of(stream, asked.answer_tokens)
        report = stream.so_far.objectives
        if report is None:
            return Answered(asked.step, asked.due_s, problem or "no report")
        first_ns = report.time_to_first_token_ns
        each_ns = report.time_per_output_token_ns
        most_first_ns, most_each_ns = self.most_ns
        return Answered(
            asked.step,
            asked.due_s,
            problem,
            first_ns / 1e6,
            each_ns / 1e6,
            report.predicted_time_to_first_token_ns / 1e6,
            report.predicted_time_per_output_token_ns / 1e6,
            not most_first_ns or 0 < first_ns <= most_first_ns,
            not most_each_ns or each_ns <= most_each_ns,
            (report.time_to_first_token_slo_ns, report.time_per_output_token_slo_ns)
            == (most_first_ns, most_each_ns),
        )
