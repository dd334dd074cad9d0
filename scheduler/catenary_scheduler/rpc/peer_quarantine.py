"""Peers that say what cannot be: named, counted, and kept out if they do it again and again."""

from __future__ import annotations

from collections.abc import Callable

from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds
from catenary_services.errors import InvalidMessage, Unavailable
from catenary_services.log import get_logger
from catenary_services.rules.offences import OffenceLog
from catenary_services.security.identity import Role
from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
_AT_ONCE_NS = 60 * NANOSECONDS_PER_SECOND
"""Whose single lie would have harmed the cluster is avoided for so long."""


class PeerQuarantine:
    """Of one term."""

    def __init__(
        self,
        availability: Availability,
        note: Callable[[str, dict[str, str]], None],
        metrics: Metrics,
    ) -> None:
        """Impairs agents in `availability`, enters what happened by `note`."""
        self._availability = availability
        self._note = note
        self._metrics = metrics
        self._offences = OffenceLog()
        self._obstinate = OffenceLog()
        """Agents that go on while they are held: nothing of theirs is heard any more."""

    def admit(self, role: Role, name: str) -> None:
        """Returns if a peer may open a stream.

        An agent that is held may, to be given work by nobody else's loss only; unless it goes on.

        Raises:
            Unavailable: it is held; says when to come back.
        """
        held = self._obstinate if role is Role.AGENT else self._offences
        left_ns = held.held_ns(_key(role, name), now_ns())
        if left_ns:
            raise Unavailable(
                f"{role} {name} said what cannot be, again and again", retry_after_ns=left_ns
            )

    def accuse(
        self, role: Role, name: str, error: InvalidMessage, *, at_once: bool = False
    ) -> None:
        """A peer said what cannot be.

        Args:
            role: What it is.
            name: By its certificate or, without TLS, by its own word; empty: it has not said.
            error: What it said.
            at_once: An agent is in quarantine for this alone, and not only if it goes on.
        """
        now = now_ns()
        facts = {"role": str(role), "peer": name, "field": error.details["field"]}
        self._metrics.invalid_messages.labels(str(role)).inc()
        _log.warning("invalid_message", why=error.message, **facts)
        key = _key(role, name)
        was_held = self._is_held(role, name, now)
        if was_held:
            self._obstinate.add(key, now)
        else:  # of one that goes on and on, one line in the event stream is enough
            self._note("invalid_message", facts)
        until = self._offences.add(key, now)
        if at_once:
            until = max(until, now + _AT_ONCE_NS)
        if not until:
            return
        held_s = (until - now) / NANOSECONDS_PER_SECOND
        _log.warning("peer_quarantined", role=str(role), peer=name, seconds=held_s)
        if not was_held:
            self._metrics.quarantined_peers.labels(str(role)).inc()
            self._note("peer_quarantined", {**facts, "seconds": f"{held_s:.0f}"})
        if role is Role.AGENT and name:
            self._availability.impair(
                AgentId(name), Impairment.QUARANTINED, until=until, why=error.message
            )

    def _is_held(self, role: Role, name: str, now: Nanoseconds) -> bool:
        if self._offences.held_ns(_key(role, name), now):
            return True
        mark = self._availability.mark_of(AgentId(name), Impairment.QUARANTINED)
        return role is Role.AGENT and mark is not None


def _key(role: Role, name: str) -> str:
    return f"{role}/{name}"
