"""Whole runs: the scheduler's own dispatch code in a simulated cluster."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from catenary_lab.pools.reactive import ReactiveDispatcher
from catenary_scheduler.dispatch import PooledDispatcher
from catenary_scheduler.dispatch.events import (
    Command,
    DispatchBatch,
    Dispatcher,
    Event,
    StageReported,
)
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_services.domain.ids import AgentId, ServerId
from catenary_services.errors import InvalidInput
from catenary_simulator import (
    Disturbance,
    GammaArrivals,
    SimulationOptions,
    SimulationResult,
    simulate,
)
from catenary_simulator.options import DispatcherFactory
from catenary_simulator.simulate import SimulationSetup, run, set_up
from scheduling_cases.tiny_pools import gpu_class, model, partition, pipeline, plan, two_stages

ROUGH = Disturbance(
    compute_cv=0.2,
    transfer_cv=0.2,
    straggler_probability=0.01,
    straggler_factor=4.0,
    report_delay_ns=300_000,
    clock_error_ns=20_000,
)
BASE = {"m": 1000.0, "n": 400.0}


def crowded() -> tuple[PoolingProblem, PooledPlan]:
    """Two models, batches, virtual GPUs, and servers whose links they share."""
    problem = PoolingProblem(
        (gpu_class("fast", 4, 2, 4.0), gpu_class("slow", 8, 4, 4.0)),
        (
            model("m", slo_ms=60, block_ms={"fast": 1.0, "slow": 2.0}, cut_bytes=300_000),
            model("n", slo_ms=80, block_ms={"fast": 1.5, "slow": 3.0}, cut_bytes=500_000),
        ),
    )
    m = [
        pipeline(
            2,
            1000.0,
            partition("slow", 1, (0, 2), 3),
            partition("fast", 2, (2, 4), 4),
            latency_ms=11,
        ),
        pipeline(1, 125.0, partition("slow", 1, (0, 4), 1), latency_ms=8),
    ]
    n = [
        pipeline(
            3,
            500.0,
            partition("slow", 1, (0, 1), 2),
            partition("slow", 1, (1, 2), 2),
            partition("fast", 1, (2, 4), 2),
            latency_ms=27,
        ),
    ]
    return problem, plan({"m": m, "n": n})


class Watched:
    """Passes everything on and keeps orders and reports."""

    def __init__(self, inner: Dispatcher) -> None:
        self.inner = inner
        self.orders: dict[int, DispatchBatch] = {}
        self.reports: list[StageReported] = []

    def handle(self, event: Event, now: int) -> list[Command]:
        if isinstance(event, StageReported):
            self.reports.append(event)
        commands = self.inner.handle(event, now)
        self.orders.update(
            {each.batch: each for each in commands if isinstance(each, DispatchBatch)}
        )
        return commands

    def next_wakeup(self) -> int | None:
        return self.inner.next_wakeup()


def watched_run(options: SimulationOptions) -> tuple[SimulationSetup, SimulationResult, Watched]:
    watchers: list[Watched] = []

    def wrap(inner: Dispatcher) -> Dispatcher:
        watchers.append(Watched(inner))
        return watchers[0]

    setting = set_up(*crowded())
    return setting, run(setting, options, wrap), watchers[0]


@pytest.mark.parametrize("dispatch", [PooledDispatcher, ReactiveDispatcher])
@pytest.mark.parametrize("load", [0.6, 1.6])
@pytest.mark.parametrize("disturbance", [Disturbance(), ROUGH], ids=["exact", "rough"])
def test_every_request_ends_exactly_once(
    dispatch: DispatcherFactory, load: float, disturbance: Disturbance
) -> None:
    options = SimulationOptions(BASE, load, 2.0, 3, GammaArrivals(2.0), dispatch, disturbance)
    result = simulate(*crowded(), options)
    for each in result.models:
        assert each.requests == each.finished + each.late + each.dropped
        assert each.requests == pytest.approx(BASE[each.name] * load * 2.0, rel=0.3)
    assert result.counters["open_requests"] == 0
    assert result.counters["batches_in_flight"] == 0
    assert result.counters["queued_rows"] == 0


@pytest.mark.parametrize("dispatch", [PooledDispatcher, ReactiveDispatcher])
@pytest.mark.parametrize("disturbance", [Disturbance(), replace(ROUGH, clock_error_ns=0)])
def test_no_device_and_no_link_is_ever_used_twice_at_once(
    dispatch: DispatcherFactory, disturbance: Disturbance
) -> None:
    options = SimulationOptions(BASE, 1.1, 2.0, 5, GammaArrivals(2.0), dispatch, disturbance)
    setting, _, watched = watched_run(options)
    assert len(watched.reports) > 1000
    servers: dict[AgentId, ServerId] = {agent.agent_id: agent.server for agent in setting.agents}
    busy: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for report in watched.reports:
        path = watched.orders[report.batch].path
        here = path[report.position].agent
        busy[here].append((report.compute_start_ns, report.compute_end_ns))
        # Of a reactive batch only the receiver is known, and its rows come in several transfers.
        if report.transfer_start_ns is not None and dispatch == "reservation":
            assert report.transfer_end_ns is not None
            sent = (report.transfer_start_ns, report.transfer_end_ns)
            busy[f"up {servers[path[report.position - 1].agent]}"].append(sent)
            busy[f"down {servers[here]}"].append(sent)
    assert any(name.startswith("up") for name in busy) == (dispatch == "reservation")
    for name, intervals in busy.items():
        intervals.sort()
        for (_, end), (start, _) in pairwise(intervals):
            assert end <= start, name


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    def outcome(seed: int) -> tuple[object, ...]:
        options = SimulationOptions(BASE, 1.0, 1.0, seed, disturbance=ROUGH)
        result = simulate(*crowded(), options)
        return result.models, result.utilisation, result.events, result.counters

    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)


def test_without_disturbance_and_below_capacity_nothing_is_late() -> None:
    result = simulate(*two_stages(), SimulationOptions({"m": 1000.0}, 0.8, 3.0))
    assert result.model("m").attainment == 1.0
    assert result.model("m").p50_ms == pytest.approx(7.0, abs=2.0)
    # 800 a second, 4 ms on one of 4 slow GPUs and 2 ms on one of 2 fast ones.
    assert result.utilisation == pytest.approx({"fast": 0.8, "slow": 0.8}, abs=0.04)


def test_noise_makes_the_book_wrong_and_corrections_mend_it() -> None:
    exact = simulate(*crowded(), SimulationOptions(BASE, 0.8, 2.0))
    rough = simulate(*crowded(), SimulationOptions(BASE, 0.8, 2.0, disturbance=ROUGH))
    assert exact.counters["late_corrections"] == 0
    assert rough.counters["late_corrections"] > 0
    assert rough.counters["displaced_batches"] > 0
    exact_p99, rough_p99 = exact.model("m").p99_ms, rough.model("m").p99_ms
    assert exact_p99 is not None
    assert rough_p99 is not None
    assert rough_p99 > 1.2 * exact_p99
    assert rough.model("m").attainment > 0.95


def test_more_than_the_plan_can_do_is_dropped_rather_than_late() -> None:
    result = simulate(*two_stages(), SimulationOptions({"m": 1000.0}, 2.0, 3.0))
    served = result.model("m")
    assert served.late == 0
    # Both pools do 1000 a second; what is queued at the end is served as well.
    assert served.finished == pytest.approx(3000, rel=0.03)
    assert min(result.utilisation.values()) > 0.97


def test_batches_grow_with_the_load() -> None:
    problem, made = two_stages(batch=4)
    few = simulate(problem, made, SimulationOptions({"m": 1000.0}, 0.05, 3.0)).model("m")
    many = simulate(problem, made, SimulationOptions({"m": 1000.0}, 1.2, 3.0)).model("m")
    assert few.mean_batch is not None
    assert many.mean_batch is not None
    assert few.mean_batch < many.mean_batch <= 4.0


def test_decisions_are_timed_and_events_counted() -> None:
    result = simulate(*two_stages(), SimulationOptions({"m": 1000.0}, 0.5, 1.0))
    assert result.dispatch_us is not None
    p50, p99 = result.dispatch_us
    assert 0 < p50 <= p99
    # Arrival, two computes and their reports, a transfer, and the result.
    assert result.events >= 7 * result.model("m").requests
    assert result.events_per_second > 0


def test_a_model_without_a_rate_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no rate for n"):
        simulate(*crowded(), SimulationOptions({"m": 100.0}))
