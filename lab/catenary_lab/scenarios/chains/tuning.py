"""The best c, and the c that each measure would choose: Fig. 6 and 7."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from catenary_lab.scenarios.cells import known_mean, rounded
from catenary_lab.scenarios.chains.schema import Tuning
from catenary_lab.scenarios.chains.settings import runs_of
from catenary_lab.scenarios.chains.tuning_job import MEASURES, Tuned, TuningJob
from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.report import Cell, Findings, Lines, Panel, Table

_CURVE_TOP = 3.0
"""Factor of the least simulated response time at which the plot of the curve ends."""


@dataclass(frozen=True, slots=True)
class _Load:
    """The results of all topologies under one load."""

    rate_per_s: float
    tuned: list[Tuned]

    def c(self, measure: str) -> float | None:
        """Returns the mean c chosen, over the topologies where the measure chooses one."""
        return known_mean(each.chosen[measure] for each in self.tuned)

    def without(self, measure: str) -> int:
        """Returns how many topologies the measure finds no c for."""
        return sum(each.chosen[measure] is None for each in self.tuned)

    def regret(self, measure: str) -> float | None:
        """Returns the share by which the simulated response exceeds the best, on average."""
        return known_mean(each.regret(measure) for each in self.tuned)


def jobs(scenario: Tuning) -> Iterator[TuningJob]:
    """Yields all runs."""
    for rate in dict.fromkeys([*scenario.rates_per_s, scenario.curve_rate_per_s]):
        yield from _jobs(scenario, rate)


def report(scenario: Tuning, results: Results) -> Findings:
    """Returns the chosen c and their regrets beside the references, the curve and facts."""
    loads = [
        _Load(rate, [results[job] for job in _jobs(scenario, rate)])
        for rate in scenario.rates_per_s
    ]
    curve: Tuned = results[_jobs(scenario, scenario.curve_rate_per_s)[0]]
    notes = (
        f"{len(loads[0].tuned)} topologies, {scenario.requests} requests per c, the same ones for"
        " every c; regret: simulated response at the chosen c over the best simulated one. A c"
        " whose lower bound is above the best simulated response is not simulated.",
    )
    return Findings(
        (_chosen(scenario, loads), _regrets(scenario, loads)),
        _panels(scenario, loads, curve),
        notes,
        {
            "policies": [_facts(load) for load in loads],
            "curve": {"rate_per_s": scenario.curve_rate_per_s, "points": curve.to_json()},
        },
    )


def _jobs(scenario: Tuning, rate: float) -> list[TuningJob]:
    runs = runs_of(scenario)
    whole = rate == scenario.curve_rate_per_s
    return [
        TuningJob(
            setting,
            rate,
            scenario.stop,
            scenario.target_load,
            scenario.requests,
            seed,
            whole and number == 0,
        )
        for number, (setting, seed) in enumerate(runs)
    ]


def _facts(load: _Load) -> dict[str, Any]:
    return {
        "policy": "jffc",
        "case": f"{load.rate_per_s:g} per second",
        "rate_per_s": load.rate_per_s,
        "runs": len(load.tuned),
        "c": {measure: load.c(measure) for measure in (*MEASURES, "simulated")},
        "regret": {measure: load.regret(measure) for measure in MEASURES},
        "without_c": {measure: load.without(measure) for measure in MEASURES},
        "mean_response_s": statistics.fmean(each.best_s for each in load.tuned),
    }


def _chosen(scenario: Tuning, loads: list[_Load]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for load in loads:
        cells = [_c(load, measure) for measure in (*MEASURES, "simulated")]
        rows.append((f"{load.rate_per_s:g}", *cells))
        known = scenario.expected.get(f"{load.rate_per_s:g}", {})
        if known:
            keys = [f"c {measure}" for measure in (*MEASURES, "simulated")]
            rows.append(("- reference", *(rounded(known.get(key), 1) for key in keys)))
    return Table(
        "Chosen c, mean over topologies", ("per second", *MEASURES, "simulated"), tuple(rows)
    )


def _regrets(scenario: Tuning, loads: list[_Load]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for load in loads:
        regrets = [load.regret(measure) for measure in MEASURES]
        cells = [None if each is None else f"{100 * each:.1f}" for each in regrets]
        rows.append((f"{load.rate_per_s:g}", *cells))
        known = scenario.expected.get(f"{load.rate_per_s:g}", {})
        if known:
            keys = [f"regret {measure}" for measure in MEASURES]
            rows.append(("- reference", *(rounded(known.get(key), 1) for key in keys)))
    return Table("Regret of the chosen c in %", ("per second", *MEASURES), tuple(rows))


def _panels(scenario: Tuning, loads: list[_Load], curve: Tuned) -> tuple[Panel, ...]:
    top = _CURVE_TOP * curve.best_s
    series = {
        label: tuple(
            (float(point.c), value)
            for point in curve.points
            if (value := point.value(label)) is not None and value <= top
        )
        for label in ("simulated", *MEASURES)
    }
    chosen = {
        measure: tuple((load.rate_per_s, c) for load in loads if (c := load.c(measure)) is not None)
        for measure in ("simulated", *MEASURES)
    }
    return (
        Lines(
            f"one topology at {scenario.curve_rate_per_s:g} per second",
            "c",
            "mean response (s)",
            series,
        ),
        Lines("chosen c", "arrivals per second", "c", chosen),
    )


def _c(load: _Load, measure: str) -> str | None:
    c = load.c(measure)
    if c is None:
        return "none"
    none = load.without(measure)
    return f"{c:.1f}" + (f" (none in {none} of {len(load.tuned)})" if none else "")
