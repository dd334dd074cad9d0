"""Parameters of whole requests: time limits and priority.

Catenary understands `slo_ms`, `deadline_unix_ms`, `priority` and Triton's `timeout`. Sequences are
refused, because their answers would be wrong; all others are ignored, as the protocol demands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from catenary_gateway.inference import NO_OPTIONS, InferenceOptions
from catenary_gateway.tensors.validation import LONGEST_SLO_MS, NANOSECONDS_PER_MILLISECOND
from catenary_services.errors import DeadlineExceeded, InvalidInput, NotSupported

_NANOSECONDS_PER_MICROSECOND = 1_000
_PRIORITY_LIMIT = 2**31
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


def terms_of(parameters: Mapping[str, object], now_unix_ns: int) -> InferenceOptions:
    """Returns the options that a request's parameters ask for.

    Args:
        parameters: Plain values by name.
        now_unix_ns: Nanoseconds since 1970, to which `deadline_unix_ms` is compared.

    Raises:
        InvalidInput: A value is of the wrong type or out of range.
        NotSupported: The request belongs to a sequence.
        DeadlineExceeded: `deadline_unix_ms` has passed.
    """
    if not parameters:
        return NO_OPTIONS
    slo_ns: int | None = None
    if "slo_ms" in parameters:
        slo_ms = _number(parameters["slo_ms"], "slo_ms")
        if slo_ms <= 0:
            raise InvalidInput(_field("slo_ms"), "must be greater than 0")
        slo_ns = max(1, int(min(slo_ms, LONGEST_SLO_MS) * NANOSECONDS_PER_MILLISECOND))
    if "deadline_unix_ms" in parameters:
        left_ns = _left(parameters["deadline_unix_ms"], now_unix_ns)
        slo_ns = left_ns if slo_ns is None else min(slo_ns, left_ns)
    wait_ns = _timeout(parameters.get("timeout", 0))
    if wait_ns:
        slo_ns = wait_ns if slo_ns is None else min(slo_ns, wait_ns)
    _refuse_sequences(parameters)
    priority = 0
    if "priority" in parameters:
        value = parameters["priority"]
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidInput(_field("priority"), "must be an integer")
        if not -_PRIORITY_LIMIT <= value < _PRIORITY_LIMIT:
            raise InvalidInput(_field("priority"), "must fit in 32 bits")
        priority = value
    return InferenceOptions(slo_ns, priority)


def _left(value: object, now_unix_ns: int) -> int:
    deadline_ms = _number(value, "deadline_unix_ms")
    if deadline_ms <= 0:
        raise InvalidInput(_field("deadline_unix_ms"), "must be milliseconds since 1970")
    left_ms = deadline_ms - now_unix_ns / NANOSECONDS_PER_MILLISECOND
    if left_ms <= 0:
        raise DeadlineExceeded(
            "deadline_unix_ms had passed when the request arrived", details={"stage": "arrival"}
        )
    return max(1, int(min(left_ms, LONGEST_SLO_MS) * NANOSECONDS_PER_MILLISECOND))


def _timeout(value: object) -> int:
    """Returns Triton's time limit for a request, which is in microseconds; 0 for none."""
    if type(value) is not int or value < 0:
        raise InvalidInput(_field("timeout"), "must be a number of microseconds")
    return min(
        value * _NANOSECONDS_PER_MICROSECOND, int(LONGEST_SLO_MS) * NANOSECONDS_PER_MILLISECOND
    )


def _refuse_sequences(parameters: Mapping[str, object]) -> None:
    for name in _SEQUENCE:
        if parameters.get(name) not in (None, 0, "", False):
            raise NotSupported(
                f"{_field(name)}: no state is kept from one request to the next; every request "
                "stands alone"
            )


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(_field(name), "must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(_field(name), "must be finite")
    # An integer may have any size, which could overflow as a float.
    return float(min(max(value, -(2**62)), 2**62))


def _field(name: str) -> str:
    return f'parameters["{name}"]'
