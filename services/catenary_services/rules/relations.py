"""Relations between fields of a message, which rules of single fields cannot express.

Only conditions on a message by itself stand here. What must agree with something that a process
knows (a batch it ordered, a partition it has loaded, the length of a payload) is checked where it
is known. So is what a frame says of its rows and tensors, because there its batch can be told why
it fails (`catenary_agent.engine.inbound.intake`).

A relation is data: the check of messages and the one of their bytes
(`catenary_services.rules.walking`) are both made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor


@dataclass(frozen=True, slots=True)
class SumAtMost:
    """A sum that is at most some value, in every message of a type.

    Attributes:
        field: The field to blame if it is larger.
        why: The text of the error in that case.
        parts: The summands: unsigned fields, and perhaps a number. "slices.rows" is a field of a
            message inside this one; where there are several, the sum of each is meant.
        most: A field or a number; of a repeated field, its number of items.
    """

    field: str
    why: str
    parts: tuple[str | int, ...]
    most: str | int


@dataclass(frozen=True, slots=True)
class SameText:
    """Two texts that are equal, in every message of a type.

    Attributes:
        field: The field to blame if they differ.
        why: The text of the error in that case.
        other: The field it has to agree with.
    """

    field: str
    why: str
    other: str


Relation: TypeAlias = SumAtMost | SameText

_BLOCKS = SumAtMost("last_block", "is below first_block", ("first_block",), "last_block")

RELATIONS: Mapping[str, tuple[Relation, ...]] = MappingProxyType(
    {
        "catenary.v1.Hop": (
            _BLOCKS,
            SumAtMost(
                "reserved_duration_ns",
                "ends beyond all time",
                ("reserved_start_ns", "reserved_duration_ns"),
                (1 << 63) - 1,
            ),
            SumAtMost(
                "transfer_duration_ns",
                "ends beyond all time",
                ("transfer_start_ns", "transfer_duration_ns"),
                (1 << 63) - 1,
            ),
        ),
        "catenary.v1.HopTiming": (_BLOCKS,),
        "catenary.v1.PartitionKey": (
            SumAtMost("last_block", "no block is in it", ("first_block", 1), "last_block"),
        ),
        "catenary.v1.ChainHopStatus": (_BLOCKS,),
        "catenary.v1.PoolStatus": (_BLOCKS,),
        "catenary.v1.SessionCache": (
            _BLOCKS,
            SumAtMost("last_token", "is below first_token", ("first_token",), "last_token"),
        ),
        "catenary.v1.DispatchBatch": (
            SumAtMost(
                "slices",
                "reach beyond batch_rows",
                ("slices.batch_row", "slices.rows"),
                "batch_rows",
            ),
        ),
        "catenary.v1.SubmitRequest": (
            SumAtMost(
                "in_flight",
                "reach beyond the rows of the request",
                ("in_flight.request_row", "in_flight.rows"),
                "rows",
            ),
        ),
        "catenary.v1.SubmitSession": (
            SumAtMost(
                "progress.generated_tokens",
                "is more than max_tokens",
                ("progress.generated_tokens",),
                "max_tokens",
            ),
            SumAtMost(
                "progress.decode_ns",
                "is more than waited_ns",
                ("progress.first_token_ns", "progress.decode_ns"),
                "waited_ns",
            ),
        ),
        "catenary.v1.BatchInAgent": (  # the position of a result is one behind the last hop
            SumAtMost("position", "is behind the end of the route", ("position",), "route"),
        ),
        "catenary.v1.SessionMoved": (
            SumAtMost("held_ns", "is more than duration_ns", ("held_ns",), "duration_ns"),
        ),
        "catenary.v1.GenerationReport": tuple(
            SumAtMost("lone_steps", "is more than all steps come to", (part,), whole)
            for part, whole in (
                ("lone_steps", "decode_steps"),
                ("lone_context_tokens", "decode_context_tokens"),
                ("lone_ns", "decode_ns"),
                ("decode_steps", "decode_rows"),
            )
        ),
        "catenary.v1.GatewayHello": (SameText("peer.peer_id", "is not gateway_id", "gateway_id"),),
        "catenary.v1.AgentHello": (SameText("peer.peer_id", "is not agent_id", "agent_id"),),
    }
)


def holds(descriptor: Descriptor, relation: Relation) -> Callable[[Any], bool]:
    """Returns a function that tells if a relation holds in a message."""
    if isinstance(relation, SameText):
        source = f"m.{relation.field} == m.{relation.other}"
    else:
        repeated = {field.name for field in descriptor.fields if field.is_repeated}
        heads = {p.partition(".")[0] for p in relation.parts if isinstance(p, str)} & repeated
        sums = []
        for part in relation.parts:
            head, _, inner = str(part).partition(".")
            sums.append(str(part) if isinstance(part, int) else f"m.{part}")
            if head in heads:
                sums[-1] = f"x.{inner}"
        most = f"m.{relation.most}" if isinstance(relation.most, str) else str(relation.most)
        source = f"{' + '.join(sums)} <= {f'len({most})' if relation.most in repeated else most}"
        for head in heads:
            source = f"all({source} for x in m.{head})"
    made: Callable[[Any], bool] = eval(f"lambda m: {source}")
    return made
