"""The load of live chats: each is sent when it is due, and measured where it arrives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import catenary
from catenary_lab.live.chains.emulation import KEY
from catenary_lab.live.chains.load import TIMEOUT_S, Asked, prompt_of
from catenary_lab.live.generator import problem_of


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

    asked: Sequence[Asked]
    objectives_ms: tuple[float, float] | None
    """Most milliseconds to the first token and for each further one; None: none are named."""

    async def send(self, client: catenary.AsyncClient, number: int, due: float) -> AnsweredChat:
        """Returns the outcome of a chat."""
        asked = self.asked[number]
        named: catenary.GenerationOptions = {
            "max_tokens": asked.output_tokens,
            "ignore_eos": True,
            "timeout_s": TIMEOUT_S,
        }
        if self.objectives_ms is not None:
            first_ms, each_ms = self.objectives_ms
            named["time_to_first_token_slo_ms"] = first_ms
            named["time_per_output_token_slo_ms"] = each_ms
        began = time.monotonic()
        stream = client.generate(KEY.name, prompt_of(asked), stream=True, **named)
        problem = await problem_of(stream, asked.output_tokens)
        response_s = time.monotonic() - due
        if problem:
            return AnsweredChat(asked.output_tokens, response_s, problem=problem)
        first_s = began - due + stream.so_far.first_token_s
        return AnsweredChat(asked.output_tokens, response_s, first_s)
