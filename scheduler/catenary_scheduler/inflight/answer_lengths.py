"""Keeps what was learned of answer lengths in Redis, so that a successor need not learn it anew.

Lengths change with every answer, and their record is some 10 KB: a model's is written when it
changed, but not more often than every few seconds, and one model at a time. What was learned since
the last write is lost with the scheduler; the next answers teach it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.storage.journal import Fields, Journal
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_services.domain.ids import ModelKey

_PERIOD_S = 10.0


class LengthSource(Protocol):
    """Whoever predicts, as this module sees it."""

    def length_predictors(self) -> Mapping[ModelKey, LengthPredictor]:
        """Returns what is known of every model that generates text."""
        ...

    def restore_lengths(self, model: ModelKey, predictor: LengthPredictor) -> None:
        """This is what a predecessor knew of a model."""
        ...


class LengthRecords:
    """Writes the predictors of one term to the journal, and reads those of its predecessor."""

    table = RedisTable.LENGTHS

    def __init__(
        self,
        source: LengthSource,
        deployed: Collection[ModelKey],
        clock_s: Callable[[], float] = time.monotonic,
        period_s: float = _PERIOD_S,
    ) -> None:
        """Makes one that has written nothing.

        Args:
            source: Who predicts.
            deployed: The models there are, at any moment.
            clock_s: Monotonic seconds.
            period_s: Two writes are this far apart, of whichever models.
        """
        self._source = source
        self._deployed = deployed
        self._clock_s = clock_s
        self._period_s = period_s
        self._next_s = 0.0
        self._written: dict[ModelKey, int] = {}
        """How much a predictor had learned when it was written last, the longest ago first."""

    def collect(self, journal: Journal) -> None:
        """Writes the model that has waited longest, if any changed and it is time."""
        now_s = self._clock_s()
        if now_s < self._next_s:
            return
        known = self._source.length_predictors()
        for model in [each for each in self._written if each not in known]:
            del self._written[model]
            journal.put(RedisTable.LENGTHS, str(model), None)
        changed = [
            model
            for model, predictor in known.items()
            if predictor.learned != self._written.get(model, 0)
        ]
        if not changed:
            return
        order = list(self._written)
        model = min(changed, key=lambda each: order.index(each) if each in order else -1)
        self._written.pop(model, None)
        journal.put(RedisTable.LENGTHS, str(model), self._record(model, known[model]))
        self._next_s = now_s + self._period_s

    def records(self) -> Fields:
        """Returns what Redis is to hold now, for a snapshot."""
        known = self._source.length_predictors()
        self._written = {}
        return {str(model): self._record(model, each) for model, each in known.items()}

    def restore(self, stored: Mapping[ModelKey, LengthPredictor]) -> None:
        """Takes over what a predecessor knew of the models that still are deployed."""
        for model, predictor in stored.items():
            if model in self._deployed:
                self._source.restore_lengths(model, predictor)

    def _record(self, model: ModelKey, predictor: LengthPredictor) -> str:
        self._written[model] = predictor.learned
        return encode_document(predictor.to_record())
