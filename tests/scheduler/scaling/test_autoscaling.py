"""Control of the number of workers, over virtual ones: steady, quick to help, slow to take away."""

from __future__ import annotations

import pytest

from catenary_scheduler.dispatch.events import Scale
from catenary_scheduler.scaling import ModelScaling, ScalingPolicy, SessionLengths, WorkerStatistics
from catenary_services.domain.ids import ModelKey
from scheduling_cases.virtual_load import LENGTHS, LINES, OBJECTIVES, VirtualLoad

S = 10**9
MODEL = ModelKey("llm", "1")


def facts(workers: int = 1, **changes: object) -> WorkerStatistics:
    values = {
        "workers": workers,
        "sessions": 0,
        "slots": 8 * workers,
        "lines": LINES,
        "objectives": OBJECTIVES,
        "most": 8,
        "expected": LENGTHS,
        **changes,
    }
    return WorkerStatistics(**values)  # type: ignore[arg-type]


def ticking(
    scaling: ModelScaling, given: WorkerStatistics, since_s: int, seconds: int
) -> list[Scale]:
    orders = (scaling.decide(given, (since_s + s) * S) for s in range(seconds))
    return [order for order in orders if order is not None]


@pytest.mark.parametrize(("rate", "seconds"), [(0.3, 600), (3.0, 300), (10.0, 100)])
def test_constant_load_does_not_flap(rate: float, seconds: int) -> None:
    for seed in (1, 2):
        load = VirtualLoad(ModelScaling(MODEL), lambda _: rate, seed=seed).run(100)
        settled, met, finished = len(load.orders), load.met, load.finished
        load.run(seconds)
        # At most once there and back: a worker that the start ordered too many, a false alarm.
        assert len(load.orders) - settled <= 2, load.orders
        assert (load.met - met) / (load.finished - finished) >= 0.95


def test_a_step_is_answered_within_seconds_and_taken_back_after_it() -> None:
    load = VirtualLoad(ModelScaling(MODEL), lambda s: 8.0 if 200 < s <= 400 else 2.0)
    load.run(199)
    before = len(load.serving)
    load.run(15)
    assert load.scaling.wanted >= 2 * before  # 14 s into the step, most of it ordered
    load.run(35)
    peak = len(load.serving)
    met, finished = load.met, load.finished
    load.run(130)
    assert (load.met - met) / (load.finished - finished) >= 0.95
    load.run(250)
    assert len(load.serving) <= before < peak


def test_ten_times_the_load_from_a_cold_start_is_not_seen_through_short_answers_only() -> None:
    # The first answers that finish are the short ones: they must not pass for the mean.
    load = VirtualLoad(ModelScaling(MODEL), lambda _: 12.0).run(12)
    assert load.scaling.wanted >= 5
    assert load.scaling.lengths(LENGTHS).answer_tokens == pytest.approx(100.0, rel=0.3)


def test_cold_starts_are_measured() -> None:
    scaling = ModelScaling(MODEL)
    assert scaling.cold_start_ns == 20 * S
    VirtualLoad(scaling, lambda s: 1.0 if s < 60 else 6.0, cold_start_s=8.0).run(200)
    assert 8 * S <= scaling.cold_start_ns <= 15 * S


def test_sessions_that_wait_bring_one_more_worker_but_a_shrinking_backlog_does_not() -> None:
    scaling = ModelScaling(MODEL)
    orders = ticking(scaling, facts(queued=3), 100, 6)
    assert [order.workers for order in orders] == [2]
    assert "wait" in orders[0].reason
    patient = ModelScaling(MODEL)
    for second in range(20):
        given = facts(workers=1, queued=40 - 2 * second)
        assert patient.decide(given, (100 + second) * S) is None


def test_help_that_is_on_its_way_is_waited_for() -> None:
    scaling = ModelScaling(MODEL, ScalingPolicy(cold_start_ns=10 * S))
    orders = ticking(scaling, facts(queued=3), 100, 25)
    assert len(orders) == 1  # not one more every second
    assert ticking(scaling, facts(queued=3), 131, 10) == []  # never beyond what is asked for


def test_a_placement_against_an_objective_brings_one_more_worker_at_once() -> None:
    scaling = ModelScaling(MODEL, ScalingPolicy(cold_start_ns=S))
    assert scaling.decide(facts(forced=5), 100 * S) is None  # of before this term was watched
    order = scaling.decide(facts(forced=6), 102 * S)
    assert order is not None
    assert (order.workers, order.model) == (2, MODEL)


