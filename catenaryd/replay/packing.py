"""Replay of packing: which sessions share a GPU as they arrive, grow and end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from catenary_scheduler.packing.mell.pool import MellPool
from catenary_scheduler.packing.moves import Item
from catenary_services.errors import InvalidInput
from catenaryd.replay.fields import JsonFields


@dataclass(slots=True)
class _Step:
    """Operations that happen at once; a step of a sequential case has one."""

    place: str
    departed: list[Item] = field(default_factory=list)
    sizes: dict[Item, int] = field(default_factory=dict)
    arrived: dict[Item, int] = field(default_factory=dict)


def replay_packing(case: JsonFields) -> dict[str, Any]:
    """Returns the result of one case: `steps` of `gpus`, `partition` and `migrations`.

    Migrations count requests that are on another GPU after the step than before it.
    """
    pool = MellPool(case.whole("C", least=1))
    steps = []
    for step in _steps(case):
        try:
            moves = pool.epoch(step.departed, step.sizes, step.arrived).moves
        except InvalidInput as error:
            raise InvalidInput(step.place, error.message) from None
        partition = [sorted(items, key=str) for items in pool.bins().values()]
        steps.append({"gpus": len(partition), "partition": partition, "migrations": len(moves)})
    return {"steps": steps}


def packing_words(result: dict[str, Any]) -> str:
    steps = result["steps"]
    migrations = sum(step["migrations"] for step in steps)
    gpus = [step["gpus"] for step in steps] or [0]
    return (
        f"{len(steps)} steps, {migrations} migrations, "
        f"{max(gpus)} GPUs at most and {gpus[-1]} at the end"
    )


def _steps(case: JsonFields) -> Iterator[_Step]:
    """Yields the steps of a case, made from its `ops` if it has no `steps`."""
    mode = case.text("mode", "sequential")
    if mode not in ("sequential", "batched"):
        raise case.wrong("mode", "is neither 'sequential' nor 'batched'")
    if not case.has("steps"):
        for number, row in enumerate(case.rows("ops")):
            yield _operation(f"{case.at('ops')}[{number}]", row)
        return
    for fields in case.objects("steps"):
        if mode == "sequential":
            yield _operation(fields.at("op"), fields.row("op"))
        else:
            yield _batch(fields)


def _operation(place: str, row: list[Any]) -> _Step:
    step = _Step(place)
    name = row[0] if row else None
    if name == "depart":
        step.departed = list(_wholes(place, row[1:], 1))
    elif name in ("allocate", "update"):
        item, size = _wholes(place, row[1:], 2)
        (step.arrived if name == "allocate" else step.sizes)[item] = size
    else:
        raise InvalidInput(place, "is no 'allocate', 'depart' or 'update'")
    return step


def _batch(fields: JsonFields) -> _Step:
    step = _Step(fields.place)
    step.departed = list(_wholes(fields.at("depart"), fields.row("depart")))
    for name, into in (("update", step.sizes), ("allocate", step.arrived)):
        for row in fields.rows(name):
            item, size = _wholes(fields.at(name), row, 2)
            if item in into:
                raise fields.wrong(name, f"names request {item} twice")
            into[item] = size
    return step


def _wholes(place: str, values: list[Any], count: int | None = None) -> list[int]:
    if count is not None and len(values) != count:
        raise InvalidInput(place, f"must have {count} numbers")
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise InvalidInput(place, "must have whole numbers")
    return values
