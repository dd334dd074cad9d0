"""A load in steps on real processes: predictions beside measurements, agents that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from catenary_lab.live.placement.load import Answered
from catenary_lab.live.placement.run import run_live
from catenary_lab.live.placement.steps import StepsMeasured, changes
from catenary_lab.scenarios.kinds import Progress
from catenary_lab.scenarios.live import on_processes
from catenary_lab.scenarios.placement.live_schema import LiveSteps
from catenary_lab.scenarios.report import Cell, Findings, Lines, Panel, Table

_QUANTILES = (10, 50, 90)


def serve(scenario: LiveSteps, progress: Progress) -> Findings:
    """Returns what real processes made of a scenario.

    Raises:
        Unavailable: They were not ready in time.
    """
    return report(scenario, on_processes(lambda folder: run_live(scenario, folder, progress)))


def report(scenario: LiveSteps, measured: StepsMeasured) -> Findings:
    """Returns tables, plot and facts of a run."""
    facts = facts_of(scenario, measured)
    objectives, worker = measured.objectives, measured.worker
    out, back = changes(measured.agents)
    notes = (
        f"{scenario.model} on CPU agents, one whole model each; T_dec = "
        f"{objectives.per_token_ns / 1e6:.0f} ms, {scenario.per_token_factor:g} x a lone step; "
        f"T_pre = {objectives.first_token_ns / 1e6:.0f} ms, {scenario.first_token_factor:g} x a "
        f"prompt of {scenario.session_tokens} tokens. A load of 1 is {worker.rate_per_s:.2f} "
        f"requests/s, {worker.sessions:.1f} at a time.",
        f"Agents started: {out}, stopped: {back}. {measured.wall_s:.0f} s in all; the load "
        f"generator was late by {1e3 * measured.send_lag_p99_s:.1f} ms at most times (p99).",
    )
    tables = (_steps_table(facts), _ratios_table(facts))
    return Findings(tables, _panels(scenario, measured), notes, {"live": facts})


def facts_of(scenario: LiveSteps, measured: StepsMeasured) -> dict[str, Any]:
    """Returns the figures of a run as plain JSON values."""
    out, back = changes(measured.agents)
    requests = measured.requests
    return {
        **_figures(requests),
        "held": _share([each.held for each in requests if not each.problem]),
        "objectives": {
            "ttft_ms": measured.objectives.first_token_ns / 1e6,
            "atgt_ms": measured.objectives.per_token_ns / 1e6,
        },
        "worker": asdict(measured.worker),
        "lines": asdict(measured.lines),
        "lines_after": asdict(measured.lines_after),
        "steps": [
            {
                "load": step.load,
                "seconds": step.seconds,
                **_figures([each for each in requests if each.step == number]),
            }
            for number, step in enumerate(scenario.steps)
        ],
        "agents": [asdict(each) for each in measured.agents],
        "agents_peak": max((each.present for each in measured.agents), default=0),
        "agents_last": measured.agents[-1].present if measured.agents else 0,
        "scale_outs": out,
        "scale_ins": back,
        "problems": sorted({each.problem for each in requests if each.problem}),
        "send_lag_p99_s": measured.send_lag_p99_s,
        "wall_s": measured.wall_s,
    }


def _figures(requests: Sequence[Answered]) -> dict[str, Any]:
    complete = [each for each in requests if not each.problem]
    met = sum(each.met_first_token and each.met_per_token for each in complete)
    return {
        "requests": len(requests),
        "lost": len(requests) - len(complete),
        "attainment": met / len(requests) if requests else None,
        "met_ttft": _share([each.met_first_token for each in complete]),
        "met_atgt": _share([each.met_per_token for each in complete]),
        "ttft_ms": _spread([each.first_token_ms for each in complete]),
        "atgt_ms": _spread([each.per_token_ms for each in complete if each.per_token_ms]),
        "ttft_ratio": _spread(
            [
                each.first_token_ms / each.predicted_first_token_ms
                for each in complete
                if each.predicted_first_token_ms
            ]
        ),
        "atgt_ratio": _spread(
            [
                each.per_token_ms / each.predicted_per_token_ms
                for each in complete
                if each.predicted_per_token_ms and each.per_token_ms
            ]
        ),
    }


def _share(met: Sequence[bool]) -> float | None:
    return sum(met) / len(met) if met else None


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Returns quantiles by name, and the number of values; None if there are none."""
    if not values:
        return None
    found = np.percentile(values, _QUANTILES)
    named = {f"p{share}": float(each) for share, each in zip(_QUANTILES, found, strict=True)}
    return {**named, "count": len(values)}


def _steps_table(facts: dict[str, Any]) -> Table:
    header = (
        "load",
        "s",
        "requests",
        "lost",
        "attainment",
        "TTFT p50 / p90, ms",
        "ATGT p50 / p90, ms",
    )
    rows: list[tuple[Cell, ...]] = [
        (
            f"{step['load']:g}",
            f"{step['seconds']:g}",
            str(step["requests"]),
            str(step["lost"]),
            _percent(step["attainment"]),
            _pair(step["ttft_ms"], ".0f"),
            _pair(step["atgt_ms"], ".1f"),
        )
        for step in facts["steps"]
    ]
    return Table("Steps of the load", header, tuple(rows))


def _ratios_table(facts: dict[str, Any]) -> Table:
    header = ("load", "TTFT p10 / p50 / p90", "ATGT p10 / p50 / p90")
    labelled = [(f"{step['load']:g}", step) for step in facts["steps"]] + [("all", facts)]
    rows: list[tuple[Cell, ...]] = [
        (label, _three(each["ttft_ratio"]), _three(each["atgt_ratio"])) for label, each in labelled
    ]
    return Table("Measured over predicted", header, tuple(rows))


def _panels(scenario: LiveSteps, measured: StepsMeasured) -> tuple[Panel, ...]:
    agents: list[tuple[float, float]] = []
    for seen in measured.agents:
        if agents:
            agents.append((seen.at_s, agents[-1][1]))
        agents.append((seen.at_s, float(seen.present)))
    load: list[tuple[float, float]] = []
    at_s = 0.0
    for step in scenario.steps:
        load += [(at_s, step.load), (at_s + step.seconds, step.load)]
        at_s += step.seconds
    over_time = Lines(
        "Load and agents", "s", "workers' worth", {"load": tuple(load), "agents": tuple(agents)}
    )
    complete = [each for each in measured.requests if not each.problem]
    times = {
        "TTFT / T_pre": tuple(
            (each.due_s, each.first_token_ms * 1e6 / measured.objectives.first_token_ns)
            for each in complete
        ),
        "ATGT / T_dec": tuple(
            (each.due_s, each.per_token_ms * 1e6 / measured.objectives.per_token_ns)
            for each in complete
        ),
    }
    return over_time, Lines("Requests", "s", "measured over wanted", times)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


def _pair(spread: dict[str, float] | None, form: str) -> str | None:
    return None if spread is None else f"{spread['p50']:{form}} / {spread['p90']:{form}}"


def _three(spread: dict[str, float] | None) -> str | None:
    if spread is None:
        return None
    return " / ".join(f"{spread[name]:.2f}" for name in ("p10", "p50", "p90"))
