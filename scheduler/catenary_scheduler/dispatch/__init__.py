"""All dispatch decisions, without I/O: events in, commands out.

`events` is the contract. `PooledDispatcher` serves pooled pipelines (PPipe, Algorithms 1 and 2):

    queue       rows that wait, per model, by priority and deadline
    routes      the active plan, as pools of agents that are alive
    batching    Algorithm 1: dispatch now, wait, or drop
    tracking    requests and batches in flight, so that none is ever lost
    ledger      all of that state, and the few things that may be done to it
    lifecycle   what each event does
    pooled      the dispatcher: events in, decisions, commands out

`chained` serves server chains, `combined` has both over one book.
"""

from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.combined import CombinedDispatcher
from catenary_scheduler.dispatch.pooled.config import PooledConfig
from catenary_scheduler.dispatch.pooled.dispatcher import PooledDispatcher

__all__ = [
    "ChainedConfig",
    "ChainedDispatcher",
    "CombinedDispatcher",
    "PooledConfig",
    "PooledDispatcher",
]
