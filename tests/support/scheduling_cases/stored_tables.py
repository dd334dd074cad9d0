"""Tables as Redis would hand them out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from catenary_protos.catenary.v1 import common_pb2
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.storage.keys import RedisKeys, RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.tables import SHAPES, peer_text, read_table

PIPELINES = {
    "name": "toy",
    "version": "1",
    "slo_ms": 200,
    "float16_boundaries": True,
    "pipelines": [
        {
            "batch": 2,
            "partitions": [
                {"blocks": [0, 2], "agents": ["agent-0"]},
                {"blocks": [2, 4], "agents": ["agent-1"]},
            ],
        }
    ],
}
CHAINS = {
    "name": "llm",
    "version": "1",
    "slo_ms": 5000.5,
    "float16_boundaries": False,
    "session_tokens": 128,
    "time_to_first_token_slo_ms": 800,
    "packing": "pack",
    "chains": [
        {
            "capacity": 2,
            "cache_tokens": 256,
            "hops": [
                {"agent": "agent-0", "blocks": [0, 4], "entry": 0},
                {"agent": "agent-1", "blocks": [2, 6], "entry": 4},
            ],
        }
    ],
    "hosts": [
        {"agent": "agent-0", "blocks": [0, 4], "block_slots": 8},
        {"agent": "agent-1", "blocks": [2, 6], "block_slots": 4, "cache_tokens": 99},
    ],
}
PLACEMENT = json.dumps({"models": [PIPELINES, CHAINS]})
SUMS = [1.0, 2.5, 3.0, 4.0, 5e9]


def lengths() -> str:
    predictor = LengthPredictor()
    for answer in (3, 40, 700):
        predictor.learn(100, answer)
    return encode_document(predictor.to_record())


GOOD: dict[str, dict[str, str]] = {
    RedisTable.DEPLOYMENTS: {
        "toy": '{"slo_ns": 0, "max_batch": 0, "partitions": null, "packing": null}',
        "llm:x:1": '{"slo_ns": 5, "max_batch": 2, "partitions": 3, "packing": "balance"}',
    },
    RedisTable.PLAN: {
        "file": "ab12",
        "fixed": PLACEMENT,
        "fixed_before": PLACEMENT,
        "active": PLACEMENT,
        "active_id": "plan-1-1",
        "notes": json.dumps(
            {
                "planner": "pooled",
                "cause": "a start",
                "fallback": "",
                "lines": ["a"],
                "remarks": [],
                "shares": [["toy", "1", 0.5]],
                "throughput_rps": [["toy", "1", 9]],
                "chain_lines": [],
                "latency_ns": [],
                "binding": ["agents"],
            }
        ),
        "scaling": json.dumps(
            {"llm:1": {"line": {"prior": SUMS, "history": SUMS}, "cold_start_ns": 7}}
        ),
        "last_switch": json.dumps(
            {
                "from_plan": "a",
                "to_plan": "b",
                "phase": "done",
                "cause": "x",
                "problem": "",
                "duration_ns": 5,
                "downtime_ns": [[["toy", "1"], 3]],
            }
        ),
    },
    RedisTable.MEASURED: {
        "agent-0|toy:1[0,2)": "5 6 7",
        "agent-0|llm:x:1[0,4)": "generation 1 2 3 4 0.5 6 7 8 by now 2 2 3 4 0.5 6 7 8",
        "agent-1|llm:x:1[0,4)": "generation 1 2 3 4",
        "link|agent-0|agent-1": "1000000",
        "servers|first|second": json.dumps(
            {
                "round_trip_ns": 400000,
                "bytes_per_second": 6250000,
                "measured_unix_s": 1790000000,
                "addresses": "10.0.0.5>10.0.0.6",
            }
        ),
    },
    RedisTable.AGENTS: {
        "agent-0": json.dumps(
            {
                "device": "cpu",
                "device_class": "cpu",
                "server": "s",
                "memory_bytes": 1,
                "link_bytes_per_second": 2,
                "virtual_level": 1,
                "device_id": "",
                "incarnation": 2**63,
                "state": "ready",
                "partitions": ["toy:1[0,2)"],
            }
        )
    },
    RedisTable.PEERS: {"agent-0": peer_text(common_pb2.Peer(peer_id="agent-0", incarnation=4))},
    RedisTable.DRAINING: {"agent-0": str(2**64 - 1)},
    RedisTable.RESOURCES: {"gpu/agent-0": "1", "uplink/s": "1", "cache/agent-0/llm:x:1[0,4)": "1"},
    RedisTable.BATCHES: {
        str(2**40 + 1): json.dumps(
            {
                "rows": 1,
                "expected_finish_ns": 5,
                "path": [["agent-0", "toy:1[0,2)", 1, 2]],
                "slices": [["gateway-0/1", 0, 1, 0]],
            }
        )
    },
    RedisTable.SESSIONS: {
        str(2**40 + 2): json.dumps(
            {
                "request": "gateway-0/1",
                "chain": "llm:x:1/0",
                "hops": [["agent-0", "llm:x:1[0,4)", 0, 4]],
            }
        )
    },
    RedisTable.LENGTHS: {"llm:x:1": lengths()},
    "book:gpu/agent-0": {"7:0": "1 2 3 0", f"{2**63}:3": "-5 2 3 1"},
    "book:cache/agent-0/llm:x:1[0,4)": {"7:0": "1 3 3 0 4"},
}
"""What the scheduler of commit 64dbb8b writes, a table each."""


def as_raw(fields: Mapping[str, str | None]) -> dict[bytes, bytes]:
    return {name.encode(): str(value).encode() for name, value in fields.items()}


def stored_of(table: RedisTable, fields: Mapping[str, str | None]) -> Any:
    """Returns the readable records of a table."""
    return read_table(table, SHAPES[table], as_raw(fields))[0]


async def raw_table(redis: Redis, keys: RedisKeys, table: str) -> dict[str, str]:
    """Returns the fields of a table as they are in Redis, readable or not."""
    fields = await redis.hgetall(keys.table(table))  # type: ignore[misc]
    return {name.decode(): value.decode() for name, value in fields.items()}