def test_missed_objectives_bring_one_more_worker_unless_they_are_of_before() -> None:
    scaling = ModelScaling(MODEL, ScalingPolicy(cold_start_ns=S))
    scaling.decide(facts(), 90 * S)
    scaling.decide(facts(workers=2), 100 * S)
    late = (20, 3 * S, S)  # 3 s to the first token
    for number in range(20):
        scaling.finished(late, OBJECTIVES, 90 * S, (103 + number) * S)
    assert scaling.attainment(122 * S) == 0.0
    assert scaling.decide(facts(2), 123 * S) is None  # they arrived before the workers were ready
    for _ in range(20):
        scaling.finished(late, OBJECTIVES, 120 * S, 124 * S)
    order = scaling.decide(facts(2), 125 * S)
    assert order is not None
    assert order.workers == 3
    assert "objectives" in order.reason


def test_an_objective_that_no_number_of_workers_meets_does_not_ask_for_all_of_them() -> None:
    scaling = ModelScaling(MODEL, ScalingPolicy(cold_start_ns=S, cooldown_ns=S))
    late, workers = (20, 3 * S, S), 1
    for second in range(100, 400):
        scaling.arrived(100, second * S)
        scaling.finished(late, OBJECTIVES, (second - 1) * S, second * S)
        scaling.decide(facts(workers, most=50), second * S)
        workers = scaling.wanted
    assert 2 <= workers <= 4  # one is enough for a session per second


def test_what_failed_is_not_tried_again_at_that_rate() -> None:
    scaling = ModelScaling(MODEL, ScalingPolicy(cold_start_ns=S))
    for second in range(100, 260):
        scaling.arrived(100, second * S)
        scaling.decide(facts(forced=int(second >= 150)), second * S)
    assert scaling.wanted == 2
    for second in range(260, 400):
        scaling.arrived(100, second * S)
        assert scaling.decide(facts(workers=2, forced=1), second * S) is None


def test_bounds_hold_whatever_is_seen() -> None:
    load = VirtualLoad(ModelScaling(MODEL), lambda _: 15.0, most=3).run(60)
    assert load.scaling.wanted == 3
    scaling = ModelScaling(MODEL)
    assert ticking(scaling, facts(workers=4, least=4), 0, 300) == []


def test_nothing_goes_while_sessions_wait() -> None:
    scaling = ModelScaling(MODEL)
    for second in range(300):
        order = scaling.decide(facts(workers=4, most=4, queued=5), second * S)
        assert order is None


def test_without_objectives_slots_are_what_binds() -> None:
    scaling = ModelScaling(MODEL)
    slots_only = facts(lines=None, objectives=None, service_ns=4 * S, slots=4)
    now = 0
    for number in range(400):
        now = number * S // 2
        scaling.arrived(100, now)
        if number % 2:
            scaling.decide(slots_only, now)
    # 2 sessions/s of 4 s each are 8 at a time: more than two workers of 4 slots, 90 % of them used.
    assert scaling.wanted in (3, 4)


def test_what_was_learned_goes_on_with_a_successor() -> None:
    scaling, successor = ModelScaling(MODEL), ModelScaling(MODEL)
    scaling.line.learn(5.0, 4.0)
    scaling.cold_start_ns = 7 * S
    successor.restore(scaling.to_record())
    assert successor.cold_start_ns == 7 * S
    assert successor.line.workers(5.0) == pytest.approx(scaling.line.workers(5.0))
    with pytest.raises(ValueError, match="record"):
        successor.restore({"line": 3})


def test_lengths_are_the_expected_ones_until_some_were_seen() -> None:
    scaling = ModelScaling(MODEL)
    assert scaling.lengths(SessionLengths(300.0, 50.0)) == SessionLengths(300.0, 50.0)
    for number in range(200):
        scaling.arrived(100, number * S)
        scaling.generated(20)
        scaling.finished((20, S, S), None, number * S, (number + 1) * S)
    seen = scaling.lengths(SessionLengths(300.0, 50.0))
    assert seen.prompt_tokens == pytest.approx(100.0)
    assert seen.answer_tokens == pytest.approx(20.0, rel=0.2)
