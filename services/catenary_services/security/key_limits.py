"""Limits of an API key: priority, rates, share and expiry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from catenary_services.errors import InvalidInput

HIGHEST_PRIORITY = 2**31 - 1
LONGEST_RATE = 1e12
"""The highest rate per second; a larger number in a file is a mistake."""
LARGEST_SHARE = 1e6
_TOKEN_BURST_S = 10.0
"""A token burst that is not given defaults to what the rate supplies in this many seconds."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The rate of a token bucket: `per_s` flow in, and it holds at most `burst`."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of what a key may have of the cluster."""

    max_priority: int = 0
    """The most urgent priority the key may ask for; higher is more urgent."""
    requests: RateLimit | None = None
    """Rate of requests; None without a limit."""
    tokens: RateLimit | None = None
    """Rate of tokens of prompts, answers and texts for encoders together; None without a limit."""
    share: float = 1.0
    """Weight of the key when keys want more than there is: twice the share gets twice as much."""


USUAL = KeyLimits()
UNLIMITED = KeyLimits(max_priority=HIGHEST_PRIORITY)


def limits_of(entry: Mapping[str, object], field: str) -> KeyLimits:
    """Returns the limits in an entry of a keys file.

    Args:
        entry: The entry.
        field: Path of the entry, for errors.

    Raises:
        InvalidInput: A value is of the wrong type or out of range.
    """
    priority = entry.get("max_priority", 0)
    if type(priority) is not int or not -HIGHEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
        raise InvalidInput(f"{field}.max_priority", "must be an integer of 32 bits")
    requests = _rate(entry, field, "requests_per_s", "burst", 1.0)
    tokens = _rate(entry, field, "tokens_per_s", "token_burst", _TOKEN_BURST_S)
    share = _number(entry.get("share", 1.0), f"{field}.share", LARGEST_SHARE)
    return KeyLimits(priority, requests, tokens, share)


def expiry_of(entry: Mapping[str, object], field: str) -> int | None:
    """Returns the time at which a key expires, in nanoseconds since 1970; None for never.

    Raises:
        InvalidInput: The value is not a time of RFC 3339.
    """
    value = entry.get("expires")
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidInput(
            f"{field}.expires", 'must be a moment with its offset, e.g. "2030-01-31T12:00:00Z"'
        )
    return int(moment.timestamp()) * 1_000_000_000


def _rate(
    entry: Mapping[str, object], field: str, rate: str, burst: str, usual_s: float
) -> RateLimit | None:
    per_s, most = entry.get(rate), entry.get(burst)
    if per_s is None:
        if most is not None:
            raise InvalidInput(f"{field}.{burst}", f"means nothing without {rate}")
        return None
    speed = _number(per_s, f"{field}.{rate}", LONGEST_RATE)
    if most is None:
        return RateLimit(speed, float(max(1, math.ceil(speed * usual_s))))
    if type(most) is not int or not 1 <= most <= LONGEST_RATE:
        raise InvalidInput(f"{field}.{burst}", "must be an integer and at least 1")
    return RateLimit(speed, float(most))


def _number(value: object, field: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(field, "must be a number")
    if not 0 < value <= most:
        raise InvalidInput(field, f"must be greater than 0 and at most {most:g}")
    return float(value)
