"""Parts of sessions' key-value caches on their way from one agent to another.

A part is a range of blocks by a range of tokens (`CacheSpan`) and an array of all its keys and
values. Executors export and import parts (`catenary_agent.decoders.base`); here is what both sides
keep in mind while one session's parts travel: what is still to be sent (`CacheSendProgress`), and
what has not come yet (`CacheReceiveProgress`). Nothing here knows why a cache travels.
"""

from catenary_agent.kv.arrays import array_of_payload, datatype_of, to_bfloat16, to_float32
from catenary_agent.kv.receive_progress import CacheReceiveProgress
from catenary_agent.kv.send_progress import CacheSendProgress
from catenary_agent.kv.span import CacheSpan, pieces

__all__ = [
    "CacheReceiveProgress",
    "CacheSendProgress",
    "CacheSpan",
    "array_of_payload",
    "datatype_of",
    "pieces",
    "to_bfloat16",
    "to_float32",
]
