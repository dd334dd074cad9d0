"""Circuit breakers: who fails again and again gets no more than a try now and then.

One circuit per agent and partition, after M. Nygard, "Release It!". It begins with the first
failure of a device there (a lost link or agent is another matter) and says BROKEN to the view of
availability while it is open; that view, not this module, decides who is given work instead.
Sessions that were lost for other reasons are `chained.failure_backoff`'s: it says SUSPECTED for a
moment, to whatever partition, because an agent about to be found gone fails all of them.

    CLOSED     some failures, not enough
    OPEN       too many: in a row, or of the last outcomes; impaired until the pause is over
    HALF_OPEN  the pause is over: the next batch or session is a probe
    PROBING    it is under way; impaired until it has an outcome, or has taken too long for one

A request may be what makes agents fail. Each failure has a piece of evidence, the batch or session
that failed; when a request turns out to be the cause, its evidence is taken back, and whoever was
only its victim is trusted again. Pure; moments are given.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    AgentId,
    Nanoseconds,
    PartitionKey,
)
from catenary_services.errors import DeviceFailed, DeviceLost, DeviceOutOfMemory

_DEVICE = frozenset({DeviceFailed.reason, DeviceLost.reason, DeviceOutOfMemory.reason})
AGENTS_OF_A_VERDICT = 2
"""A request that failed on so many agents is to blame, not they."""


def is_of_device(reason: str) -> bool:
    """True if a failure says something of the device it happened on."""
    return reason in _DEVICE


class CircuitState(enum.Enum):
    """Whether work flows."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    PROBING = "probing"


class CircuitSignal(enum.Enum):
    """What a circuit hears."""

    FAILED = "failed"
    """Once more, but not too often."""
    FAILED_TOO_OFTEN = "failed_too_often"
    WORKED = "worked"
    GIVEN = "given"
    """Work was sent there."""
    PAUSE_OVER = "pause_over"
    FORGIVEN = "forgiven"
    """What failed there failed for another reason, and the rest is not too often."""


