"""Limits and waiting times of a pooled dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from catenary_scheduler.dispatch.breaker import BreakerConfig
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, Nanoseconds


@dataclass(frozen=True, slots=True)
class PooledConfig:
    """Parameters of a pooled dispatcher.

    `max_linger_ns` bounds the wait for a full batch. The paper waits until the last moment at which
    the waiting rows still make their deadline (None here): best for throughput, but a lone request
    on an idle cluster then takes its whole SLO. With a bound, rows go out in a smaller batch after
    lingering that long, unless every path is busy anyway: then waiting costs nothing, and they wait
    until a path is free, or until the last safe moment.
    """

    max_linger_ns: Nanoseconds | None = 2 * NANOSECONDS_PER_MILLISECOND
    safety_margin_ns: Nanoseconds = NANOSECONDS_PER_MILLISECOND
    """The last safe moment is earlier by this: timers are late and frames take time."""
    dispatch_lead_ns: Nanoseconds = 2 * NANOSECONDS_PER_MILLISECOND
    """A batch that must wait for a device is sent this long before the device is free."""
    max_queued_rows: int = 4096
    """Rows that may wait per model; more are answered OVERLOADED."""
    max_requests: int = 65_536
    """Requests that may be open at once."""
    overdue_grace_ns: Nanoseconds = 100 * NANOSECONDS_PER_MILLISECOND
    """A batch is lost if it is later than this, and later than twice its planned time."""
    delivery_grace_ns: Nanoseconds = 250 * NANOSECONDS_PER_MILLISECOND
    """A result is lost if its last hop reported this long ago and the gateway still waits."""
    deadline_grace_ns: Nanoseconds = 50 * NANOSECONDS_PER_MILLISECOND
    """An open request is answered DEADLINE_EXCEEDED this long after its deadline."""
    max_attempts: int = 3
    """The same rows may be dispatched this often."""
    late_retries: int = 50
    """Initial and largest budget of batches that are merely late and may be dispatched again; see
    `late_retry_share`."""
    late_retry_share: float = 0.2
    """Growth of that budget for each batch that is dispatched for the first time. Without a budget,
    a cluster that as a whole is slower than booked for a moment makes work for itself by its own
    retries, and may stay slow for good. Batches of an agent that was lost are not counted."""
    retry_after_ns: Nanoseconds = 100 * NANOSECONDS_PER_MILLISECOND
    """The pause advised to rejected clients where nothing better is known."""
    longest_window_ns: Nanoseconds = 20 * NANOSECONDS_PER_MILLISECOND
    """The longest dispatch window of a gateway; 0: none is granted. None is granted either where
    rows wait for a full batch until the last moment (`max_linger_ns`), which a gateway does not."""
    window_share: float = 0.1
    """A window is no longer than this share of a request's time."""
    protected_share: float = 0.5
    """A model that uses all of its pools' time but this share leaves none to other models, whatever
    shared routes the plan has."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    """Conditions under which agents whose devices fail get only occasional tries."""
