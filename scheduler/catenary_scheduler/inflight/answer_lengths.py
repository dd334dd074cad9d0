"""Keeps what was learned of answer lengths in Redis, so that the next leader need not relearn it.

Lengths change with every answer, and the record of a model takes some 10 KB. So a record is written
only when it changed, one model at a time, and at most one every few seconds. What was learned since
the last write is lost with the scheduler; the next answers teach it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from catenary_scheduler.dispatch import ChainedDispatcher
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.storage.journal import Fields, Journal
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_services.domain.ids import ModelKey, Nanoseconds

_PERIOD_S = 10.0


class LengthRecords:
    """Writes the predictors of one term to the journal, and reads those of the term before."""

    table = RedisTable.LENGTHS

    def __init__(
        self,
        source: ChainedDispatcher,
        deployed: Collection[ModelKey],
        clock_s: Callable[[], float] = time.monotonic,
        period_s: float = _PERIOD_S,
    ) -> None:
        """Makes a writer that has written nothing.

        Args:
            source: The dispatcher, which holds the predictors.
            deployed: The deployed models, a view that follows changes.
            clock_s: Returns monotonic seconds.
            period_s: Seconds between two writes, whichever models they are for.
        """
        self._source = source
        self._deployed = deployed
        self._clock_s = clock_s
        self._period_s = period_s
        self._next_s = 0.0
        self._written: dict[ModelKey, int] = {}
        """The `learned` count of each predictor when it was last written, the longest ago first."""
        self.dirty: set[ModelKey] = set()
        """The models whose record has changed, as of the last `tick`; empty before a write is
        due."""

    def tick(self, now: Nanoseconds) -> None:
        """Looks for records to write, once the period since the last write is over."""
        if self._clock_s() >= self._next_s:
            known = self._source.length_predictors()
            self.dirty = set(self._written.keys() - known.keys())
            self.dirty.update(
                model
                for model, predictor in known.items()
                if predictor.learned != self._written.get(model, 0)
            )

    def collect(self, journal: Journal) -> None:
        """Writes the model whose record waited longest, if one was found to have changed."""
        dirty, self.dirty = self.dirty, set()
        known = self._source.length_predictors()
        for model in [each for each in self._written if each not in known]:
            del self._written[model]
            journal.put(RedisTable.LENGTHS, str(model), None)
        changed = [model for model in known if model in dirty]
        if not changed:
            return
        order = list(self._written)
        model = min(changed, key=lambda each: order.index(each) if each in order else -1)
        self._written.pop(model, None)
        journal.put(RedisTable.LENGTHS, str(model), self._record(model, known[model]))
        self._next_s = self._clock_s() + self._period_s

    def records(self) -> Fields:
        known = self._source.length_predictors()
        self._written, self.dirty = {}, set()
        return {str(model): self._record(model, each) for model, each in known.items()}

    def restore(self, stored: Mapping[ModelKey, LengthPredictor]) -> None:
        """Takes over the predictors of an earlier scheduler for models that are still deployed."""
        for model, predictor in stored.items():
            if model in self._deployed:
                self._source.restore_lengths(model, predictor)

    def _record(self, model: ModelKey, predictor: LengthPredictor) -> str:
        self._written[model] = predictor.learned
        return encode_document(predictor.to_record())
