"""Worker shapes: eq. 5-6, and Table 3 of the paper where the coefficients are measured."""

from __future__ import annotations

import csv
import json
from statistics import mean

import pytest

from catenary_scheduler.planning.latency import (
    DeviceScaling,
    DeviceShape,
    WorkerDemand,
    best_shape,
    fit_compute,
    throughput,
)
from catenary_services.domain.latency import LatencyLines
from catenary_services.errors import PlanInfeasible
from reference_data import reference

A100_BYTES = 80e9


def coefficients(model: str, kinds: tuple[str, ...]) -> list[DeviceShape]:
    fits = json.loads(reference("llm/perf_coefficients.json").read_text())["fits"]
    return [
        DeviceShape(
            fit["tp"],
            LatencyLines(*(1e6 * fit[name] for name in ("k1", "c1", "k2", "c2", "c3", "t1"))),
        )
        for fit in fits
        if fit["model"] == model and fit["gpu"] == "a100-80gb" and fit["kind"] in kinds
    ]


def demand_of(model: str, per_token_ms: float) -> WorkerDemand:
    fits = json.loads(reference("llm/perf_coefficients.json").read_text())["fits"]
    sizes = next(fit for fit in fits if fit["model"] == model)
    with reference("llm/sharegpt_first_turn.csv").open() as file:
        rows = [(int(row["l_in"]), int(row["l_out"])) for row in csv.DictReader(file)]
    # A session holds its prompt and on average half of its answer.
    context = mean(prompt + answer / 2 for prompt, answer in rows)
    return WorkerDemand(
        A100_BYTES,
        sizes["weights_bytes"],
        context * sizes["kv_bytes_per_token"],
        context,
        per_token_ms * 1e6,
    )


@pytest.mark.parametrize(
    ("model", "per_token_ms", "kind", "devices"),
    [
        ("llama2-70b", 75, "composed+offset", 2),
        # Not what the paper says: there 70b takes 2 and the others 1. With an objective of 1.3 times
        # a lone step, one device takes a batch of some 25 and two together more than twice that,
        # by coefficients for two and four devices that carry a warning in the data set.
        ("llama2-70b", 75, "measured-end-to-end", 4),
        ("llama2-13b", 30, "composed+offset", 2),
        ("llama2-7b", 15, "composed+offset", 2),
    ],
)
def test_table_3_of_the_paper_on_a100(
    model: str, per_token_ms: float, kind: str, devices: int
) -> None:
    """Its row for 70b follows from coefficients composed of kernel times, the others do not."""
    shapes = coefficients(model, (kind,))
    assert len(shapes) > 1
    assert best_shape(demand_of(model, per_token_ms), shapes).devices == devices


def test_a_tenth_kept_back_leaves_70b_a_third_of_its_caches() -> None:
    """Pitfall 5: two devices hold 67 k tokens of 70b without a reserve, 18 k with one.

    That reserve alone turns the answer from two devices to four.
    """
    demand, shapes = (
        demand_of("llama2-70b", 75),
        coefficients("llama2-70b", ("composed+offset",)),
    )
    reserved = WorkerDemand(
        0.9 * demand.device_bytes,
        demand.model_bytes,
        demand.session_bytes,
        demand.context_tokens,
        demand.per_token_ns,
    )
    per_session = demand.session_bytes / demand.context_tokens
    held = [(2 * each.device_bytes - each.model_bytes) / per_session for each in (demand, reserved)]
    assert held == pytest.approx([67_000, 18_000], rel=0.03)
    assert best_shape(demand, shapes).devices == 2
    assert best_shape(reserved, shapes).devices == 4


def lines(k2: float, c2: float, c3: float) -> LatencyLines:
    return LatencyLines(1.0, 1.0, k2, c2, c3)


def test_throughput_is_the_smaller_of_full_caches_and_the_objective() -> None:
    demand = WorkerDemand(100.0, 50.0, 5.0, 10.0, 100.0)
    # Caches: 50 / 5 = 10 sessions, a step of 10 * 10 * 0.1 + 10 * 1 + 20 = 40: 0.25 tokens per time.
    # Objective: (100 - 20) / (1 + 1) = 40 sessions in 100: 0.4.
    assert throughput(demand, DeviceShape(1, lines(0.1, 1.0, 20.0))) == pytest.approx(0.25)
    tight = WorkerDemand(100.0, 50.0, 5.0, 10.0, 30.0)
    # (30 - 20) / 2 = 5 sessions in 30.
    assert throughput(tight, DeviceShape(1, lines(0.1, 1.0, 20.0))) == pytest.approx(5 / 30)


def test_without_lines_eq_5_says_how_long_a_full_step_takes() -> None:
    demand = WorkerDemand(100.0, 50.0, 5.0, 10.0, 100.0)
    scaling = DeviceScaling(compute_ns=80.0, constant_ns=10.0, transfer_ns=20.0)
    assert scaling.step_ns(1) == 90.0
    assert scaling.step_ns(4) == 20.0 + 10.0 + 15.0
    assert throughput(demand, DeviceShape(4), scaling) == pytest.approx((350 / 5) / (4 * 45.0))
    with pytest.raises(PlanInfeasible):
        throughput(demand, DeviceShape(4))


def test_eq_5_is_fitted_to_step_times() -> None:
    scaling = DeviceScaling(80.0, 10.0)
    found = fit_compute([(count, scaling.step_ns(count)) for count in (1, 2, 4, 8)])
    assert (found.compute_ns, found.constant_ns) == pytest.approx((80.0, 10.0))
    rising = fit_compute([(1, 10.0), (2, 15.0), (4, 17.5)])
    assert [rising.step_ns(count) for count in (1, 2, 4)] == pytest.approx([10.0, 15.0, 17.5])


def test_what_cannot_hold_the_model_or_the_objective_is_refused() -> None:
    too_large = WorkerDemand(10.0, 50.0, 5.0, 10.0, 100.0)
    with pytest.raises(PlanInfeasible):
        best_shape(too_large, [DeviceShape(count, lines(0.1, 1.0, 20.0)) for count in (1, 2, 4)])
    too_slow = WorkerDemand(100.0, 50.0, 5.0, 10.0, 15.0)
    with pytest.raises(PlanInfeasible):
        best_shape(too_slow, [DeviceShape(1, lines(0.1, 1.0, 20.0))])
