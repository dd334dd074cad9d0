"""The load generator of live placement: a process of its own, open loop, through the SDK.

`python -m catenary_lab.live.placement.load ORDER ANSWER` sends the requests of the order file at
their moments, whatever became of those before, and writes what came of each. A request names no
objectives: those of the model hold. What was predicted, measured and met is what the gateway says
of it at its end; that all its tokens came is checked here.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import catenary
from catenary_lab.live.generator import generate_load
from catenary_lab.live.load import LEAD_S
from catenaryd.supervisor import end_with_parent


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    due_s: float
    """From the start."""
    step: int
    """Of the load it belongs to."""
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class StepsOrder:
    """What to send where."""

    target: str
    model: str
    vocabulary: int
    """Prompts are tokens `[1, vocabulary)` at random."""
    first_token_ms: float
    """Objectives of the model, which requests leave to it; 0: none."""
    per_token_ms: float
    timeout_s: float
    """Of each request."""
    seed: int
    requests: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of one request; times in milliseconds, 0: none."""

    step: int
    due_s: float
    tokens: int
    problem: str
    """Why it does not have all its tokens; empty if it has."""
    first_token_ms: float = 0.0
    """As the gateway measured it, as the next."""
    per_token_ms: float = 0.0
    predicted_first_token_ms: float = 0.0
    predicted_per_token_ms: float = 0.0
    met_first_token: bool = False
    met_per_token: bool = False
    held: bool = False
    """The scheduler held it to the model's objectives."""


@dataclass(frozen=True, slots=True)
class StepsOutcome:
    """What became of all of them, in the order they were sent."""

    requests: tuple[Answered, ...]
    send_lag_p99_s: float
    """How late the generator itself was."""


async def run_load(order: StepsOrder, folder: Path) -> StepsOutcome:
    """Returns the outcome of a load made by a process of its own.

    Raises:
        Unavailable: it did not end well.
    """
    document = await generate_load("catenary_lab.live.placement.load", asdict(order), folder)
    requests = tuple(Answered(**entry) for entry in document["requests"])
    return StepsOutcome(requests, document["send_lag_p99_s"])


class _Generator:
    def __init__(self, client: catenary.AsyncClient, order: StepsOrder) -> None:
        self._client = client
        self._order = order
        self._random = random.Random(order.seed)
        self._lags_s: list[float] = [0.0]

    async def run(self) -> StepsOutcome:
        start = time.monotonic() + LEAD_S
        calls = []
        for asked in self._order.requests:
            prompt = self._random.choices(range(1, self._order.vocabulary), k=asked.prompt_tokens)
            due = start + asked.due_s
            if (delay := due - time.monotonic()) > 0:
                await asyncio.sleep(delay)
            calls.append(asyncio.ensure_future(self._call(asked, prompt, due)))
        answered = await asyncio.gather(*calls)
        lags = sorted(self._lags_s)
        return StepsOutcome(tuple(answered), lags[int(0.99 * (len(lags) - 1))])

    async def _call(self, asked: Asked, prompt: list[int], due: float) -> Answered:
        self._lags_s.append(time.monotonic() - due)
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


async def _generate(order: StepsOrder) -> StepsOutcome:
    async with catenary.AsyncClient(order.target) as client:
        await client.ready()  # the connection is open before the first request is due
        return await _Generator(client, order).run()


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process."""
    import uvloop

    end_with_parent()
    document = json.loads(Path(arguments[0]).read_text())
    requests = tuple(Asked(**entry) for entry in document.pop("requests"))
    outcome = uvloop.run(_generate(StepsOrder(requests=requests, **document)))
    Path(arguments[1]).write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main(sys.argv[1:])
