"""A cluster's own plan for unlike devices beside the even split and the best plan by hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from catenary_lab.live.plans.by_hand import EVEN
from catenary_lab.live.plans.run import DEFAULT, PlanMeasured, PlansMeasured, run_live
from catenary_lab.scenarios.kinds import Progress
from catenary_lab.scenarios.live import on_processes
from catenary_lab.scenarios.pools.schema import LivePlans
from catenary_lab.scenarios.report import Cell, Findings, Table

Facts = dict[str, Any]
BY_HAND = "by hand"


def serve(scenario: LivePlans, progress: Progress) -> Findings:
    """Returns what real processes made of a scenario.

    Raises:
        Unavailable: They were not ready in time, or the cluster's plan did not stay.
    """
    return report(scenario, on_processes(lambda folder: run_live(scenario, folder, progress)))


def report(scenario: LivePlans, measured: PlansMeasured) -> Findings:
    """Returns tables and facts of a run."""
    plans = _plans(measured.measured)
    screened = [_facts(each.name, [each]) for each in measured.screened]
    devices = " and ".join(f"{count} {name}" for name, count in scenario.gpus.items())
    notes = (
        f"{scenario.model} on {devices}, emulated from their data sheets and {scenario.slowdown:g}"
        f" times slower; {scenario.at_once} requests are always under way. An answer counts within"
        f" {scenario.slo_ms / 1e3:g} s.",
        f"The {len(screened) - 1} plans by hand are measured for {scenario.screening_s:g} s each;"
        f" the best {scenario.finalists} of them and the default again for"
        f" {scenario.measured_s:g} s, {scenario.rounds} times by turns. Batches have"
        f" {scenario.max_batch} rows at most.",
        f"{measured.processes} processes used {max(each['cpu_cores'] for each in plans):.2f} CPU"
        f" cores at most; {measured.wall_s:.0f} s in all.",
    )
    best = next(each for each in plans if each["by"] == BY_HAND)
    tables = (_plans_table(scenario, plans, best), _screened_table(scenario, screened))
    facts = {"plans": plans, "screened": screened, "explanation": measured.explanation}
    return Findings(tables, (), notes, facts)


def _plans(windows: Sequence[PlanMeasured]) -> list[Facts]:
    """Returns the figures of each plan over its windows: the default, the even split, others."""
    names = dict.fromkeys(each.name for each in windows)
    plans = [_facts(name, [each for each in windows if each.name == name]) for name in names]
    ours = {DEFAULT: 0, EVEN: 1}
    return sorted(plans, key=lambda each: (ours.get(each["plan"], 2), -each["answers_per_s"]))


def _facts(name: str, windows: Sequence[PlanMeasured]) -> Facts:
    seconds = sum(each.seconds for each in windows)
    return {
        "plan": name,
        "by": {DEFAULT: DEFAULT, EVEN: EVEN}.get(name, BY_HAND),
        "answers_per_s": sum(each.answers for each in windows) / seconds,
        "windows_per_s": [each.answers_per_s for each in windows],
        "late": sum(each.late for each in windows),
        "refused": sum(each.refused for each in windows),
        "median_ms": statistics.fmean(each.median_ms for each in windows),
        "busy": {
            device: statistics.fmean(each.busy[device] for each in windows)
            for device in windows[0].busy
        },
        "cpu_cores": max(each.cpu_cores for each in windows),
    }


def _plans_table(scenario: LivePlans, plans: Sequence[Facts], best: Facts) -> Table:
    header = ("plan", "by", "requests/s", "of the best by hand", "late", "refused", "median, ms")
    rows: list[tuple[Cell, ...]] = [
        (
            each["plan"],
            each["by"],
            f"{each['answers_per_s']:.1f}",
            f"{100 * each['answers_per_s'] / best['answers_per_s']:.1f} %",
            str(each["late"]),
            str(each["refused"]),
            f"{each['median_ms']:.0f}",
            *_busy(scenario, each),
        )
        for each in plans
    ]
    return Table("Requests answered per second", (*header, *_busy_header(scenario)), tuple(rows))


def _screened_table(scenario: LivePlans, screened: Sequence[Facts]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (each["plan"], f"{each['answers_per_s']:.1f}", *_busy(scenario, each))
        for each in sorted(screened, key=lambda each: -each["answers_per_s"])
    ]
    header = ("plan", "requests/s", *_busy_header(scenario))
    return Table(f"Every plan, measured for {scenario.screening_s:g} s", header, tuple(rows))


def _busy_header(scenario: LivePlans) -> tuple[str, ...]:
    return tuple(f"{name} busy" for name in scenario.gpus)


def _busy(scenario: LivePlans, plan: Facts) -> tuple[Cell, ...]:
    return tuple(f"{100 * plan['busy'][name]:.0f} %" for name in scenario.gpus)
