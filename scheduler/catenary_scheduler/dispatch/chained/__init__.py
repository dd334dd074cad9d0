"""Serving server chains: which chain a session runs on, who waits, which slots are booked.

    dispatcher  events in, commands out
    policy      the seam: a policy returns a route (hops, and the slots they take)
    jffc        join the fastest free chain, the default (server-chain composition, Algorithm 3)
    balancing   JSQ, SA-JSQ, JIQ, SED, to compare with
    lines       where requests wait: one queue for all chains, or one per chain
    desk        one model: chains, line, observed rate
    holding     all state, and sessions with the slots they hold: they begin, they are closed
    ledger      requests: they wait, have a session, or are answered
    moving      sessions that go on, on another chain, while they generate
    straying    sessions where nothing should be any more, and destinations, where these go
    reseating   seats of sessions that move: at both workers until the move is over
    token_room, overflow   chains with more slots than memory holds at full length
    packing_*   which sessions should be where, epoch by epoch (Mell)
    views       sessions for those who look from outside
    admission   which requests are refused at once
    adoption    sessions found after a fail-over
    lifecycle   what each event does
    failure_backoff  agents that failed a session are suspected for a moment
    paths, path_dispatcher, petals, bprr   the baselines without chains; for the simulator

A session is born with `StartSession`; its slots stay booked in `Book.slots` until every agent of it
said `SessionsClosed` or was lost. `CloseSessions` orders follow the end of its request. One that
moves is born a second time, on another chain, and the first is closed at `SessionMoved`.
"""

from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_scheduler.dispatch.chained.dispatcher import ChainedDispatcher
from catenary_scheduler.dispatch.chained.policies.registry import POLICIES

__all__ = ["POLICIES", "ChainedConfig", "ChainedDispatcher"]
