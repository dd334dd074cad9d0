"""Log probabilities of tokens as data, and their messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_protos.catenary.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token, by the logarithms of the probabilities of its place.

    They are log_softmax of what the model computes, before biases, penalties, temperature and
    filters; -9999 stands for whatever is less.

    Attributes:
        token_id: The token.
        logprob: Its log probability.
        rank: 1 for the likeliest token, 2 for the next; 0 if an agent of an older release computed
            nothing.
        top: As many of the likeliest tokens as were asked for, with their log probabilities.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
    """Returns the log probabilities in a message."""
    top = tuple((each.token_id, each.logprob) for each in message.top)
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)
