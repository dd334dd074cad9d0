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


# ---- sessions that can be replayed ----


def answered(demand: SessionDemand, count: int, begin_s: int = 0, model: ModelKey = LLM) -> None:
    for number in range(count):
        demand.finished(model, (begin_s + number) * S, 100 + number, number)


def test_sessions_are_logged_in_the_order_of_arrival_once_they_are_enough() -> None:
    demand = SessionDemand(POLICY)
    answered(demand, 199)
    assert demand.logged(LLM, 200 * S) is None
    demand.finished(LLM, 5 * S // 2, 7, 8)  # came early and ended last
    log = demand.logged(LLM, 200 * S)
    assert log is not None
    assert list(log.arrived_ns) == sorted(log.arrived_ns)
    assert (log.prompt_tokens[3], log.output_tokens[3]) == (7, 8)
    assert (log.prompt_tokens[0], log.output_tokens[0]) == (100, 1)  # nothing takes no tokens


def test_a_log_is_bounded_in_number_and_in_age() -> None:
    demand = SessionDemand(POLICY)
    answered(demand, 5_000)
    log = demand.logged(LLM, 5_000 * S)
    assert log is not None
    assert len(log) == 2_000
    assert log.arrived_ns[0] == 3_000 * S
    later = demand.logged(LLM, 7_000 * S)
    assert later is not None
    assert later.arrived_ns[0] > 3_400 * S
    assert demand.logged(LLM, 9_000 * S) is None
    for number in range(300):
        answered(demand, 1, model=ModelKey(f"m{number}", "1"))
    assert len(demand._answered) == 256


def test_the_first_log_asks_for_chains_once() -> None:
    demand = SessionDemand(POLICY)
    demand.planned({LLM: POLICY.usual}, 0)
    answered(demand, 199)
    assert demand.decide(210 * S) == ""
    answered(demand, 1, begin_s=199)
    assert demand.decide(20 * S) == ""  # too soon after the last plan
    assert "200 sessions" in demand.decide(210 * S)
    assert demand.decide(220 * S) == ""
    other = SessionDemand(POLICY)
    answered(other, 200)
    load = SessionLoad(0.1, 100.0, 50.0, other.logged(LLM, 200 * S))
    other.planned({LLM: load}, 0)
    assert other.decide(300 * S) == ""  # these chains were tuned by a log
