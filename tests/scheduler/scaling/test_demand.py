from __future__ import annotations

from catenary_scheduler.scaling import DemandPolicy, SessionDemand, SessionLoad
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey

LLM = ModelKey("llm", "1")
S = NANOSECONDS_PER_SECOND
POLICY = DemandPolicy(
    usual=SessionLoad(0.1, 100.0, 50.0),
    lasting_ns=10 * S,
    interval_ns=30 * S,
    time_constant_ns=20 * S,
)


def busy(demand: SessionDemand, begin_s: int, end_s: int, per_s: int, prompt: int = 100) -> None:
    for second in range(begin_s, end_s):
        for _ in range(per_s):
            demand.arrived(LLM, prompt, second * S)
            demand.generated(LLM, 50, second * S)


def test_without_sessions_the_usual_is_expected() -> None:
    demand = SessionDemand(POLICY)
    assert demand.load(LLM, 5 * S) == POLICY.usual
    demand.arrived(LLM, 1_000, 5 * S)
    few = demand.load(LLM, 5 * S)
    assert few.rate_per_s == POLICY.usual.rate_per_s
    assert 100 < few.prompt_tokens < 200  # one long prompt says little


def test_rate_and_lengths_follow_what_arrives() -> None:
    demand = SessionDemand(POLICY)
    busy(demand, 0, 200, per_s=4, prompt=400)
    load = demand.load(LLM, 200 * S)
    assert 3.5 < load.rate_per_s < 4.5
    assert 300 < load.prompt_tokens < 400
    assert 45 < load.output_tokens < 55


def test_a_change_by_a_factor_must_last_and_plans_are_apart() -> None:
    demand = SessionDemand(POLICY)
    busy(demand, 0, 100, per_s=2)
    demand.planned({LLM: demand.load(LLM, 100 * S)}, 100 * S)
    busy(demand, 100, 140, per_s=2)
    assert demand.decide(140 * S) == ""
    said = {}
    for second in range(140, 260):
        busy(demand, second, second + 1, per_s=10)
        said[second] = demand.decide(second * S)
    first = min(second for second, text in said.items() if text)
    assert first >= 150  # it lasted ten seconds at least
    assert "sessions/s" in said[first]
    demand.planned({LLM: demand.load(LLM, 260 * S)}, 260 * S)
    assert demand.decide(261 * S) == ""


def test_a_change_that_goes_away_is_forgotten() -> None:
    demand = SessionDemand(POLICY)
    busy(demand, 0, 100, per_s=2)
    demand.planned({LLM: demand.load(LLM, 100 * S)}, 100 * S)
    busy(demand, 140, 142, per_s=150)  # a burst
    assert demand.decide(142 * S) == ""
    busy(demand, 142, 300, per_s=2)
    assert all(demand.decide(second * S) == "" for second in range(210, 300))


def test_nothing_is_due_before_a_plan() -> None:
    demand = SessionDemand(POLICY)
    busy(demand, 0, 100, per_s=20)
    assert demand.decide(100 * S) == ""
