"""The load of live server chains: sessions of a trace, from a process of their own.

Response times count from the moment a session was due to its last token at the generator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import catenary
from catenary_lab.live.chains.emulation import KEY, VOCABULARY
from catenary_lab.live.generator import problem_of

TIMEOUT_S = 900.0
"""Longest duration of a session, in seconds."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A session to be asked for."""

    due_s: float
    """Time at which it is due, in seconds from the start."""
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of one session; times are in seconds from when it was due."""

    response_s: float
    problem: str = ""
    """Reason why the session has not all its tokens; empty if it has."""
    wait_s: float = 0.0
    """Time until the session was given a chain, as the gateway saw it."""
    starts: int = 1
    """Number of times it was started; more than 1 if it was moved."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions of a load."""

    asked: Sequence[Asked]

    async def send(self, client: catenary.AsyncClient, number: int, due: float) -> Answered:
        """Returns the outcome of a session, without what the gateway knows of it."""
        asked = self.asked[number]
        stream = client.generate(
            KEY.name,
            prompt_of(asked),
            stream=True,
            max_tokens=asked.output_tokens,
            ignore_eos=True,
            request_id=request_id(number),
            timeout_s=TIMEOUT_S,
        )
        problem = await problem_of(stream, asked.output_tokens)
        return Answered(time.monotonic() - due, problem)


def prompt_of(asked: Asked) -> list[int]:
    """Returns the tokens of a session's prompt."""
    return [1 + place % (VOCABULARY - 1) for place in range(asked.input_tokens)]


def request_id(number: int) -> str:
    """Returns the id by which the gateway knows a session."""
    return f"live-{number}"
