"""Parts of sessions' key-value caches in transit from one agent to another.

A part is a range of blocks by a range of tokens (`CacheSpan`) with an array of all its keys and
values. Executors export and import parts (`catenary_agent.decoders.base`). This package has the
state of both sides while the parts of one session travel: those still to be sent
(`CacheSendProgress`), and those that have not arrived (`CacheReceiveProgress`). Within a host parts
may also pass in memory that one agent lends another (`catenary_agent.kv.lending`). It does not
depend on why a cache travels.
"""

from catenary_agent.kv.arrays import (
    CACHE_DTYPES,
    array_of_payload,
    bytes_of,
    datatype_of,
    to_bfloat16,
    to_float32,
)
from catenary_agent.kv.receive_progress import CacheReceiveProgress
from catenary_agent.kv.send_progress import CacheSendProgress
from catenary_agent.kv.span import CacheSpan, pieces

__all__ = [
    "CACHE_DTYPES",
    "CacheReceiveProgress",
    "CacheSendProgress",
    "CacheSpan",
    "array_of_payload",
    "bytes_of",
    "datatype_of",
    "pieces",
    "to_bfloat16",
    "to_float32",
]
