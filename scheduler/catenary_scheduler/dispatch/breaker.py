"""Circuit breakers: an agent that fails again and again gets only occasional tries.

There is one circuit per agent and partition, after M. Nygard, "Release It!". It begins with the
first failure of a device there (a lost link or agent is another matter). While it is open it marks
the agent BROKEN in the view of availability; that view, not this module, decides who is given work
instead. Sessions lost for other reasons are the business of `chained.failure_backoff`: it marks an
agent SUSPECTED for a moment, for all partitions, because an agent about to be found gone fails them
all.

    CLOSED     some failures, not enough
    OPEN       too many: in a row, or of the last outcomes; impaired until the pause is over
    HALF_OPEN  the pause is over: the next batch or session is a probe
    PROBING    the probe is in flight; impaired until it has an outcome, or has taken too long

A request may be what makes agents fail. Each failure has a piece of evidence, the batch or session
that failed; when a request turns out to be the cause, its evidence is taken back, and agents that
were only its victims are trusted again. The module does no I/O and reads no clock: moments are
passed in.
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
"""A request that failed on this many agents is to blame, and the agents are not."""


def is_of_device(reason: str) -> bool:
    """True if an error reason points to the device on which the failure happened."""
    return reason in _DEVICE


class CircuitState(enum.Enum):
    """State of a circuit: closed circuits let work flow."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    PROBING = "probing"


class CircuitSignal(enum.Enum):
    """Input to the state machine of a circuit."""

    FAILED = "failed"
    """A failure, with too few before it to open the circuit."""
    FAILED_TOO_OFTEN = "failed_too_often"
    WORKED = "worked"
    GIVEN = "given"
    """Work was sent to the agent."""
    PAUSE_OVER = "pause_over"
    FORGIVEN = "forgiven"
    """Failures were taken back, as their cause lay elsewhere, and too few are left to open the
    circuit."""


