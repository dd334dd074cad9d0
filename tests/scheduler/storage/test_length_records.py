"""What was learned of answer lengths, on its way to Redis and back."""

from __future__ import annotations

import json

import pytest

from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.inflight.answer_lengths import LengthRecords
from catenary_scheduler.storage.journal import Journal
from catenary_scheduler.storage.keys import RedisTable
from catenary_services.domain.ids import ModelKey
from scheduling_cases.stored_tables import stored_of

ONE, OTHER = ModelKey("one", "1"), ModelKey("other", "2")


class Predictors:
    """Stands for a dispatcher."""

    def __init__(self) -> None:
        self.known: dict[ModelKey, LengthPredictor] = {}

    def length_predictors(self) -> dict[ModelKey, LengthPredictor]:
        return self.known

    def restore_lengths(self, model: ModelKey, predictor: LengthPredictor) -> None:
        self.known[model] = predictor


class Setting:
    def __init__(self) -> None:
        self.source = Predictors()
        self.now_s = 0.0
        self.records = LengthRecords(self.source, (ONE, OTHER), lambda: self.now_s, 10.0)
        self.journal = Journal()

    def learn(self, model: ModelKey, answer: int, times: int = 1) -> None:
        predictor = self.source.known.setdefault(model, LengthPredictor())
        for _ in range(times):
            predictor.learn(100, answer)

    def written(self, after_s: float = 0.0) -> dict[str, str | None]:
        self.now_s += after_s
        self.records.tick(0)
        self.records.collect(self.journal)
        return self.journal.take().tables.get(RedisTable.LENGTHS, {})


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_a_successor_predicts_what_its_predecessor_did(setting: Setting) -> None:
    setting.learn(ONE, 700, times=50)
    text = setting.written()["one:1"]
    assert text is not None
    successor = Setting()
    successor.records.restore(stored_of(RedisTable.LENGTHS, {"one:1": text, "gone:1": text}))
    assert set(successor.source.known) == {ONE}
    expected = setting.source.known[ONE].predict(100)
    assert successor.source.known[ONE].predict(100) == pytest.approx(expected, rel=1e-3)
    assert successor.written() == {}  # nothing new was learned
    snapshot = successor.records.records()
    assert json.loads(snapshot["one:1"] or "")["everywhere"]


def test_it_is_written_when_it_changed_but_not_all_the_time(setting: Setting) -> None:
    setting.learn(ONE, 10)
    assert set(setting.written()) == {"one:1"}
    setting.learn(ONE, 10)
    assert setting.written(after_s=9.0) == {}
    assert set(setting.written(after_s=1.0)) == {"one:1"}
    assert setting.written(after_s=100.0) == {}


def test_several_models_take_turns(setting: Setting) -> None:
    turns = []
    for _ in range(4):
        setting.learn(ONE, 10)
        setting.learn(OTHER, 10)
        turns += setting.written(after_s=10.0)
    assert sorted(turns[:2]) == sorted(turns[2:]) == ["one:1", "other:2"]


def test_what_a_snapshot_holds_is_not_written_again(setting: Setting) -> None:
    setting.learn(ONE, 10)
    assert set(setting.records.records()) == {"one:1"}
    assert setting.written(after_s=100.0) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"everywhere": [], "buckets": {"a": []}}'])
def test_what_cannot_be_read_is_learned_again(setting: Setting, text: str) -> None:
    setting.records.restore(stored_of(RedisTable.LENGTHS, {"one:1": text}))
    assert setting.source.known == {}
