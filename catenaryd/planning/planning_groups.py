"""The command `catenaryd plan groups`: how many schedulers a cluster needs."""

from __future__ import annotations

import json
from typing import Any

import click

from catenary_scheduler.scaling.groups import (
    USUAL_DECISION_US,
    USUAL_LATENCY_MS,
    USUAL_WASTE_RATIO,
    GroupLayout,
    divide,
    rate_within,
)
from catenary_services.errors import InvalidInput

_MICROSECOND = 1e-6
_MILLISECOND = 1e-3


@click.command("groups")
@click.option("--workers", type=click.IntRange(min=1), required=True, help="Of the whole cluster.")
@click.option(
    "--rate", type=click.FloatRange(min=0), required=True, help="Requests per second in all."
)
@click.option(
    "--waste",
    type=click.FloatRange(0, 1, min_open=True),
    default=USUAL_WASTE_RATIO,
    show_default=True,
    help="Share of its workers a group may waste.",
)
@click.option(
    "--scheduler-rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests per second one scheduler takes; default: from --decision-us and --latency-ms.",
)
@click.option(
    "--decision-us",
    type=click.FloatRange(min=0, min_open=True),
    default=USUAL_DECISION_US,
    show_default=True,
    help="Time of one placement decision, in microseconds.",
)
@click.option(
    "--latency-ms",
    type=click.FloatRange(min=0, min_open=True),
    default=USUAL_LATENCY_MS,
    show_default=True,
    help="Longest mean time until a request is placed, in milliseconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the division as one JSON object.")
def groups(workers: int, rate: float, waste: float, *, as_json: bool, **limits: Any) -> None:
    """Divides a cluster into as few scheduler groups as its rate of requests allows.

    Example: catenaryd plan groups --workers 40 --rate 100 --waste 0.1 --scheduler-rate 30
    """
    decision_s = limits["decision_us"] * _MICROSECOND
    within = rate_within(decision_s, limits["latency_ms"] * _MILLISECOND)
    limit = limits["scheduler_rate"] or within
    if not limit:
        raise InvalidInput("latency-ms", "one decision takes longer than that")
    grouping = divide(workers, rate, waste, limit)
    click.echo(json.dumps(_document(grouping, limit)) if as_json else _sentence(grouping, limit))


def _document(grouping: GroupLayout, limit: float) -> dict[str, object]:
    return {
        "groups": [
            {"workers": group.workers, "arrivals_per_s": group.arrivals_per_s}
            for group in grouping.groups
        ],
        "scheduler_arrivals_per_s": limit,
        "least_workers": grouping.least_workers,
        "most_workers": grouping.most_workers,
        "wasted_workers": grouping.wasted_workers,
        "waste_ratio": grouping.waste_ratio,
    }


def _sentence(grouping: GroupLayout, limit: float) -> str:
    sizes = [group.workers for group in grouping.groups]
    if len(sizes) == 1:
        return f"one scheduler, which takes {limit:,.0f} requests/s, leads all {sizes[0]} workers"
    most = max(group.arrivals_per_s for group in grouping.groups)
    size = f"{max(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    return (
        f"{len(sizes)} groups of {size} workers, each with at most"
        f" {most:,.1f} of the {limit:,.1f} requests/s a scheduler takes; about"
        f" {grouping.wasted_workers:g} workers ({grouping.waste_ratio:.1%}) are wasted"
    )