_C, _S = CircuitState, CircuitSignal
TRANSITIONS: dict[tuple[CircuitState, CircuitSignal], CircuitState] = {
    (_C.CLOSED, _S.FAILED_TOO_OFTEN): _C.OPEN,
    (_C.OPEN, _S.PAUSE_OVER): _C.HALF_OPEN,
    (_C.OPEN, _S.WORKED): _C.CLOSED,  # the last member of a stage gets work although it is open
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
"""Next state by state and signal; all other signals change nothing."""
_IMPAIRED = frozenset({CircuitState.OPEN, CircuitState.PROBING})


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """Conditions under which circuits open, and the length of their pauses."""

    in_a_row: int = 3
    """This many failures without a success between them open the circuit."""
    of_last: int = 16
    """Number of outcomes remembered. Once half of them are known, `failed_share` applies."""
    failed_share: float = 0.5
    """This share of failures among the outcomes opens the circuit."""
    first_pause_ns: Nanoseconds = 500 * NANOSECONDS_PER_MILLISECOND
    """The first pause; it doubles with every probe that fails."""
    longest_pause_ns: Nanoseconds = 30 * NANOSECONDS_PER_SECOND
    forgotten_after_ns: Nanoseconds = 600 * NANOSECONDS_PER_SECOND
    """A circuit that may be given work is forgotten after this time without a failure: perhaps no
    work ever comes to it."""


class CircuitBreaker:
    """One circuit, of an agent and a partition."""

    __slots__ = ("_config", "_failed_at", "_outcomes", "_row", "circuit", "pauses", "until", "why")

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self.circuit = CircuitState.CLOSED
        self.until: Nanoseconds = 0
        """End of its pause, or of the time for its probe."""
        self.pauses = 0
        """Number of times it opened since it was last closed."""
        self.why = ""
        self._outcomes: list[int] = []
        """The latest outcomes: evidence of a failure, 0 for a success."""
        self._row = 0
        """Number of failures since the last success."""
        self._failed_at: Nanoseconds = 0

    def failed(self, evidence: int, now: Nanoseconds, *, at_once: bool, why: str) -> None:
        """Takes in a failure; `at_once` if that alone opens the circuit."""
        self._outcomes.append(evidence)
        del self._outcomes[: -self._config.of_last]
        self._row += 1
        self._failed_at = now
        self.why = why
        too_often = at_once or self._is_too_often()
        self._hear(CircuitSignal.FAILED_TOO_OFTEN if too_often else CircuitSignal.FAILED, now)

    def worked(self, now: Nanoseconds) -> None:
        self._outcomes.append(0)
        del self._outcomes[: -self._config.of_last]
        self._row = 0
        was = self.circuit
        self._hear(CircuitSignal.WORKED, now)
        if was is not CircuitState.CLOSED:
            self._outcomes.clear()
            self.pauses = 0

    def given(self, now: Nanoseconds) -> None:
        self._hear(CircuitSignal.GIVEN, now)

    def look(self, now: Nanoseconds) -> None:
        """Takes in that time has passed."""
        if self.circuit in _IMPAIRED and self.until <= now:
            self._hear(CircuitSignal.PAUSE_OVER, now)

    def forgive(self, evidence: int, now: Nanoseconds) -> None:
        """Takes a failure back whose cause lay elsewhere."""
        if evidence not in self._outcomes:
            return
        self._outcomes.remove(evidence)
        self._row = max(0, self._row - 1)
        if not self._is_too_often():
            self._hear(CircuitSignal.FORGIVEN, now)
            self.pauses = 0

    def is_spotless(self, now: Nanoseconds) -> bool:
        """True if it has nothing to remember, or nothing recent enough."""
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

    Invariant: this class marks an agent BROKEN for a partition exactly while its circuit there is
    open or being probed.
    """

    def __init__(self, availability: Availability, config: BreakerConfig | None = None) -> None:
        self._availability = availability
        self._config = config or BreakerConfig()
        self._breakers: dict[tuple[AgentId, PartitionKey], CircuitBreaker] = {}
        self.opened = 0
        """Number of times that any circuit opened."""

    def __len__(self) -> int:
        return len(self._breakers)

    def circuit(self, agent: AgentId, partition: PartitionKey) -> CircuitState:
        breaker = self._breakers.get((agent, partition))
        return breaker.circuit if breaker is not None else CircuitState.CLOSED

    def failed(
        self, agent: AgentId, partition: PartitionKey, evidence: int, reason: str, now: Nanoseconds
    ) -> None:
        """Takes in that a device failed to compute.

        Args:
            agent: The agent of the device.
            partition: The partition it should have computed.
            evidence: Positive number of the batch or session that failed, see `forgive`.
            reason: Reason from the error tree.
            now: The moment.
        """
        breaker = self._breakers.setdefault((agent, partition), CircuitBreaker(self._config))
        was = breaker.circuit
        why = f"its device failed last with {reason}"
        breaker.failed(evidence, now, at_once=reason == DeviceLost.reason, why=why)
        self._show(agent, partition, breaker, was, now)

    def worked(self, agent: AgentId, partition: PartitionKey, now: Nanoseconds) -> None:
        breaker = self._breakers.get((agent, partition))
        if breaker is None:
            return
        was = breaker.circuit
        breaker.worked(now)
        self._show(agent, partition, breaker, was, now)

    def given(self, agent: AgentId, partition: PartitionKey, now: Nanoseconds) -> None:
        breaker = self._breakers.get((agent, partition))
        if breaker is None:
            return
        was = breaker.circuit
        breaker.given(now)
        self._show(agent, partition, breaker, was, now)

    def forgive(self, evidence: Iterable[int], now: Nanoseconds) -> None:
        """Takes back the failures of these batches or sessions, which were to blame themselves."""
        for each in evidence:
            for (agent, partition), breaker in list(self._breakers.items()):
                was = breaker.circuit
                breaker.forgive(each, now)
                self._show(agent, partition, breaker, was, now)

    def look(self, now: Nanoseconds) -> None:
        """Takes in that time has passed: pauses may be over."""
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
        """Passes a changed state of a circuit on to the view of availability."""
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
