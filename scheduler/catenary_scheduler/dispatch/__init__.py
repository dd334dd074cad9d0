"""All dispatch decisions, without I/O: events in, commands out.

`events` is the contract. `pooled` serves pooled pipelines, `chained` serves server chains,
`combined` has both over one book. `placing` chooses workers for sessions under objectives,
`auditing` compares the book with what agents and gateways hold; `availability` and `breaker` say
which agents can be given work.
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
