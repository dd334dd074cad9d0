"""A scenario of whole systems on real processes, beside its simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from catenary_lab.live.chains.emulation import Emulation
from catenary_lab.live.chains.run import ChainsMeasured, ChainsRun, run_live
from catenary_lab.scenarios.cells import rounded
from catenary_lab.scenarios.chains import serve
from catenary_lab.scenarios.chains.jobs import Outcome, SystemJob
from catenary_lab.scenarios.chains.schema import Serve
from catenary_lab.scenarios.chains.schema_parts import LiveSpec
from catenary_lab.scenarios.kinds import Progress, Results
from catenary_lab.scenarios.live import on_processes
from catenary_lab.scenarios.report import Bars, Cell, Findings, Table
from catenary_scheduler.dispatch.chained import POLICIES
from catenary_services.errors import InvalidInput
from catenary_simulator.chains.result import ChainResult

_FIGURES = {
    "mean_response_s": "mean",
    "median_s": "median",
    "p95_s": "p95",
    "p99_s": "p99",
    "mean_wait_s": "mean wait",
    "mean_service_s": "mean service",
}
_SHARES = (10, 50, 90)


@dataclass(frozen=True, slots=True)
class Pair:
    """One system on one workload, simulated and live."""

    label: str
    simulated: ChainResult
    live: ChainsMeasured

    @property
    def stretch(self) -> list[float]:
        """Returns quantiles (10, 50, 90 %) of live over simulated service, session by session."""
        if self.live.lost or self.simulated.rejected:
            return []
        shares = self.live.result.services_s / self.simulated.services_s
        return [float(each) for each in np.percentile(shares, _SHARES)]


def beside(scenario: Serve, results: Results, progress: Progress) -> Findings:
    """Returns what real processes make of a scenario with a `live` section.

    Args:
        scenario: The scenario.
        results: The results of its simulations.
        progress: Told what is going on.
    """
    spec = scenario.live
    assert spec is not None  # the runner makes sure of it
    pairs = list(_pairs(scenario, spec, results, progress))
    return Findings(
        (_beside(pairs), _accounts(pairs)),
        (_picture(scenario, pairs),) if pairs else (),
        _notes(spec, pairs),
        {"live": [_facts(pair, spec) for pair in pairs]},
    )


def _pairs(scenario: Serve, spec: LiveSpec, results: Results, progress: Progress) -> Iterator[Pair]:
    for row in serve.rows(scenario):
        for system in scenario.systems:
            for job in row.jobs(system) if system.planner == "catenary" else ():
                outcome: Outcome = results[job]
                if outcome.result is None:
                    continue
                label = ", ".join(filter(None, (row.label, system.label)))
                progress(f"live: {label}")
                measured = _serve(job, spec, progress)
                yield Pair(label, outcome.result, measured)


def _serve(job: SystemJob, spec: LiveSpec, progress: Progress) -> ChainsMeasured:
    if job.system.policy not in POLICIES:
        raise InvalidInput("policy", f"real schedulers have {', '.join(POLICIES)} only")
    cluster, workload, composition = job.composed()
    emulation = Emulation(cluster, spec.dilation, spec.session_tokens, spec.shared_device)
    run = ChainsRun(emulation, composition, workload, job.system.policy)
    return on_processes(lambda folder: run_live(run, folder, progress))


def _beside(pairs: list[Pair]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in pairs:
        simulated, live = pair.simulated.to_json(), pair.live.result.to_json()
        rows.append((f"{pair.label}: simulated", *(rounded(simulated[key]) for key in _FIGURES)))
        rows.append(("- live", *(rounded(live[key]) for key in _FIGURES)))
        rows.append(("- difference", *(_apart(simulated[key], live[key]) for key in _FIGURES)))
    return Table(
        "Response, waiting and service in s, simulated and live (dilation taken out)",
        ("", *_FIGURES.values()),
        tuple(rows),
    )


def _accounts(pairs: list[Pair]) -> Table:
    header = (
        "",
        "requests",
        "lost",
        "moved",
        "reservations left",
        "processes",
        "CPU cores",
        "generator late p99, ms",
        "run, s",
        "live / simulated service, 10 / 50 / 90 %",
    )
    rows: list[tuple[Cell, ...]] = []
    for pair in pairs:
        live = pair.live
        rows.append(
            (
                pair.label,
                str(len(pair.simulated.waits_s)),
                str(live.lost),
                str(live.moved),
                str(live.left_reservations),
                str(live.processes),
                f"{live.cpu_cores:.2f}",
                f"{1e3 * live.send_lag_p99_s:.1f}",
                f"{live.wall_s:.0f}",
                " / ".join(f"{each:.3f}" for each in pair.stretch) or None,
            )
        )
    return Table("What the processes say of it", header, tuple(rows))


def _picture(scenario: Serve, pairs: list[Pair]) -> Bars:
    labels = tuple(pair.label for pair in pairs)
    series = {
        "simulated": tuple(pair.simulated.mean_response_s for pair in pairs),
        "live": tuple(pair.live.result.mean_response_s for pair in pairs),
    }
    return Bars(scenario.title, "mean response (s)", labels, series)


def _notes(spec: LiveSpec, pairs: list[Pair]) -> tuple[str, ...]:
    processes = max((pair.live.processes for pair in pairs), default=0)
    how = (
        "sessions of an agent share its steps; prompts are computed in chunks, one after the other"
        if spec.shared_device
        else "every session computes as if it were alone on its agents"
    )
    return (
        f"Live: {processes} processes and the load generator over real gRPC and frames from agent"
        f" to agent; time dilated {spec.dilation:g} times; {how}. Response counts from the moment"
        " a request was due to its last token at the client; waiting to the scheduler's order to"
        " start.",
    )


def _facts(pair: Pair, spec: LiveSpec) -> dict[str, Any]:
    live = pair.live
    return {
        "label": pair.label,
        "dilation": spec.dilation,
        "shared_device": spec.shared_device,
        "simulated": pair.simulated.to_json(),
        "live": live.result.to_json(),
        "service_ratio": dict(zip(("p10", "p50", "p90"), pair.stretch, strict=False)),
        "lost": live.lost,
        "problems": list(live.problems),
        "moved": live.moved,
        "left_reservations": live.left_reservations,
        "left_sessions": live.left_sessions,
        "processes": live.processes,
        "cpu_cores": live.cpu_cores,
        "send_lag_p99_s": live.send_lag_p99_s,
        "wall_s": live.wall_s,
    }


def _apart(simulated: float | None, live: float | None) -> str | None:
    if simulated is None or live is None:
        return None
    if simulated < 0.01:
        return f"{live - simulated:+.2f} s"
    return f"{100 * (live / simulated - 1):+.1f} %"
