"""Log probabilities of tokens, as agents compute them and clients read them."""

from __future__ import annotations

from typing import NamedTuple

LOWEST_LOGPROB = -9999.0
"""Stands for whatever is less, as JSON has no infinity."""


class TokenLogprobs(NamedTuple):
    """One token, by the logarithms of the probabilities of its place.

    They are log_softmax of what the model computes, before biases, penalties, temperature and
    filters.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token, 2 for the next; 0 if nothing was computed, by an agent of an older
    release."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, as many as were asked for, likeliest first."""


def unknown_logprobs(token_id: int) -> TokenLogprobs:
    """Returns what is said of a token whose agent computes no log probabilities."""
    return TokenLogprobs(token_id, LOWEST_LOGPROB, 0)
