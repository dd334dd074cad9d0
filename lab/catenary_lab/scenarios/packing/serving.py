"""Who can be served on a fixed number of GPUs, with and without migration: Fig. 6."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from catenary_lab.scenarios.packing.facts import (
    bars,
    facts_of,
    seeds_note,
    table,
    violations_of,
)
from catenary_lab.scenarios.packing.schema import Serving
from catenary_lab.scenarios.packing.settings import PackingJob, rows_of
from catenary_lab.scenarios.pools.jobs import Job
from catenary_lab.scenarios.report import Figure, Report

_MEASURES = ("undisturbed", "held", "ended", "preemptions_per_s", "migrations_per_s")


def jobs(scenario: Serving) -> Iterator[PackingJob]:
    """Yields all runs."""
    for row in rows_of(scenario):
        yield row.job


def report(name: str, scenario: Serving, results: Mapping[Job[Any], Any]) -> Report:
    """Returns shares of requests whose caches were held, plots and facts."""
    facts = facts_of(rows_of(scenario), results)
    panels = tuple(bars(scenario, facts, "undisturbed", gpu) for gpu in scenario.gpus)
    sizes = ", ".join(f"{count} of {gpu}" for gpu, count in scenario.most_gpus.items())
    notes = (
        f"{sizes}; who waits for more than {scenario.patience_s:g} s gives up. "
        f"{seeds_note(scenario)} Violated invariants: {violations_of(facts)}.",
        *scenario.notes,
    )
    tables = tuple(table(scenario, facts, key) for key in _MEASURES)
    figures = (Figure(name, panels, scenario.title),)
    return Report(name, scenario.title, tables, figures, notes, {"policies": facts})
