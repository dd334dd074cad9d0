"""Reports arrivals, tokens and ends of sessions to the scaling of their model, and to the planner.

An event is only noted. The scaling, which is judged several times a second, learns of the events
right before, in their order and with their moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from catenary_scheduler.dispatch.events import (
    Event,
    RequestCancelled,
    RequestCompleted,
    SessionProgress,
    SessionRequested,
    SessionsProgressed,
)
from catenary_scheduler.scaling import ModelScaling
from catenary_services.domain.ids import ModelKey, Nanoseconds, RequestId
from catenary_services.domain.latency import TokenObjectives

_MOST_OPEN = 100_000
"""Largest number of requests that are followed. The end of a refused request is not seen here, so
entries of such requests stay until newer ones push them out."""
_MOST_NOTED = 1_000
"""The scaling does not wait for the next tick if this many events were noted."""


@dataclass(slots=True)
class _Open:
    scaling: ModelScaling
    model: ModelKey
    arrived_ns: Nanoseconds
    prompt_tokens: int
    objectives: TokenObjectives | None
    tokens: int = 0


class SessionOutcomes:
    """Follows the requests that generate text until they are finished.

    Args:
        scaling_of: Returns the scaling of a model, which is made if there is none.
        usual: Returns the objectives of sessions of a model that name none.
        answered: Told of every session that was answered: model, arrival, prompt and answer.
    """

    observes = (SessionsProgressed, RequestCompleted, SessionRequested, RequestCancelled)

    def __init__(
        self,
        scaling_of: Callable[[ModelKey], ModelScaling],
        usual: Callable[[ModelKey], TokenObjectives | None],
        answered: Callable[[ModelKey, Nanoseconds, int, int], None],
    ) -> None:
        self._scaling_of = scaling_of
        self._usual = usual
        self._answered = answered
        self._open: dict[RequestId, _Open] = {}
        self._noted: list[tuple[Event, Nanoseconds]] = []
        """The events since the last tick, in order."""

    def __len__(self) -> int:
        return len(self._open)

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Notes an event until the next tick."""
        self._noted.append((event, now))
        if len(self._noted) >= _MOST_NOTED:
            self.tick(now)

    def tick(self, now: Nanoseconds) -> None:
        """Updates the scaling of the models that the noted events are about."""
        noted, self._noted = self._noted, []
        for event, moment in noted:
            self._learn(event, moment)

    def _learn(self, event: Event, now: Nanoseconds) -> None:
        if isinstance(event, SessionsProgressed):
            for progress in event.sessions:
                self._progressed(progress)
        elif isinstance(event, RequestCompleted):
            if event.progress is not None:
                self._completed(event.progress, now)
            else:
                self._open.pop(event.request, None)
        elif isinstance(event, SessionRequested):
            self._requested(event, now)
        elif isinstance(event, RequestCancelled):
            self._open.pop(event.request, None)

    def _requested(self, event: SessionRequested, now: Nanoseconds) -> None:
        if event.request in self._open:
            return  # submitted again after its stream broke
        scaling = self._scaling_of(event.model)
        arrived = event.arrived_ns if event.arrived_ns is not None else now
        objectives = event.objectives or self._usual(event.model)
        entry = _Open(scaling, event.model, arrived, event.prompt_tokens, objectives)
        if event.progress is not None:
            entry.tokens = event.progress.generated_tokens
        if event.in_flight is None:
            scaling.arrived(event.prompt_tokens, now)
        if len(self._open) >= _MOST_OPEN:
            del self._open[next(iter(self._open))]
        self._open[event.request] = entry

    def _progressed(self, progress: SessionProgress) -> None:
        entry = self._open.get(progress.request)
        if entry is not None and progress.generated_tokens > entry.tokens:
            entry.scaling.generated(progress.generated_tokens - entry.tokens)
            entry.tokens = progress.generated_tokens

    def _completed(self, progress: SessionProgress, now: Nanoseconds) -> None:
        self._progressed(progress)
        entry = self._open.pop(progress.request, None)
        if entry is not None:
            outcome = (progress.generated_tokens, progress.first_token_ns, progress.decode_ns)
            entry.scaling.finished(outcome, entry.objectives, entry.arrived_ns, now)
            tokens = progress.generated_tokens
            self._answered(entry.model, entry.arrived_ns, entry.prompt_tokens, tokens)
