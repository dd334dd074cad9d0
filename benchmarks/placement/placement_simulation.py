"""Placement under objectives in simulation, out of sample, compared with the limits; and its speed.

It reads the scenario files `out-of-sample-*.yaml`: cells of a rate and a seed each, whole prompts
and chunks. The quick form takes one seed, two rates and whole prompts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, at_least, at_most, table
from catenary_lab.scenarios.placement.jobs import run_of
from catenary_lab.scenarios.placement.schema import FILES, Fewest
from catenary_lab.scenarios.placement.settings import rows_of
from catenary_lab.scenarios.runner import findings_of
from catenary_simulator.placement.serve import serve_placement

SCENARIOS = Path(__file__).parents[2] / "scenarios" / "placement"
MODELS = ("13b", "70b")
LIMIT_FEWER = 20.0
LIMIT_TIMES_REAL_TIME = 50.0
LIMIT_DECISION_US = 100.0
SPEED_WORKERS = 25
SPEED_RATE = 25.0


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    figures = _speed()
    for model in MODELS:
        scenario = FILES.load(SCENARIOS / f"out-of-sample-{model}.yaml", quick=quick)
        assert isinstance(scenario, Fewest)
        figures += _savings(model, scenario)
    return figures


def _savings(model: str, scenario: Fewest) -> list[Figure]:
    compared = [each for each in scenario.policies if each.label in ("slo", "jsq", "power-of-two")]
    scenario = scenario.model_copy(update={"policies": compared})
    savings: list[dict[str, Any]] = findings_of("placement", scenario).facts["savings"]
    figures = []
    for each in savings:
        name = f"{model}, {each['engine']} prompts, slo beside {each['beside']}"
        if each["fewer_on_average"] is not None:
            fewer = 100 * each["fewer_on_average"]
            figures.append(at_least(f"{name}: fewer workers", fewer, "%", LIMIT_FEWER))
        figures.append(
            at_most(f"{name}: cells only it reached", each["cells_not_reached"], "cells", 0)
        )
        if each["beside"] == "jsq":
            more = each["cells_with_more_gpus"]
            figures.append(at_most(f"{name}: cells with more workers", more, "cells", 0))
    return figures


def _speed() -> list[Figure]:
    """Returns the ratio of virtual to CPU time in one run, and the time of its decisions."""
    scenario = FILES.load(SCENARIOS / "out-of-sample-13b.yaml")
    assert isinstance(scenario, Fewest)
    figures = []
    for policy in ("slo", "jsq"):
        row = next(
            row
            for row in rows_of(scenario)
            if row.policy == policy and row.rate_per_s == SPEED_RATE
        )
        workload = row.case.workload()
        began = time.process_time()
        served = serve_placement(run_of(row.case, SPEED_WORKERS, None), workload)
        spent = time.process_time() - began
        times = served.simulated_s / spent
        name = f"{SPEED_WORKERS} workers, {SPEED_RATE:g} requests/s, {policy}"
        figures.append(at_least(f"times real time, {name}", times, "x", LIMIT_TIMES_REAL_TIME))
        timed = serve_placement(run_of(row.case, SPEED_WORKERS, None, timed=True), workload)
        decisions = sorted(timed.decision_ns)
        middle = decisions[len(decisions) // 2] / 1000
        figures.append(at_most(f"decision p50, {name}", middle, "us", LIMIT_DECISION_US))
    return figures


def main() -> None:
    """Prints the figures as a table."""
    print(table(run(quick=False)))


if __name__ == "__main__":
    main()
