"""Reports and counts peers whose messages cannot be true, and keeps out those that repeat it."""

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
"""Quarantine of an agent after one false message that would have harmed the cluster."""


class PeerQuarantine:
    """The offences of all peers in one term of a leader, and the quarantine that follows."""

    def __init__(
        self,
        availability: Availability,
        note: Callable[[str, dict[str, str]], None],
        metrics: Metrics,
    ) -> None:
        """Makes an empty quarantine.

        Args:
            availability: Marks agents in quarantine as impaired.
            note: Adds an entry to the event stream and has it written soon.
            metrics: Counts false messages and peers in quarantine.
        """
        self._availability = availability
        self._note = note
        self._metrics = metrics
        self._offences = OffenceLog()
        self._obstinate = OffenceLog()
        """Offences of peers during their quarantine; after several, an agent may not connect."""

    def admit(self, role: Role, name: str) -> None:
        """Refuses the stream of a peer in quarantine.

        An agent in quarantine may still connect, as it gets work only when other agents do not
        suffice. It is refused once it has offended several times during its quarantine.

        Raises:
            Unavailable: The peer is in quarantine; `retry_after_ns` says how much longer.
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
        """Counts a message that cannot be true, and puts a peer that repeats this in quarantine.

        Args:
            role: The role of the peer.
            name: The name in its certificate, or without TLS its own word; empty if unknown.
            error: The error that describes the message.
            at_once: True puts an agent in quarantine for this message alone.
        """
        now = now_ns()
        facts = {"role": str(role), "peer": name, "field": error.details["field"]}
        self._metrics.invalid_messages.labels(str(role)).inc()
        _log.warning("invalid_message", why=error.message, **facts)
        key = _key(role, name)
        was_held = self._is_held(role, name, now)
        if was_held:
            self._obstinate.add(key, now)
        else:  # one entry in the event stream is enough for a peer that goes on
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
