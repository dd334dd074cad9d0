"""Simulated and live load factors of one scenario, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_lab.live.scenario import LiveFindings, LiveRun, LiveScenario
from catenary_lab.pools import compared
from catenary_lab.pools.problems import only, with_gpus
from catenary_lab.scenarios.kinds import Progress
from catenary_lab.scenarios.live import on_processes
from catenary_lab.scenarios.pools.context import context_of
from catenary_lab.scenarios.pools.jobs import dataset_at
from catenary_lab.scenarios.pools.schema import Live, matching
from catenary_lab.scenarios.report import Cell, Findings, Lines, Table, mean
from catenary_scheduler.planning.pooled.problem import PoolingProblem


def serve(scenario: Live, progress: Progress) -> Findings:
    """Returns the findings of a scenario in the simulator and on real processes, side by side."""
    dataset = dataset_at(context_of(scenario).dataset)
    problem = dataset.problem(scenario.instance)
    names = matching(scenario.models, [model.name for model in problem.models], "models")
    groups = [names] if scenario.together else [[name] for name in names]
    return report(scenario, [_compared(scenario, only(problem, each), progress) for each in groups])


def _compared(scenario: Live, problem: PoolingProblem, progress: Progress) -> LiveFindings:
    problem = compared.complete(with_gpus(problem, scenario.gpus, levels=(1,)), None)
    both = LiveScenario(scenario, problem, compared.make(problem, "catenary"))
    return on_processes(lambda folder: both.compare(folder, progress))


def report(scenario: Live, findings: Sequence[LiveFindings]) -> Findings:
    """Returns load factors by model, and attainment and latency by run."""
    simulated_all = {key: f for found in findings for key, f in found.simulated.items()}
    live_all = {key: f for found in findings for key, f in found.live.items()}
    models = list(dict.fromkeys(model for _, model in live_all))
    runs = [run for found in findings for run in found.runs]
    rows: list[tuple[Cell, ...]] = []
    for model in (*models, "mean"):
        simulated = mean([f for (_, each), f in simulated_all.items() if model in (each, "mean")])
        live = mean([f for (_, each), f in live_all.items() if model in (each, "mean")])
        apart = None if live is None or simulated is None else f"{live - simulated:+.3f}"
        rows.append((model, simulated, live, apart))
    share = 100 * scenario.target
    tables = (
        Table(
            f"Largest load factor with {share:g} % in time",
            ("model", "simulated", "live", "live - simulated"),
            tuple(rows),
        ),
        Table(
            "Every live run beside its simulation (same arrivals; latencies undilated)",
            (
                "run",
                "model",
                "requests",
                "in time, simulated",
                "in time, live",
                "p50 ms, simulated",
                "p50 ms, live",
                "p99 ms, simulated",
                "p99 ms, live",
            ),
            tuple(row for run in runs for row in _run_rows(run, scenario.dilation)),
        ),
    )
    cores = mean([run.cpu_cores for run in runs]) or 0.0
    lag_ms = max((run.live.send_lag_p99_ms for run in runs), default=0.0)
    processes = max((found.processes for found in findings), default=0)
    agents = max((found.agents for found in findings), default=0)
    return Findings(
        tables,
        tuple(_panel(runs, model) for model in models),
        (
            f"{processes} processes and the load generator, {agents} of them agents;"
            f" time dilated {scenario.dilation:g} times; {scenario.duration_s:g} s per run on the"
            f" wall clock, seeds {', '.join(map(str, scenario.seeds))}.",
            f"On average they used {cores:.2f} CPU cores; the load generator was at most"
            f" {lag_ms:.1f} ms late (p99), which counts against the live run.",
        ),
        _facts(findings, runs, rows),
    )


def _run_rows(run: LiveRun, dilation: float) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for name, live in run.live.models.items():
        simulated = run.simulated.model(name)
        row: tuple[Cell, ...] = (
            f"{run.load_factor:.2f}, seed {run.seed}",
            name,
            str(live.requests),
            f"{100 * simulated.attainment:.2f} %",
            f"{100 * live.attainment:.2f} %",
            _ms(simulated.p50_ms),
            _ms(live.percentile_ms(50), dilation),
            _ms(simulated.p99_ms),
            _ms(live.percentile_ms(99), dilation),
        )
        rows.append(row)
    return rows


def _ms(value: float | None, dilation: float = 1.0) -> str | None:
    return None if value is None else f"{value / dilation:.1f}"


def _panel(runs: Sequence[LiveRun], model: str) -> Lines:
    def points(live: bool) -> tuple[tuple[float, float], ...]:
        by_factor: dict[float, list[float]] = {}
        for run in runs:
            if model not in run.live.models:
                continue
            share = run.live.models[model] if live else run.simulated.model(model)
            by_factor.setdefault(run.load_factor, []).append(share.attainment)
        return tuple((factor, mean(by_factor[factor]) or 0.0) for factor in sorted(by_factor))

    series = {"simulated": points(False), "live": points(True)}
    return Lines(model, "load factor", "SLO attainment", series)


def _facts(
    findings: Sequence[LiveFindings], runs: Sequence[LiveRun], rows: list[tuple[Cell, ...]]
) -> dict[str, object]:
    return {
        "processes": [found.processes for found in findings],
        "agents": [found.agents for found in findings],
        "load_factors": [
            {"model": model, "simulated": simulated, "live": live}
            for model, simulated, live, _ in rows
        ],
        "runs": [
            {
                "seed": run.seed,
                "load_factor": run.load_factor,
                "cpu_cores": run.cpu_cores,
                "models": {
                    name: {
                        "requests": live.requests,
                        "late": live.late,
                        "refused": live.refused,
                        "attainment": live.attainment,
                        "simulated_attainment": run.simulated.model(name).attainment,
                    }
                    for name, live in run.live.models.items()
                },
            }
            for run in runs
        ],
    }
