"""Limits and waiting times of a chained dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from catenary_scheduler.dispatch.breaker import BreakerConfig
from catenary_scheduler.dispatch.chained.packing_rules import PackingRules
from catenary_scheduler.packing.transfers.migration_budget import MigrationBudgetConfig
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    Nanoseconds,
)


@dataclass(frozen=True, slots=True)
class ChainedConfig:
    """Parameters of a chained dispatcher."""

    max_queued: int = 4096
    """Requests that may wait per model; more are answered OVERLOADED."""
    max_requests: int = 65_536
    """Requests that may be open at once."""
    max_restarts: int = 6
    """A request may lose its session and be started again this often."""
    last_try_ns: Nanoseconds = 8 * NANOSECONDS_PER_SECOND
    """A request that lost a session is answered this long before its deadline, or a quarter of its
    time, if a session failed on every chain a moment ago: another failure would be noticed too late
    to tell the client why, or for the client to ask elsewhere."""
    deadline_grace_ns: Nanoseconds = 250 * NANOSECONDS_PER_MILLISECOND
    """A session that goes on is closed this long after its deadline."""
    delivery_grace_ns: Nanoseconds = 3 * NANOSECONDS_PER_SECOND
    """A session is lost this long after an agent said unasked that it is over, if the gateway still
    waits."""
    claim_grace_ns: Nanoseconds = 5 * NANOSECONDS_PER_SECOND
    """A session found on agents or in the stored book is closed if no gateway claims it within this
    time; a session that a gateway claimed is lost if one of its agents has not connected by
    then."""
    close_patience_ns: Nanoseconds = NANOSECONDS_PER_SECOND
    """An agent is told again after this time if it has not said that a session is closed."""
    close_attempts: int = 10
    """An agent is told this often to close a session; then its slots count as free."""
    suspicion_ns: Nanoseconds = 100 * NANOSECONDS_PER_MILLISECOND
    """Chains through an agent that failed a session are avoided for this long, and for twice as
    long after every further failure in a row."""
    longest_suspicion_ns: Nanoseconds = 3 * NANOSECONDS_PER_SECOND
    link_suspicion_ns: Nanoseconds = NANOSECONDS_PER_SECOND
    """The same for chains over a link that lost frames. It is longer, since it takes seconds to
    notice that a try there failed; it doubles with every further failure in a row."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    """Conditions under which agents whose devices fail get only occasional tries."""
    stall_ns: Nanoseconds = 60 * NANOSECONDS_PER_SECOND
    """A session is started again if it got no token for this long, and for `stall_factor` times the
    duration of a token. One that never got a token has four times as long for its prompt, and
    `prompt_factor` times as long as its chain expects a session to take."""
    stall_factor: float = 100.0
    prompt_factor: float = 10.0
    max_moves: int = 32
    """Sessions that may be moving to another chain at the same time; 0: none is moved."""
    max_moves_per_agent: int = 8
    """The most of these moves that may concern one agent, as source or target."""
    move_deadline_ns: Nanoseconds = 30 * NANOSECONDS_PER_SECOND
    """A session that has not moved within this time stays where it is. Failures end a move at once.
    This limit is for silence, and it is long, since cancelling a move that is just being completed
    costs a new start."""
    move_pause_ns: Nanoseconds = 200 * NANOSECONDS_PER_MILLISECOND
    """A session that could not be moved is not tried again for this long, and for twice as long
    after every further failure in a row."""
    longest_move_pause_ns: Nanoseconds = 5 * NANOSECONDS_PER_SECOND
    retry_after_ns: Nanoseconds = 100 * NANOSECONDS_PER_MILLISECOND
    """The least pause advised to rejected clients, and the advice where nothing better is known."""
    longest_retry_after_ns: Nanoseconds = 30 * NANOSECONDS_PER_SECOND
    checked: bool = False
    """True if all invariants are checked after every event, and an illegal change of state raises;
    for tests. Else it is counted, and made all the same: a bug must not end a process."""
    rebalance: bool = False
    """True if requests placed together change workers where predicted lengths were wrong (policy
    "slo")."""
    packing: PackingRules = field(default_factory=PackingRules)
    """Rules for moving the sessions of models that have a packing goal."""
    migration_budget: MigrationBudgetConfig = field(default_factory=MigrationBudgetConfig)
    """The share of links and chains that moves may take."""
