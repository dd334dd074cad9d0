"""The JSON input of `catenaryd plan chains`, checked field by field.

The keys are the quantities of the paper, with blocks counted from 1 as there. Memory is in any one
unit, times are in seconds. Numbers are read as decimals, exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

from catenary_scheduler.planning.chains.problem import ChainTask, Links, Server, StopRule
from catenary_services.errors import InvalidInput

_KEYS = {"servers", "L", "s_m", "s_c", "lambda", "rho_bar", "c", "stop", "links"}
_SERVER_KEYS = {"memory", "tau_c", "tau_p"}
_PAPER_NAMES = {
    "blocks": "L",
    "block_memory": "s_m",
    "cache_memory": "s_c",
    "rate_per_s": "lambda",
    "load": "rho_bar",
    "communication_s": "tau_c",
    "block_s": "tau_p",
}
_MAGNITUDE = 10**30
"""Numbers above this, and except for 0 those below its inverse, are taken for mistakes."""
_MOST_BLOCKS = 10_000


@dataclass(frozen=True, slots=True)
class ChainsInput:
    """The composition task of a file."""

    task: ChainTask
    c: int | None
    """The cache parameter c; None for that of the lower bound."""


def read_chains_input(text: str, stop: StopRule | None = None) -> ChainsInput:
    """Returns the task in a JSON document; `stop` overrides the document's own rule.

    Raises:
        InvalidInput: A field is missing, unknown or out of range; the error names it.
    """
    try:
        document = json.loads(text, parse_float=_decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("file", f"is not JSON: {error}") from None
    fields = _object(document, "input", _KEYS)
    servers = fields.get("servers")
    if not isinstance(servers, list):
        raise InvalidInput("servers", "must be a list of servers")
    rule = stop or fields.get("stop", "rate")
    if rule not in ("rate", "all"):
        raise InvalidInput("stop", "is neither 'rate' nor 'all'")
    try:
        task = ChainTask(
            servers=tuple(_server(server, number) for number, server in enumerate(servers)),
            blocks=_whole(fields, "L", _MOST_BLOCKS),
            block_memory=_number(fields, "s_m"),
            cache_memory=_number(fields, "s_c"),
            rate_per_s=_number(fields, "lambda"),
            load=_number(fields, "rho_bar"),
            stop=cast(StopRule, rule),
            links=_links(fields["links"], len(servers)) if "links" in fields else None,
        )
    except InvalidInput as error:
        raise _by_paper(error) from None
    return ChainsInput(task, _whole(fields, "c", _MAGNITUDE) if "c" in fields else None)


def _by_paper(error: InvalidInput) -> InvalidInput:
    """Returns the error with the field named as in the file."""
    where, dot, field = error.field.rpartition(".")
    message = error.message.removeprefix(f"{error.field}: ")
    return InvalidInput(f"{where}{dot}{_PAPER_NAMES.get(field, field)}", message)


def _server(document: Any, number: int) -> Server:
    fields = _object(document, f"servers[{number}]", _SERVER_KEYS)
    memory, communication, compute = (
        _number(fields, name, f"servers[{number}].") for name in ("memory", "tau_c", "tau_p")
    )
    return Server(str(number), memory, communication, compute)


def _links(document: Any, servers: int) -> Links:
    if not isinstance(document, list):
        raise InvalidInput("links", "must be a list of {from, to, seconds}")
    links: dict[tuple[str | None, str | None], float] = {}
    for number, item in enumerate(document):
        field = f"links[{number}]"
        fields = _object(item, field, {"from", "to", "seconds"})
        ends = []
        for name in ("from", "to"):
            end = fields.get(name)
            if end is not None and not (_is_whole(end) and 0 <= end < servers):
                raise InvalidInput(f"{field}.{name}", "is neither a server's number nor null")
            ends.append(None if end is None else str(end))
        links[ends[0], ends[1]] = float(_number(fields, "seconds", f"{field}."))
    return links


def _object(document: Any, field: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise InvalidInput(field, "must be a JSON object")
    for name in document:
        if name not in known:
            raise InvalidInput(
                name if field == "input" else f"{field}.{name}",
                f"is unknown; known are {', '.join(sorted(known))}",
            )
    return document


def _number(fields: Mapping[str, Any], name: str, prefix: str = "") -> Fraction:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise InvalidInput(prefix + name, "is missing" if value is None else "must be a number")
    number = Fraction(value)
    if number and not Fraction(1, _MAGNITUDE) <= abs(number) <= _MAGNITUDE:
        raise InvalidInput(prefix + name, "is out of range")
    return number


def _whole(fields: Mapping[str, Any], name: str, most: int) -> int:
    value = fields.get(name)
    if not _is_whole(value):
        raise InvalidInput(name, "is missing" if value is None else "must be a whole number")
    number = int(cast(int, value))
    if not 1 <= number <= most:
        raise InvalidInput(name, f"must lie between 1 and {most}")
    return number


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _decimal(text: str) -> Fraction:
    number = Decimal(text)
    if number and abs(number.adjusted()) > 30:  # 1e999999999 would fill the memory
        return Fraction(10 * _MAGNITUDE)
    return Fraction(number)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
