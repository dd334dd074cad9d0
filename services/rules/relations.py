"""What one field says about another: the relations that rules of single fields cannot say.

Only what holds of a message by itself stands here. What must agree with something a process knows
(a batch it ordered, a partition it has loaded, the length of a payload) is asked where it is known.
So is what a frame says of its rows and tensors, because there its batch can be told why it fails
(`gpu_agent.engine.intake`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Relation:
    """One thing that is true of every message of a type.

    Attributes:
        field: Who is to blame if it is not.
        why: What is wrong then.
        holds: Whether it is true.
    """

    field: str
    why: str
    holds: Callable[[Any], bool]


def _blocks(message: Any) -> bool:
    return bool(message.first_block <= message.last_block)


def _some_blocks(message: Any) -> bool:
    return bool(message.first_block < message.last_block)


def _slices_in_batch(message: Any) -> bool:
    rows = message.batch_rows
    return all(piece.batch_row + piece.rows <= rows for piece in message.slices)


def _on_route(message: Any) -> bool:
    position = message.position  # that of a result is one behind the last hop
    return not position or bool(position <= len(message.route))


def _rows_in_flight(message: Any) -> bool:
    rows = message.rows
    return all(part.request_row + part.rows <= rows for part in message.in_flight)


def _answer_tokens(message: Any) -> bool:
    return bool(
        not message.HasField("progress") or message.progress.generated_tokens <= message.max_tokens
    )


def _waited_for_tokens(message: Any) -> bool:
    if not message.HasField("progress"):
        return True
    progress = message.progress
    return bool(progress.first_token_ns + progress.decode_ns <= message.waited_ns)


def _cached_tokens(message: Any) -> bool:
    return bool(message.first_token <= message.last_token)


def _lone_within_all(message: Any) -> bool:
    return bool(
        message.lone_steps <= message.decode_steps
        and message.lone_context_tokens <= message.decode_context_tokens
        and message.lone_ns <= message.decode_ns
        and message.decode_steps <= message.decode_rows
    )


def _held_within_all(message: Any) -> bool:
    return bool(message.held_ns <= message.duration_ns)


def _hop_reservation(message: Any) -> bool:
    return bool(message.reserved_start_ns + message.reserved_duration_ns < 1 << 63)


def _same_name(name: str) -> Callable[[Any], bool]:
    def holds(message: Any) -> bool:
        return bool(getattr(message, name) == message.peer.peer_id)

    return holds


_BLOCKS = Relation("last_block", "is below first_block", _blocks)
_SLICES = Relation("slices", "reach beyond batch_rows", _slices_in_batch)

RELATIONS: Mapping[str, tuple[Relation, ...]] = MappingProxyType(
    {
        "catenary.v1.Hop": (
            _BLOCKS,
            Relation("reserved_duration_ns", "ends beyond all time", _hop_reservation),
        ),
        "catenary.v1.HopTiming": (_BLOCKS,),
        "catenary.v1.PartitionKey": (Relation("last_block", "no block is in it", _some_blocks),),
        "catenary.v1.ChainHopStatus": (_BLOCKS,),
        "catenary.v1.PoolStatus": (_BLOCKS,),
        "catenary.v1.SessionCache": (
            _BLOCKS,
            Relation("last_token", "is below first_token", _cached_tokens),
        ),
        "catenary.v1.DispatchBatch": (_SLICES,),
        "catenary.v1.SubmitRequest": (
            Relation("in_flight", "reach beyond the rows of the request", _rows_in_flight),
        ),
        "catenary.v1.SubmitSession": (
            Relation("progress.generated_tokens", "is more than max_tokens", _answer_tokens),
            Relation("progress.decode_ns", "is more than waited_ns", _waited_for_tokens),
        ),
        "catenary.v1.BatchInAgent": (
            Relation("position", "is behind the end of the route", _on_route),
        ),
        "catenary.v1.SessionMoved": (
            Relation("held_ns", "is more than duration_ns", _held_within_all),
        ),
        "catenary.v1.GenerationReport": (
            Relation("lone_steps", "is more than all steps come to", _lone_within_all),
        ),
        "catenary.v1.GatewayHello": (
            Relation("peer.peer_id", "is not gateway_id", _same_name("gateway_id")),
        ),
        "catenary.v1.AgentHello": (
            Relation("peer.peer_id", "is not agent_id", _same_name("agent_id")),
        ),
    }
)
