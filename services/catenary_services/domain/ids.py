"""Identifiers as types, so that an agent's id cannot be passed where a batch's belongs."""

from __future__ import annotations

from typing import NamedTuple, NewType

AgentId = NewType("AgentId", str)
GatewayId = NewType("GatewayId", str)
ServerId = NewType("ServerId", str)
PlanId = NewType("PlanId", str)
BatchId = NewType("BatchId", int)
SessionId = NewType("SessionId", int)
ResourceId = NewType("ResourceId", str)
Epoch = NewType("Epoch", int)

Nanoseconds = int
"""A duration, or a moment on the monotonic clock of one scheduler epoch. Always an integer."""

NANOSECONDS_PER_SECOND = 1_000_000_000
NANOSECONDS_PER_MILLISECOND = 1_000_000


class RequestId(NamedTuple):
    """A request: the number its gateway gave it, unique within one gateway process."""

    gateway: GatewayId
    number: int

    def __str__(self) -> str:
        return f"{self.gateway}/{self.number}"


class ModelKey(NamedTuple):
    """A model and its version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"


class PartitionKey(NamedTuple):
    """Blocks `[first_block, last_block)` of a model."""

    model: ModelKey
    first_block: int
    last_block: int

    def __str__(self) -> str:
        return f"{self.model}[{self.first_block},{self.last_block})"
