"""The load of live chats: each is sent when it is due, and measured where it arrives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import catenary
from catenary_lab.live.chains.emulation import KEY, VOCABULARY
from catenary_lab.live.generator import problem_of

_TIMEOUT_S = 900.0
"""Longest duration of a chat, in seconds."""


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A chat to be asked for."""

    due_s: float
    """Time at which it is due, in seconds from the start."""
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class AnsweredChat:
    """The outcome of one chat; times are in seconds from when it was due."""

    answer_tokens: int
    response_s: float
    first_token_s: float = 0.0
    problem: str = ""
    """Reason why the chat has not all its tokens; empty if it has."""

    @property
    def per_token_s(self) -> float:
        """Mean time of each token after the first; 0 for an answer of one token."""
        behind = self.answer_tokens - 1
        return (self.response_s - self.first_token_s) / behind if behind else 0.0


@dataclass(frozen=True, slots=True)
class ChatsLoad:
    """The chats of a load, and the objectives that they name."""

    asked: Sequence[AskedChat]
    objectives_ms: tuple[float, float] | None
    """Most milliseconds to the first token and for each further one; None: none are named."""

    async def send(self, client: catenary.AsyncClient, number: int, due: float) -> AnsweredChat:
        """Returns the outcome of a chat."""
        asked = self.asked[number]
        named: catenary.GenerationOptions = {
            "max_tokens": asked.answer_tokens,
            "ignore_eos": True,
            "timeout_s": _TIMEOUT_S,
        }
        if self.objectives_ms is not None:
            first_ms, each_ms = self.objectives_ms
            named["time_to_first_token_slo_ms"] = first_ms
            named["time_per_output_token_slo_ms"] = each_ms
        began = time.monotonic()
        stream = client.generate(
            KEY.name,
            [1 + place % (VOCABULARY - 1) for place in range(asked.prompt_tokens)],
            stream=True,
            **named,
        )
        problem = await problem_of(stream, asked.answer_tokens)
        response_s = time.monotonic() - due
        if problem:
            return AnsweredChat(asked.answer_tokens, response_s, problem=problem)
        first_s = began - due + stream.so_far.first_token_s
        return AnsweredChat(asked.answer_tokens, response_s, first_s)
