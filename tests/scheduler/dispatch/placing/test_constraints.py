"""The literal constraints and Algorithm 1: golden cases, and the cache's peak against its twin."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.dispatch.placing.constraints import (
    WorkerConstraint,
    examine,
    kv_peak,
    place,
)
from catenary_scheduler.dispatch.placing.jobs import Job, WorkerLimits
from catenary_services.domain.latency import LatencyLines
from reference_data import reference

MS = 1e6


def golden() -> list[Any]:
    return list(json.loads(reference("llm/aladdin_placement.json").read_text())["cases"])


def job(record: dict[str, Any]) -> Job:
    return Job(
        record["l_in"], record["l_pred"], record["l_out"], record["t_dec"] * MS, record["new"]
    )


def agrees(found: WorkerConstraint, expected: dict[str, Any], unit: float) -> bool:
    pairs = ((found.used, expected["lhs"]), (found.allowed, expected["rhs"]))
    return found.ok == expected["ok"] and all(
        (mine is None) == (theirs is None)
        and (mine is None or mine / unit == pytest.approx(theirs))
        for mine, theirs in pairs
    )


@pytest.mark.parametrize("case", golden(), ids=lambda case: str(case["name"]))
def test_every_golden_case_is_decided_and_weighed_as_it_says(case: dict[str, Any]) -> None:
    perf, params = case["perf"], case["params"]
    k1, c1, k2, c2, c3, t1 = (perf[name] * MS for name in ("k1", "c1", "k2", "c2", "c3", "t1"))
    lines = LatencyLines(k1, c1, k2, c2, c3, t1, cache_token=perf["h"], cache_session=perf["j"])
    limits = WorkerLimits(
        round(params["T_pre"] * MS),
        round(params["T_dec"] * MS),
        params["M"],
        params["gamma"],
        params["theta"],
        params["split_decode"],
    )
    workers = [[job(each) for each in worker] for worker in case["workers"]]
    request = job(case["request"])
    assert place(lines, limits, workers, request) == case["expect"]["worker"]
    for expected in case["expect"]["constraints"]:
        at = expected["worker"]
        found = examine(lines, limits, () if at == "new" else workers[at], request)
        assert found.norm == pytest.approx(expected["norm"], abs=1e-5)
        assert agrees(found.context, expected["b"], 1.0)
        assert agrees(found.prompts, expected["c"], MS)
        assert agrees(found.slack, expected["d"], MS)
        assert agrees(found.cache, expected["e"], 1.0)


JOBS = st.lists(
    st.builds(
        Job, st.integers(1, 60), st.integers(1, 40), st.integers(0, 50), st.just(0.0), st.booleans()
    ),
    max_size=8,
)


@given(JOBS, st.floats(0, 4), st.floats(0, 9))
def test_the_cache_peaks_where_step_by_step_counting_says(
    jobs: list[Job], token: float, session: float
) -> None:
    lines = LatencyLines(1.0, 1.0, 1.0, 1.0, 1.0, cache_token=token, cache_session=session)
    steps = max((round(each.final_tokens) - each.generated_tokens for each in jobs), default=0)
    peak = max(
        sum(
            lines.cache(each.prompt_tokens + each.generated_tokens + step)
            for each in jobs
            if each.generated_tokens + step <= each.final_tokens
        )
        for step in range(steps + 1)
    )
    assert kv_peak(lines, jobs) == pytest.approx(peak)


def test_no_objective_means_no_bound() -> None:
    lines = LatencyLines(1.0, 1.0, 1.0, 1.0, 1.0)
    busy = [Job(10, 10, 1, 1e9, is_new=False)]
    verdict = examine(lines, WorkerLimits(0, 0, float("inf")), busy, Job(10**6, 10**6))
    assert verdict.ok
    bounds = (verdict.context, verdict.prompts, verdict.slack, verdict.cache)
    assert [each.allowed for each in bounds] == [None] * 4
