"""Conversations: prompts that begin with one of a few heads, and grow turn by turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_simulator.arrivals import ArrivalProcess
from catenary_simulator.placement.workload import (
    LengthPopulation,
    RequestWorkload,
    SharedText,
)


@dataclass(frozen=True, slots=True)
class Chats:
    """The shape of conversations.

    Attributes:
        heads: Number of heads; each conversation begins with one, all equally likely.
        head_tokens: Tokens of a head.
        turns: Mean number of turns, of a geometric distribution.
        pause_s: Mean seconds from one turn of a conversation to its next, after the least pause.
        least_pause_s: Seconds that an answer and its reading take at least.
        most_tokens: Conversations end before their prompt and answer are longer than this.
    """

    heads: int
    head_tokens: int
    turns: float
    pause_s: float
    least_pause_s: float
    most_tokens: int


def chat_workload(
    chats: Chats,
    lengths: LengthPopulation,
    arrivals: ArrivalProcess,
    rate_per_s: float,
    duration_s: float,
    seed: int,
) -> RequestWorkload:
    """Returns the requests of conversations; each turn's prompt holds all turns before it.

    Args:
        chats: The shape of the conversations.
        lengths: Lengths of what is said in a turn, and of the answers, drawn with replacement.
        arrivals: Process of the conversations' first turns.
        rate_per_s: Mean rate of requests.
        duration_s: Seconds during which conversations begin.
        seed: Seed of arrivals, lengths, turns and pauses.
    """
    draw = np.random.default_rng((seed, 4))
    rate = rate_per_s / chats.turns
    begins = arrivals.moments(rate, duration_s, np.random.default_rng((seed, 1)))
    requests: list[tuple[Nanoseconds, int, int, SharedText]] = []
    for conversation, begin_s in enumerate(begins.tolist()):
        text = SharedText(int(draw.integers(chats.heads)), chats.head_tokens, conversation)
        moment_s, tokens = begin_s, chats.head_tokens
        for _ in range(int(draw.geometric(1 / chats.turns))):
            drawn = int(draw.integers(len(lengths.prompts)))
            prompt, answer = tokens + lengths.prompts[drawn], lengths.answers[drawn]
            if prompt + answer > chats.most_tokens:
                break
            requests.append((round(moment_s * NANOSECONDS_PER_SECOND), prompt, answer, text))
            tokens = prompt + answer
            moment_s += chats.least_pause_s + float(draw.exponential(chats.pause_s))
    requests.sort(key=lambda each: each[0])
    return RequestWorkload(
        [each[0] for each in requests],
        [each[1] for each in requests],
        [each[2] for each in requests],
        [each[3] for each in requests],
    )
