"""The load generator of live placement: a process of its own, open loop, through the SDK.

A request names no objectives: those of the model hold. The gateway says at the end of a request
what was predicted, measured and met; that all its tokens came is checked here.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import catenary
from catenary_lab.live.generator import generate_load, run_generator, send_all


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
class StepsOrder:
    """The order of a load: the requests to send, and where to."""

    target: str
    model: str
    vocabulary: int
    """Size of the vocabulary: prompts are tokens `[1, vocabulary)` at random."""
    first_token_ms: float
    """Objectives of the model, which requests do not name; 0: none."""
    per_token_ms: float
    timeout_s: float
    """Longest duration of each request, in seconds."""
    seed: int
    requests: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of one request; times in milliseconds, 0: none."""

    step: int
    due_s: float
    tokens: int
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
class StepsOutcome:
    """The outcome of all requests, in the order they were sent."""

    requests: tuple[Answered, ...]
    send_lag_p99_s: float
    """Delay of sending by the generator itself, 99th percentile."""


async def run_load(order: StepsOrder, folder: Path) -> StepsOutcome:
    """Returns the outcome of a load made by a process of its own.

    Raises:
        Unavailable: The process did not end well.
    """
    document = await generate_load("catenary_lab.live.placement.load", asdict(order), folder)
    requests = tuple(Answered(**entry) for entry in document["requests"])
    return StepsOutcome(requests, document["send_lag_p99_s"])


class _Generator:
    def __init__(self, client: catenary.AsyncClient, order: StepsOrder) -> None:
        self._client = client
        self._order = order
        chosen = random.Random(order.seed)
        self._prompts = [
            chosen.choices(range(1, order.vocabulary), k=asked.prompt_tokens)
            for asked in order.requests
        ]

    async def run(self) -> StepsOutcome:
        moments = [each.due_s for each in self._order.requests]
        answered, lag_s = await send_all(moments, self._call)
        return StepsOutcome(tuple(answered), lag_s)

    async def _call(self, number: int, _due: float) -> Answered:
        asked, prompt = self._order.requests[number], self._prompts[number]
        stream = self._client.generate(
            self._order.model,
            prompt,
            stream=True,
            max_tokens=asked.answer_tokens,
            ignore_eos=True,
            timeout_s=self._order.timeout_s,
        )
        problem = ""
        try:
            async for _ in stream:
                pass
        except catenary.CatenaryError as error:
            problem = f"{error.reason}: {error}"
        tokens = len(stream.so_far.token_ids)
        if not problem and tokens != asked.answer_tokens:
            problem = f"{tokens} of {asked.answer_tokens} tokens"
        report = stream.so_far.objectives
        if report is None:
            return Answered(asked.step, asked.due_s, tokens, problem or "no report")
        return _answered(self._order, asked, tokens, problem, report)


def _answered(
    order: StepsOrder, asked: Asked, tokens: int, problem: str, report: catenary.ObjectivesReport
) -> Answered:
    first_ms = report.time_to_first_token_ns / 1e6
    each_ms = report.time_per_output_token_ns / 1e6
    wanted = (order.first_token_ms, order.per_token_ms)
    held_to = (report.time_to_first_token_slo_ns / 1e6, report.time_per_output_token_slo_ns / 1e6)
    return Answered(
        asked.step,
        asked.due_s,
        tokens,
        problem,
        first_ms,
        each_ms,
        report.predicted_time_to_first_token_ns / 1e6,
        report.predicted_time_per_output_token_ns / 1e6,
        not wanted[0] or 0 < first_ms <= wanted[0],
        not wanted[1] or each_ms <= wanted[1],
        held_to == wanted,
    )


async def _generate(document: dict[str, Any]) -> StepsOutcome:
    requests = tuple(Asked(**entry) for entry in document.pop("requests"))
    order = StepsOrder(requests=requests, **document)
    async with catenary.AsyncClient(order.target) as client:
        await client.ready()  # the connection is open before the first request is due
        return await _Generator(client, order).run()


if __name__ == "__main__":
    run_generator(_generate)
