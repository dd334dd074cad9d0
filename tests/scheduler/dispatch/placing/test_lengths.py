"""The predictor of answer lengths, by itself and on the ShareGPT lengths."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.dispatch.placing.length_histogram import LengthHistogram
from catenary_scheduler.dispatch.placing.lengths import PRIOR_TOKENS, LengthPredictor
from catenary_services.errors import InvalidInput
from reference_data import reference

Rows = list[tuple[int, int]]


@pytest.fixture(scope="module", params=["sharegpt_first_turn.csv", "sharegpt_all_turns.csv"])
def halves(request: pytest.FixtureRequest) -> tuple[Rows, Rows]:
    """Prompt and answer lengths: one half to learn from, the other to be predicted."""
    with reference(f"llm/{request.param}").open() as stream:
        rows = [(int(row["l_in"]), int(row["l_out"])) for row in csv.DictReader(stream)]
    random.Random(1).shuffle(rows)
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def taught(rows: Rows) -> LengthPredictor:
    predictor = LengthPredictor()
    for prompt, answer in rows:
        predictor.learn(prompt, answer)
    return predictor


def bucket_error(rows: Rows, predict: Callable[[int], float]) -> float:
    """Mean over requests of |mean predicted - mean real answer| of their prompt-length bucket."""
    buckets: dict[int, list[float]] = {}
    for prompt, answer in rows:
        buckets.setdefault(prompt.bit_length(), []).append(predict(prompt) - answer)
    return sum(abs(sum(errors)) for errors in buckets.values()) / len(rows)


# On real lengths


def test_half_of_the_conversations_predict_the_other_half_better_than_one_mean_for_all(
    halves: tuple[Rows, Rows],
) -> None:
    rows = [*halves[0], *halves[1]]
    by_bucket = by_one_mean = 0.0
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        train, test = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        predictor, overall = taught(train), mean(answer for _, answer in train)
        by_bucket += bucket_error(test, predictor.predict)
        by_one_mean += bucket_error(test, lambda _, overall=overall: overall)  # type: ignore[misc]
        expected = mean(predictor.predict(prompt) for prompt, _ in test)
        assert expected == pytest.approx(mean(answer for _, answer in test), rel=0.04)  # no bias
    assert by_bucket < 0.8 * by_one_mean


@pytest.mark.parametrize("generated", [50, 200, 500, 800, 1000])
def test_who_goes_on_is_predicted_the_mean_of_those_that_went_on(
    halves: tuple[Rows, Rows], generated: int
) -> None:
    train, test = halves
    predictor = taught(train)
    longer = [(prompt, answer) for prompt, answer in test if answer > generated]
    again = mean(predictor.repredict(prompt, generated) for prompt, _ in longer)
    assert again == pytest.approx(mean(answer for _, answer in longer), rel=0.03)


def test_answers_cut_at_a_limit_are_predicted(halves: tuple[Rows, Rows]) -> None:
    train, test = halves
    predictor = taught(train)
    cut = mean(predictor.predict(prompt, 300) for prompt, _ in test)
    assert cut == pytest.approx(mean(min(answer, 300) for _, answer in test), rel=0.02)


# What it knows from little


def test_a_model_nothing_is_known_of_has_the_prior() -> None:
    predictor = LengthPredictor()
    assert predictor.predict(100) == pytest.approx(PRIOR_TOKENS)
    assert predictor.repredict(100, 50) == pytest.approx(50 + PRIOR_TOKENS)
    assert predictor.predict(100, max_tokens=10) < 10


def test_the_first_answer_of_a_bucket_does_not_rule_it() -> None:
    predictor = taught([(20, 400)] * 200)
    predictor.learn(5000, 10)
    assert 300 < predictor.predict(5000) < 400
    for _ in range(500):
        predictor.learn(5000, 10)
    assert predictor.predict(5000) < 30
    assert predictor.predict(20) == pytest.approx(400, abs=20)


def test_an_empty_bucket_takes_after_its_neighbours() -> None:
    predictor = taught([(30, 100), (1000, 900)] * 300)
    assert predictor.predict(40) < 330 < predictor.predict(200) < 670 < predictor.predict(750)


def test_it_follows_a_change_of_traffic() -> None:
    predictor = taught([(100, 500)] * 5000)
    for _ in range(4000):
        predictor.learn(100, 50)
    assert predictor.predict(100) < 85


def test_answers_cut_at_a_limit_are_not_thought_to_go_on() -> None:
    predictor = taught([(100, 1024)] * 400 + [(100, 256)] * 400)
    assert predictor.repredict(100, 256) == pytest.approx(1024, abs=10)
    assert predictor.repredict(100, 1023) == pytest.approx(1024, abs=10)
    assert predictor.repredict(100, 1023, max_tokens=1024) == 1024
    assert predictor.repredict(100, 1024) > 1024


def test_answers_that_were_cut_do_not_make_the_others_look_short() -> None:
    predictor = taught([(100, 500)] * 300)
    before = predictor.predict(100)
    for _ in range(600):
        predictor.learn(100, 16, max_tokens=16)
    assert predictor.predict(100) == pytest.approx(before, rel=0.02)
    assert predictor.predict(100, max_tokens=16) == pytest.approx(16, abs=0.2)
    for _ in range(600):
        predictor.learn(100, 15, max_tokens=16)  # these ended by themselves
    assert predictor.predict(100) < 0.8 * before


def test_a_model_whose_answers_are_all_cut_has_the_prior_beyond() -> None:
    predictor = LengthPredictor()
    for _ in range(3000):
        predictor.learn(100, 64, max_tokens=64)
    assert predictor.predict(100, max_tokens=64) == pytest.approx(64, abs=0.5)
    assert 64 < predictor.predict(100) < 4 * PRIOR_TOKENS


def test_very_many_answers_leave_the_weights_in_range() -> None:
    predictor = LengthPredictor(half_life=2)  # the weights double every other answer
    for number in range(3000):
        predictor.learn(100, 100 + number % 3)
    assert predictor.predict(100) == pytest.approx(101, abs=0.2 * PRIOR_TOKENS)
    assert predictor.repredict(100, 100) < 200


@given(
    rows=st.lists(st.tuples(st.integers(0, 300_000), st.integers(1, 5_000_000)), max_size=60),
    prompt=st.integers(0, 300_000),
    generated=st.integers(0, 2_000_000),
    most=st.integers(1, 2_000_000),
)
@settings(max_examples=60, deadline=None)
def test_predictions_keep_to_what_is_possible(
    rows: Rows, prompt: int, generated: int, most: int
) -> None:
    predictor = taught(rows)
    assert 1 <= predictor.predict(prompt, most) <= most
    assert predictor.predict(prompt, most) <= predictor.predict(prompt) * (1 + 1e-9)
    assert predictor.repredict(prompt, generated) >= generated + 1
    again = predictor.repredict(prompt, generated, most)
    assert generated + 1 <= again <= max(most, generated + 1)


# The histogram against a plain list


@given(
    answers=st.lists(st.integers(1, 3000), min_size=1, max_size=80),
    tokens=st.integers(0, 3100),
)
@settings(max_examples=80, deadline=None)
def test_the_histogram_counts_as_a_list_would(answers: list[int], tokens: int) -> None:
    histogram = LengthHistogram(half_life=10**12)  # nothing is forgotten
    for answer in answers:
        histogram.learn(answer)
    weight, total = histogram.above(tokens)
    # Cells are an eighth of their power of two wide: what lies in the same one may count partly.
    near = [answer for answer in answers if abs(answer - tokens) <= 1 + tokens / 8]
    longer = [answer for answer in answers if answer > tokens]
    assert abs(weight - len(longer)) <= len(near) + 1e-6
    assert abs(total - sum(longer)) <= sum(near) + 1e-6
    assert histogram.above(0) == (histogram.weight, histogram.tokens)
    assert histogram.mean == pytest.approx(mean(answers))


# Stored and restored


def test_a_record_restores_what_was_known(halves: tuple[Rows, Rows]) -> None:
    train, test = halves
    predictor = taught(train)
    text = json.dumps(predictor.to_record())
    assert len(text) < 20_000
    restored = LengthPredictor.from_record(json.loads(text))
    for prompt, _ in test[:200]:
        assert restored.predict(prompt) == pytest.approx(predictor.predict(prompt), rel=1e-3)
        again = predictor.repredict(prompt, 300)
        assert restored.repredict(prompt, 300) == pytest.approx(again, rel=1e-3)
    restored.learn(100, 100)  # goes on learning
    assert restored.learned == 1


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {},
        {"everywhere": [], "buckets": []},
        {"everywhere": [[1]], "buckets": {}},
        {"everywhere": [["1", 2]], "buckets": {}},
        {"everywhere": [[float("nan"), 2]], "buckets": {}},
        {"everywhere": [[5, -1]], "buckets": {}},
        {"everywhere": [], "buckets": {"x": []}},
        {"everywhere": [], "buckets": {"64": [[1, 2, 3]]}},
        {"everywhere": [[1, 1]] * 10_000, "buckets": {}},
    ],
)
def test_garbage_is_refused(record: object) -> None:
    with pytest.raises(InvalidInput, match=r"^lengths"):
        LengthPredictor.from_record(record)
