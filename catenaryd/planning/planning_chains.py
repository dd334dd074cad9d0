"""The answer of `catenaryd plan chains` to a composition task, as JSON or in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from catenary_scheduler.planning.chains.bounds import response_bounds
from catenary_scheduler.planning.chains.gbp_cr import BlockPlacement, placement
from catenary_scheduler.planning.chains.gca import shortest_paths_are_unique
from catenary_scheduler.planning.chains.problem import ChainTask, Composition
from catenary_scheduler.planning.chains.search import compose_at, least_surrogate
from catenary_scheduler.planning.chains.sizes import TaskSizes, sizes_of
from catenary_scheduler.planning.chains.tuning import tune_by_bound
from catenaryd.planning.planning_chains_input import ChainsInput

_TIES_UP_TO = 64
"""The most servers for which ties between paths are counted."""


def chains_document(asked: ChainsInput) -> dict[str, Any]:
    """Returns the answer as `catenaryd plan chains --json` prints it."""
    task, sizes = asked.task, sizes_of(asked.task)
    tuning = _tuning(task, sizes)
    c = asked.c
    if c is None:
        c = 1 if tuning["lower"] is None else tuning["lower"]["c"]
    placed = placement(task, sizes, c)
    composition = compose_at(task, sizes, c)
    return {
        "max_blocks": list(placed.max_blocks),
        "gbpcr": _gbpcr(placed),
        "cache_slots": list(placed.slots),
        "gca": _gca(task, sizes, placed, composition),
        "bounds": _bounds(composition),
        "tuning": tuning,
    }


def _gbpcr(placed: BlockPlacement) -> dict[str, Any]:
    return {
        "requirement": placed.requirement_per_s,
        "reached": placed.reached,
        "first_block": [
            first + 1 if blocks else 0
            for first, blocks in zip(placed.first_block, placed.blocks, strict=True)
        ],
        "num_blocks": list(placed.blocks),
        "groups": [list(group) for group in placed.groups],
        "group_service_times": list(placed.group_service_s),
        "scaled_rate": placed.scaled_rate_per_s,
        "K": placed.groups_needed,
    }


def _gca(
    task: ChainTask, sizes: TaskSizes, placed: BlockPlacement, composition: Composition
) -> dict[str, Any]:
    unique = None
    if task.links is None and len(task.servers) <= _TIES_UP_TO:
        ranges = [
            (server, first, first + blocks)
            for server, (first, blocks) in enumerate(
                zip(placed.first_block, placed.blocks, strict=True)
            )
            if blocks
        ]
        unique = shortest_paths_are_unique(task, sizes, ranges, placed.slots)
    return {
        "unique_shortest_paths": unique,
        "chains": [
            {
                "servers": [task.number_of[hop.server] for hop in chain.hops],
                "blocks": [hop.blocks for hop in chain.hops],
                "capacity": chain.capacity,
                "service_time": chain.service_s,
            }
            for chain in composition.chains
        ],
        "total_capacity": composition.capacity,
        "total_service_rate": composition.total_rate_per_s,
    }


def _bounds(composition: Composition) -> dict[str, float] | None:
    bounds = response_bounds(
        [chain.capacity for chain in composition.chains],
        [chain.rate_per_s for chain in composition.chains],
        composition.arrivals_per_s,
    )
    if bounds is None:
        return None
    return {
        "load": bounds.load,
        "occupancy_lower": bounds.occupancy_lower,
        "occupancy_upper": bounds.occupancy_upper,
        "response_lower": bounds.response_lower_s,
        "response_upper": bounds.response_upper_s,
    }


def _tuning(task: ChainTask, sizes: TaskSizes) -> dict[str, Any]:
    least = least_surrogate(task, sizes)
    answer: dict[str, Any] = {"c_max": task.largest_c, "surrogate": None}
    if least is not None:
        c, groups = least
        answer["surrogate"] = {"c": c, "objective": c * groups, "K": groups}
    for name in ("lower", "upper"):
        tuned = tune_by_bound(task, upper=name == "upper", sizes=sizes)
        answer[name] = tuned and {"c": tuned.c, f"response_{name}": tuned.response_s}
    return answer


def print_chains(asked: ChainsInput, document: Mapping[str, Any]) -> None:
    """Prints the answer for people: the chains, bounds of response times, and the c to take."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("chain", "sessions", "seconds", "server: blocks"):
        table.add_column(name, no_wrap=name != "server: blocks")
    chains = document["gca"]["chains"]
    for number, chain in enumerate(chains):
        first, hops = 1, []
        for server, blocks in zip(chain["servers"], chain["blocks"], strict=True):
            hops.append(f"{server}: {first}-{first + blocks - 1}")
            first += blocks
        table.add_row(
            str(number), str(chain["capacity"]), f"{chain['service_time']:.4g}", "  ".join(hops)
        )
    if chains:
        console.print(table)
    else:
        console.print("no chain through all blocks")
    for line in _summary(asked, document):
        console.print(line, soft_wrap=True)


def _summary(asked: ChainsInput, document: Mapping[str, Any]) -> list[str]:
    rate, arrivals = document["gca"]["total_service_rate"], float(asked.task.rate_per_s)
    lines = [f"{document['gca']['total_capacity']} sessions at a time, {rate:.4g} per second"]
    bounds = document["bounds"]
    if bounds is None:
        lines.append(f"too little for the {arrivals:g} per second that arrive")
    else:
        lines.append(
            f"mean response {bounds['response_lower']:.4g} to {bounds['response_upper']:.4g} s at "
            f"{arrivals:g} per second, load {bounds['load']:.3f}"
        )
    chosen = [
        f"{name} {'none' if best is None else best['c']}"
        for name in ("lower", "upper", "surrogate")
        for best in (document["tuning"][name],)
    ]
    lines.append(f"best c: {', '.join(chosen)}")
    return lines
