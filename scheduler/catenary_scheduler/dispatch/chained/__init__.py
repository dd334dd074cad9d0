"""Dispatch of sessions to server chains: which chain each runs on, and which slots are booked.

    dispatcher  events in, commands out
    config      limits and waiting times; packing_rules those of packing
    tracking    what is known of every open request and every session
    chain_state the chains of the active plan: how many sessions each has and may have
    placement   where the next request goes, by predicted times under the present load: workers, and
                the policies "least-time" (a deployment's default) and "slo" (Aladdin)
    policies    a policy returns a route (hops, and the slots they take); the seam is `policy`, the
                plainest `jffc`: join the fastest free chain (server-chain composition, Algorithm 3)
    queues      one model: its chains, its observed rate, its waiting requests; policies by name
    sessions    the table of all state, and what handlers share: requests that wait or are answered,
                sessions with the slots they hold, how they begin and are closed
    migration   sessions that move to another chain while they generate, and those that must
    packing     which sessions should be where, epoch by epoch (Mell)
    admission   what each event does, from request to answer: refusals, what a new leader
                adopts, what happens where memory runs out or time has passed

Handlers take the table, and the handlers they need, as arguments; the dispatcher makes them all.

A session begins with `StartSession`; its slots stay booked in `Book.slots` until every agent of it
said `SessionsClosed` or was lost. `CloseSessions` orders follow the end of its request. A session
that moves begins a second time on another chain; the first one is closed at `SessionMoved`.
"""

from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_scheduler.dispatch.chained.dispatcher import ChainedDispatcher
from catenary_scheduler.dispatch.chained.queues.policies import POLICIES

__all__ = ["POLICIES", "ChainedConfig", "ChainedDispatcher"]
