"""Policies over one set of chains and a range of loads: Fig. 5."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from catenary_lab.scenarios.cells import rounded
from catenary_lab.scenarios.chains.jobs import Outcome, PolicyJob
from catenary_lab.scenarios.chains.schema import Policies
from catenary_lab.scenarios.chains.settings import runs_of
from catenary_lab.scenarios.kinds import Results
from catenary_lab.scenarios.report import Cell, Findings, Lines, Panel, Table
from catenary_simulator.chains.result import together


def jobs(scenario: Policies) -> Iterator[PolicyJob]:
    """Yields all runs."""
    for load in scenario.loads:
        for policy in scenario.policies:
            yield from _jobs(scenario, load, policy)


def report(scenario: Policies, results: Results) -> Findings:
    """Returns the table beside the reference, both plots and facts."""
    facts = [
        _facts(load, policy, [results[job] for job in _jobs(scenario, load, policy)])
        for load in scenario.loads
        for policy in scenario.policies
    ]
    first = facts[0]
    notes = (
        f"{first['runs']} topologies, {scenario.requests} requests each, c={scenario.c}; on average"
        f" {first['chains']:.1f} chains, C={first['capacity']:.1f} sessions at a time,"
        f" nu={first['total_rate_per_s']:.2f}/s.",
    )
    return Findings(
        (_table(scenario, facts),),
        _panels(scenario, facts),
        notes,
        {"policies": facts},
    )


def _jobs(scenario: Policies, load: float, policy: Any) -> list[PolicyJob]:
    return [
        PolicyJob(setting, scenario.c, load, policy, scenario.requests, seed)
        for setting, seed in runs_of(scenario)
    ]


def _facts(load: float, policy: str, outcomes: list[Outcome]) -> dict[str, Any]:
    served = [each.result for each in outcomes if each.result is not None]
    bounds = [each.bounds for each in outcomes if each.bounds is not None]
    figures = together(served).to_json()
    return {
        "case": f"load {load:g}",
        "load": load,
        "policy": policy,
        "runs": len(outcomes),
        "c": outcomes[0].c,
        "capacity": statistics.fmean(each.capacity for each in outcomes),
        "chains": statistics.fmean(each.chains for each in outcomes),
        "total_rate_per_s": statistics.fmean(each.rate_per_s for each in outcomes),
        "bounds": {
            "response_lower_s": statistics.fmean(each.response_lower_s for each in bounds),
            "response_upper_s": statistics.fmean(each.response_upper_s for each in bounds),
            "load": load,
        },
        **figures,
        "service_share": figures["mean_service_s"] / figures["mean_response_s"],
    }


def _of(facts: list[dict[str, Any]], load: float) -> list[dict[str, Any]]:
    return [fact for fact in facts if fact["load"] == load]


def _table(scenario: Policies, facts: list[dict[str, Any]]) -> Table:
    header = ("load", *scenario.policies, "lower", "upper", "service share")
    rows: list[tuple[Cell, ...]] = []
    for load in scenario.loads:
        line = _of(facts, load)
        bounds = line[0]["bounds"]
        rows.append(
            (
                f"{load:g}",
                *(f"{fact['mean_response_s']:.2f}" for fact in line),
                f"{bounds['response_lower_s']:.2f}",
                f"{bounds['response_upper_s']:.2f}",
                f"{line[0]['service_share']:.2f}",
            )
        )
        known = scenario.expected.get(f"{load:g}", {})
        if known:
            rows.append(("- reference", *(rounded(known.get(each)) for each in header[1:])))
    caption = f"Mean response in s; service share of {scenario.policies[0]}"
    return Table(caption, header, tuple(rows))


def _panels(scenario: Policies, facts: list[dict[str, Any]]) -> tuple[Panel, ...]:
    by_policy: dict[str, tuple[tuple[float, float], ...]] = {
        policy: tuple(
            (fact["load"], fact["mean_response_s"]) for fact in facts if fact["policy"] == policy
        )
        for policy in scenario.policies
    }
    mine = scenario.policies[0]
    bounds = {
        f"{which} bound": tuple(
            (fact["load"], fact["bounds"][f"response_{which}_s"])
            for fact in facts
            if fact["policy"] == mine
        )
        for which in ("lower", "upper")
    }
    return (
        Lines("policies", "load", "mean response (s)", by_policy),
        Lines("bounds", "load", "mean response (s)", {mine: by_policy[mine], **bounds}),
    )
