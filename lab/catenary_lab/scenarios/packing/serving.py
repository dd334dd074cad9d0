"""Shares of requests served on a fixed number of GPUs, with and without migration: Fig. 6."""

from __future__ import annotations

from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.packing.facts import (
    bars,
    facts_of,
    seeds_note,
    table,
    violations_of,
)
from catenary_lab.scenarios.packing.schema import Serving
from catenary_lab.scenarios.packing.settings import rows_of
from catenary_lab.scenarios.report import Findings

_MEASURES = ("undisturbed", "held", "ended", "preemptions_per_s", "migrations_per_s")


def report(scenario: Serving, results: Results) -> Findings:
    """Returns shares of requests whose caches were held, plots and facts."""
    facts = facts_of(rows_of(scenario), results)
    panels = tuple(bars(scenario, facts, "undisturbed", gpu) for gpu in scenario.gpus)
    sizes = ", ".join(f"{count} of {gpu}" for gpu, count in scenario.most_gpus.items())
    notes = (
        f"{sizes}; who waits for more than {scenario.patience_s:g} s gives up. "
        f"{seeds_note(scenario)} Violated invariants: {violations_of(facts)}.",
    )
    tables = tuple(table(scenario, facts, key) for key in _MEASURES)
    return Findings(tables, panels, notes, {"policies": facts})
