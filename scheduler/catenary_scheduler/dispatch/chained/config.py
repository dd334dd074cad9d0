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
    """Everything that can be set."""

    max_queued: int = 4096
    """Requests that may wait per model; more are answered OVERLOADED."""
    max_requests: int = 65_536
    """Requests that may be open at once."""
    max_restarts: int = 6
    """How often a request may lose its session and be started again."""
    last_try_ns: Nanoseconds = 8 * NANOSECONDS_PER_SECOND
    """A request that lost a session is answered so long before its deadline, or a quarter of its
    time, if every chain is one on which a session failed a moment ago: a try that fails, too, would
    only be noticed when it is too late to tell its client why, or to ask anybody else."""
    deadline_grace_ns: Nanoseconds = 250 * NANOSECONDS_PER_MILLISECOND
    """A session that goes on is closed this long after its deadline."""
    delivery_grace_ns: Nanoseconds = 3 * NANOSECONDS_PER_SECOND
    """A session is lost if an agent said unasked that it is over, and the gateway still waits."""
    claim_grace_ns: Nanoseconds = 5 * NANOSECONDS_PER_SECOND
    """A session found on agents or in the stored book is closed if no gateway claims it by then;
    a session that a gateway claimed is lost if by then one of its agents has not come."""
    close_patience_ns: Nanoseconds = NANOSECONDS_PER_SECOND
    """An agent that has not said by then that a session is closed is told again."""
    close_attempts: int = 10
    """How often it is told; then its slots count as free."""
    suspicion_ns: Nanoseconds = 100 * NANOSECONDS_PER_MILLISECOND
    """Chains through an agent that failed a session are left alone for so long, and for twice as
    long after every further failure in a row."""
    longest_suspicion_ns: Nanoseconds = 3 * NANOSECONDS_PER_SECOND
    link_suspicion_ns: Nanoseconds = NANOSECONDS_PER_SECOND
    """The same for chains over a link that lost frames: longer, as each try there takes seconds to
    be noticed; twice as long after every further failure in a row."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    """When agents whose devices fail get no more than a try now and then."""
    stall_ns: Nanoseconds = 60 * NANOSECONDS_PER_SECOND
    """A session that got no token for so long, and for `stall_factor` times as long as it takes for
    one, is started again; one that never got any has four times as long for its prompt, and
    `prompt_factor` times as long as its chain expects a session to take."""
    stall_factor: float = 100.0
    prompt_factor: float = 10.0
    max_moves: int = 32
    """Sessions that may be on their way to another chain at a time; 0: none is moved."""
    max_moves_per_agent: int = 8
    """How many of them may concern one agent, whether they leave it or come to it."""
    move_deadline_ns: Nanoseconds = 30 * NANOSECONDS_PER_SECOND
    """A session that has not moved by then stays where it is. Failures end a move at once; this is
    for silence, and long, since calling off a move that is just being done costs a new start."""
    move_pause_ns: Nanoseconds = 200 * NANOSECONDS_PER_MILLISECOND
    """A session that could not be moved is not tried again for so long, and for twice as long
    after every further failure in a row."""
    longest_move_pause_ns: Nanoseconds = 5 * NANOSECONDS_PER_SECOND
    retry_after_ns: Nanoseconds = 100 * NANOSECONDS_PER_MILLISECOND
    """Least advice to rejected clients, and the advice where nothing better is known."""
    longest_retry_after_ns: Nanoseconds = 30 * NANOSECONDS_PER_SECOND
    rebalance: bool = False
    """Requests placed together change workers where predicted lengths were wrong (policy "slo")."""
    packing: PackingRules = field(default_factory=PackingRules)
    """When sessions of models with a goal are looked at, and which moves are worth their while."""
    migration_budget: MigrationBudgetConfig = field(default_factory=MigrationBudgetConfig)
    """How much of links and chains moves may take."""
