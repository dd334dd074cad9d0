"""Serving server chains: which chain a session runs on, who waits, which slots are booked.

    dispatcher  events in, commands out
    policy      the seam: a policy returns a route (hops, and the slots they take)
    jffc        join the fastest free chain, the default (server-chain composition, Algorithm 3)
    balancing   JSQ, SA-JSQ, JIQ, SED, to compare with
    lines       where requests wait: one queue for all chains, or one per chain
    desk        one model: chains, line, observed rate
    ledger      all state, and the few things that may be done to it
    admission   which requests are refused at once
    adoption    sessions found after a fail-over
    lifecycle   what each event does
    distrust    agents that failed a session are left alone for a moment
    paths, path_dispatcher, petals, bprr   the baselines without chains; for the simulator

A session is born with `StartSession`; its slots stay booked in `Book.slots` until every agent of it
said `SessionsClosed` or was lost. `CloseSessions` orders follow the end of its request.
"""

from scheduler.dispatch.chained.config import ChainedConfig
from scheduler.dispatch.chained.dispatcher import ChainedDispatcher
from scheduler.dispatch.chained.policies import POLICIES

__all__ = ["POLICIES", "ChainedConfig", "ChainedDispatcher"]
