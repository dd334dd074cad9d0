"""All dispatch decisions, without I/O: events in, commands out.

`events` is the contract. `PooledDispatcher` serves pooled pipelines (PPipe, Algorithms 1 and 2):

    queue       rows that wait, per model, by priority and deadline
    routes      the active plan, as pools of agents that are alive
    batching    Algorithm 1: dispatch now, wait, or drop
    tracking    requests and batches in flight, so that none is ever lost
    pooled      folds events into the three and answers with commands
"""

from scheduler.dispatch.config import PooledConfig
from scheduler.dispatch.pooled import PooledDispatcher

__all__ = ["PooledConfig", "PooledDispatcher"]