_C, _S = CircuitState, CircuitSignal
TRANSITIONS: dict[tuple[CircuitState, CircuitSignal], CircuitState] = {
    (_C.CLOSED, _S.FAILED_TOO_OFTEN): _C.OPEN,
    (_C.OPEN, _S.PAUSE_OVER): _C.HALF_OPEN,
    (_C.OPEN, _S.WORKED): _C.CLOSED,  # the last member of a stage is given work all the time
    (_C.OPEN, _S.FORGIVEN): _C.CLOSED,
    (_C.HALF_OPEN, _S.GIVEN): _C.PROBING,
    (_C.HALF_OPEN, _S.FAILED): _C.OPEN,
    (_C.HALF_OPEN, _S.FAILED_TOO_OFTEN): _C.OPEN,
    (_C.HALF_OPEN, _S.WORKED): _C.CLOSED,
    (_C.HALF_OPEN, _S.FORGIVEN): _C.CLOSED,
    (_C.PROBING, _S.FAILED): _C.OPEN,
    (_C.PROBING, _S.FAILED_TOO_OFTEN): _C.OPEN,
    (_C.PROBING, _S.WORKED): _C.CLOSED,
    (_C.PROBING, _S.FORGIVEN): _C.CLOSED,
    (_C.PROBING, _S.PAUSE_OVER): _C.HALF_OPEN,
}
"""Any other signal changes nothing."""
_IMPAIRED = frozenset({CircuitState.OPEN, CircuitState.PROBING})


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When circuits open, and for how long."""

    in_a_row: int = 3
    """So many failures without a success between them open it."""
    of_last: int = 16
    """So many outcomes are remembered; once there are half of these, ..."""
    failed_share: float = 0.5
    """... this share of failures among them opens it, too."""
    first_pause_ns: Nanoseconds = 500 * NANOSECONDS_PER_MILLISECOND
    """Doubled with every probe that fails."""
    longest_pause_ns: Nanoseconds = 30 * NANOSECONDS_PER_SECOND
    forgotten_after_ns: Nanoseconds = 600 * NANOSECONDS_PER_SECOND
    """Without a further failure, of one that may be given work: perhaps it never is again."""


class CircuitBreaker:
    """One circuit."""

    __slots__ = ("_config", "_failed_at", "_outcomes", "_row", "circuit", "pauses", "until", "why")

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self.circuit = CircuitState.CLOSED
        self.until: Nanoseconds = 0
        """When its pause, or its probe, is over."""
        self.pauses = 0
        """Times it opened since it was closed."""
        self.why = ""
        self._outcomes: list[int] = []
        """Evidence of failures, 0 for a success; the last ones."""
        self._row = 0
        """Failures since the last success."""
        self._failed_at: Nanoseconds = 0

    def failed(self, evidence: int, now: Nanoseconds, *, at_once: bool, why: str) -> None:
        """Something failed; `at_once` if that alone opens the circuit."""
        self._outcomes.append(evidence)
        del self._outcomes[: -self._config.of_last]
        self._row += 1
        self._failed_at = now
        self.why = why
        too_often = at_once or self._is_too_often()
        self._hear(CircuitSignal.FAILED_TOO_OFTEN if too_often else CircuitSignal.FAILED, now)

    def worked(self, now: Nanoseconds) -> None:
        """Something was computed."""
        self._outcomes.append(0)
        del self._outcomes[: -self._config.of_last]
        self._row = 0
        was = self.circuit
        self._hear(CircuitSignal.WORKED, now)
        if was is not CircuitState.CLOSED:
            self._outcomes.clear()
            self.pauses = 0

    def given(self, now: Nanoseconds) -> None:
        """Work was sent there."""
        self._hear(CircuitSignal.GIVEN, now)

    def look(self, now: Nanoseconds) -> None:
        """Time has passed."""
        if self.circuit in _IMPAIRED and self.until <= now:
            self._hear(CircuitSignal.PAUSE_OVER, now)

    def forgive(self, evidence: int, now: Nanoseconds) -> None:
        """A failure was not its fault."""
        if evidence not in self._outcomes:
            return
        self._outcomes.remove(evidence)
        self._row = max(0, self._row - 1)
        if not self._is_too_often():
            self._hear(CircuitSignal.FORGIVEN, now)
            self.pauses = 0

    def is_spotless(self, now: Nanoseconds) -> bool:
        """True if there is nothing to remember, or nothing that is worth it."""
        if self.circuit is CircuitState.CLOSED and not any(self._outcomes):
            return True
        is_old = now - self._failed_at > self._config.forgotten_after_ns
        return is_old and self.circuit not in _IMPAIRED

    def _is_too_often(self) -> bool:
        config, outcomes = self._config, self._outcomes
        if self._row >= config.in_a_row:
            return True
        failures = sum([each != 0 for each in outcomes])
        is_enough = len(outcomes) >= max(2, config.of_last // 2)
        return is_enough and failures >= config.failed_share * len(outcomes)

    def _hear(self, signal: CircuitSignal, now: Nanoseconds) -> None:
        to = TRANSITIONS.get((self.circuit, signal))
        if to is None:
            return
        if to is CircuitState.OPEN:
            self.pauses += 1
        if to in _IMPAIRED:
            pause = self._config.first_pause_ns << min(max(0, self.pauses - 1), 16)
            self.until = now + min(self._config.longest_pause_ns, pause)
        self.circuit = to


class CircuitBreakers:
    """All circuits of a dispatcher.

    Invariant: an agent is BROKEN for a partition, by this, exactly while its circuit there is open
    or being probed.
    """

    def __init__(self, availability: Availability, config: BreakerConfig | None = None) -> None:
        self._availability = availability
        self._config = config or BreakerConfig()
        self._breakers: dict[tuple[AgentId, PartitionKey], CircuitBreaker] = {}
        self.opened = 0
        """How often any was opened."""

    def __len__(self) -> int:
        return len(self._breakers)

    def circuit(self, agent: AgentId, partition: PartitionKey) -> CircuitState:
        """Returns the state of a circuit."""
        breaker = self._breakers.get((agent, partition))
        return breaker.circuit if breaker is not None else CircuitState.CLOSED

    def failed(
        self, agent: AgentId, partition: PartitionKey, evidence: int, reason: str, now: Nanoseconds
    ) -> None:
        """A device failed to compute.

        Args:
            agent: Whose.
            partition: What.
            evidence: Positive; names what failed, see `forgive`.
            reason: Of the error tree.
            now: The moment.
        """
        breaker = self._breakers.setdefault((agent, partition), CircuitBreaker(self._config))
        was = breaker.circuit
        why = f"its device failed last with {reason}"
        breaker.failed(evidence, now, at_once=reason == DeviceLost.reason, why=why)
        self._show(agent, partition, breaker, was, now)

    def worked(self, agent: AgentId, partition: PartitionKey, now: Nanoseconds) -> None:
        """A device has computed something."""
        breaker = self._breakers.get((agent, partition))
        if breaker is None:
            return
        was = breaker.circuit
        breaker.worked(now)
        self._show(agent, partition, breaker, was, now)

    def given(self, agent: AgentId, partition: PartitionKey, now: Nanoseconds) -> None:
        """Work was sent to an agent."""
        breaker = self._breakers.get((agent, partition))
        if breaker is None:
            return
        was = breaker.circuit
        breaker.given(now)
        self._show(agent, partition, breaker, was, now)

    def forgive(self, evidence: Iterable[int], now: Nanoseconds) -> None:
        """What these name failed for reasons of its own, wherever it was."""
        for each in evidence:
            for (agent, partition), breaker in list(self._breakers.items()):
                was = breaker.circuit
                breaker.forgive(each, now)
                self._show(agent, partition, breaker, was, now)

    def look(self, now: Nanoseconds) -> None:
        """Time has passed: pauses may be over."""
        for (agent, partition), breaker in list(self._breakers.items()):
            was = breaker.circuit
            breaker.look(now)
            self._show(agent, partition, breaker, was, now)

    def _show(
        self,
        agent: AgentId,
        partition: PartitionKey,
        breaker: CircuitBreaker,
        was: CircuitState,
        now: Nanoseconds,
    ) -> None:
        """Has the view say what is so now, if that is anything new."""
        circuit, view = breaker.circuit, self._availability
        if circuit is not was:
            self.opened += circuit is CircuitState.OPEN
            if circuit in _IMPAIRED:
                view.impair(
                    agent,
                    Impairment.BROKEN,
                    until=breaker.until,
                    partition=partition,
                    why=breaker.why,
                )
            else:
                view.clear(agent, Impairment.BROKEN, partition=partition)
        if breaker.is_spotless(now):
            self._breakers.pop((agent, partition), None)
