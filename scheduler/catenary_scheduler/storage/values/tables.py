"""The tables in Redis: how each spells the names of its fields, and what the fields hold.

`read_table` reads one table whole; what cannot be read is returned as `RecordDamage`, beside the
readable rest. The text that is written is made by the functions named `.._text` here, or by `codec`
from a struct of `stored`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from catenary_protos.catenary.v1 import common_pb2
from catenary_scheduler.book import Reservation
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_scheduler.planning import Placement, parse_placement, placement_document
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import (
    UnreadableRecord,
    as_builtins,
    checked,
    decode_document,
    decode_line,
    encode_document,
    encode_line,
)
from catenary_scheduler.storage.values.stored import (
    DeploymentSpec,
    Identifiers,
    Link,
    Measurement,
    Place,
    ServerLink,
    StoredAgent,
    StoredBatch,
    StoredClock,
    StoredComputeTimes,
    StoredCost,
    StoredGeneration,
    StoredOwner,
    StoredPlacement,
    StoredProvenance,
    StoredRate,
    StoredReservation,
    StoredRollout,
    StoredScaling,
    StoredServerLink,
    StoredSession,
    StoredTimes,
)
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    ModelKey,
    PartitionKey,
    ResourceId,
    ServerId,
    SessionId,
)
from catenary_services.domain.plan import ChainHop
from catenary_services.errors import CatenaryError

_LONGEST_NAME: Final = 512
_LONGEST_PEER: Final = 65_536
_MOST_BLOCKS: Final = 1 << 20
_PARTITION = re.compile(r"(.+):([^:]+)\[(\d{1,7}),(\d{1,7})\)")
_RESOURCE = re.compile(r"(gpu|uplink|downlink)/(.+)|cache/([^/]+)/(.+)")
_GENERATION = "generation "
"""The word before the numbers of a `StoredGeneration`."""
_BY_NOW = " by now "
"""The words between the cost measured at load and the present one."""
_LINK = "link"
_SERVERS = "servers"


@dataclass(frozen=True, slots=True)
class RecordDamage:
    """A record that could not be read, and the reason."""

    table: str
    """A `keys.RedisTable`, a `keys.book_table`, or another key of the cluster."""
    name: bytes
    """Name of the field; empty if the whole key is damaged."""
    why: str
    value: bytes = b""
    """The first bytes of the value."""
    size: int = 0
    """Size of the whole value in bytes."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """Parsers of the fields of one table: a name first, then the value of that name."""

    name: Callable[[str], Any]
    value: Callable[[Any, str], Any]


def read_table(
    table: str, shape: TableShape, raw: Mapping[bytes, bytes]
) -> tuple[Any, list[RecordDamage]]:
    """Returns the readable records of a table by their parsed names, and the damaged ones."""
    records: dict[Any, Any] = {}
    damaged: list[RecordDamage] = []
    for name, value in raw.items():
        try:
            key = shape.name(_decoded(name))
            records[key] = shape.value(key, _decoded(value))
        except UnreadableRecord as error:
            damaged.append(RecordDamage(table, name, str(error), value, len(value)))
    return records, damaged


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise UnreadableRecord("is not UTF-8") from None


# ---- names ----


def _bounded(name: str) -> str:
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise UnreadableRecord("is no name")
    return name


def _model(name: str) -> ModelKey:
    model, _, version = _bounded(name).rpartition(":")
    if not model or not version:
        raise UnreadableRecord("is no model with its version")
    return ModelKey(model, version)


def partition_of(text: str) -> PartitionKey:
    """Returns the partition that `str(partition)` wrote.

    Raises:
        UnreadableRecord: The text is no partition.
    """
    found = _PARTITION.fullmatch(text)
    if found is None:
        raise UnreadableRecord(f"{text[:60]!r} is no partition")
    model, version, first, last = found.groups()
    key = PartitionKey(ModelKey(model, version), int(first), int(last))
    if not key.first_block < key.last_block <= _MOST_BLOCKS:
        raise UnreadableRecord(f"{text[:60]!r} has no blocks")
    return key


def _place_or_link(name: str) -> Place | Link | ServerLink:
    prefix, *ends = _bounded(name).split("|")
    if prefix == _SERVERS and len(ends) == 2 and all(ends):
        return ServerLink(ServerId(ends[0]), ServerId(ends[1]))
    if prefix == _LINK and len(ends) == 2 and all(ends):
        return AgentId(ends[0]), AgentId(ends[1])
    agent, _, partition = name.rpartition("|")
    if not agent:
        raise UnreadableRecord("names no agent")
    return AgentId(agent), partition_of(partition)


def _identifier(text: str) -> int:
    found: int = decode_line(text, Identifiers)[0]
    return _below_64_bits(found)


def _below_64_bits(number: int) -> int:
    if number >= 1 << 64:
        raise UnreadableRecord(f"{number} is no identifier")
    return number


def _owner(name: str) -> tuple[int, int]:
    owner = decode_line(name.replace(":", " "), StoredOwner)
    if name != f"{owner.number}:{owner.position}":
        raise UnreadableRecord("names no batch or session")
    return _below_64_bits(owner.number), owner.position


def _resource(name: str) -> ResourceId:
    found = _RESOURCE.fullmatch(_bounded(name))
    if found is None:
        raise UnreadableRecord("is no resource")
    if found[3] is not None:
        partition_of(found[4])
    return ResourceId(name)


def agent_of_resource(resource: ResourceId) -> AgentId | None:
    """Returns the agent whose device or cache a resource is; None for the links of a server."""
    found = _RESOURCE.fullmatch(resource)
    if found is None or found[1] in ("uplink", "downlink"):
        return None
    return AgentId(found[3] or found[2])


# ---- values ----


def placement_text(placement: Placement) -> str:
    """Returns a placement in the form of the table of plans."""
    return encode_document(placement_document(placement))


def _placement(text: str) -> Placement:
    known = as_builtins(decode_document(text, StoredPlacement))
    if not known["models"]:
        return Placement(())
    try:
        return parse_placement(known)
    except (CatenaryError, ValueError, OverflowError) as error:
        raise UnreadableRecord(str(error)) from None


def _line_of_text(text: str) -> str:
    if len(text) > _LONGEST_NAME or not (text.isprintable() or not text):
        raise UnreadableRecord("is not a short line of text")
    return text


def _scaling(text: str) -> dict[str, Any]:
    fields = decode_document(text, dict[str, Any])
    fields.pop("v", None)
    known = checked(fields, dict[str, StoredScaling])
    return {model: as_builtins(record) for model, record in known.items()}


_PLAN: Mapping[str, Callable[[str], Any]] = {
    "file": _line_of_text,
    "fixed": _placement,
    "fixed_before": _placement,
    "active": _placement,
    "active_id": _line_of_text,
    "notes": lambda text: decode_document(text, StoredProvenance),
    "last_switch": lambda text: decode_document(text, StoredRollout),
    "scaling": _scaling,
}


def _plan_field(name: str, text: str) -> Any:
    read = _PLAN.get(name)
    return read(text) if read is not None else None  # a field of a later version, which keeps it


def cost_text(cost: StoredCost) -> str:
    """Returns the cost of decoder blocks in the form of the table of measurements."""
    text = _GENERATION + encode_line(cost.at_load)
    return text if cost.by_now is None else text + _BY_NOW + encode_line(cost.by_now)


def times_text(times: StoredComputeTimes) -> str:
    """Returns compute times at batch 1, 2, .. in the form of the table of measurements."""
    text = " ".join(map(str, times.at_load))
    return text if times.by_now is None else text + _BY_NOW + " ".join(map(str, times.by_now))


def place_name(agent: AgentId, partition: PartitionKey) -> str:
    """Returns the field name of the measurements of a partition on an agent."""
    return f"{agent}|{partition}"


def link_name(source: AgentId, target: AgentId) -> str:
    """Returns the field name of the measured rate between two agents."""
    return f"{_LINK}|{source}|{target}"


def server_link_name(source: str, target: str) -> str:
    """Returns the field name of the measured link between two servers."""
    return f"{_SERVERS}|{source}|{target}"


def _measurement(name: Place | Link | ServerLink, text: str) -> Measurement:
    if isinstance(name, ServerLink):
        return decode_document(text, StoredServerLink)
    if isinstance(name[1], str):
        return int(decode_line(text, StoredRate)[0])
    if text.startswith(_GENERATION):
        at_load, _, by_now = text.removeprefix(_GENERATION).partition(_BY_NOW)
        told = decode_line(by_now, StoredGeneration) if by_now else None
        return StoredCost(decode_line(at_load, StoredGeneration), told)
    first, _, later = text.partition(_BY_NOW)
    changed = list(decode_line(later, StoredTimes)) if later else None
    return StoredComputeTimes(list(decode_line(first, StoredTimes)), changed)


def peer_text(peer: common_pb2.Peer) -> str:
    """Returns the addresses of a peer in the form of the table of peers."""
    return base64.b64encode(peer.SerializeToString()).decode()


def _peer(name: str, text: str) -> common_pb2.Peer:
    if len(text) > _LONGEST_PEER:
        raise UnreadableRecord("is longer than any peer")
    try:
        peer = common_pb2.Peer.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, DecodeError) as error:
        raise UnreadableRecord(f"is no peer: {error}") from None
    if peer.peer_id != name:
        raise UnreadableRecord(f"is the peer {peer.peer_id[:60]!r}")
    return peer


def _hops(name: SessionId, text: str) -> tuple[ChainHop, ...]:
    hops = decode_document(text, StoredSession).hops
    if any(hop.first_block >= hop.last_block for hop in hops):
        raise UnreadableRecord("has a hop without blocks")
    return tuple(
        ChainHop(AgentId(hop.agent), partition_of(hop.partition), hop.first_block, hop.last_block)
        for hop in hops
    )


def _lengths(name: ModelKey, text: str) -> LengthPredictor:
    try:
        return LengthPredictor.from_record(decode_document(text, dict[str, Any]))
    except (CatenaryError, OverflowError) as error:
        raise UnreadableRecord(str(error)) from None


def _reservation(resource: ResourceId, owner: tuple[int, int], text: str) -> Reservation:
    r = decode_line(text, StoredReservation)
    number, position = owner
    is_cache = resource.startswith("cache/")
    if is_cache != (r.slots > 0):
        raise UnreadableRecord("has slots of what has none, or none of a cache")
    if r.start_ns > r.end_ns or r.start_ns > r.expires_ns:
        raise UnreadableRecord("ends before it begins")
    return Reservation(
        BatchId(0 if is_cache else number),
        position,
        resource,
        r.start_ns,
        r.end_ns,
        r.expires_ns,
        bool(r.done),
        r.slots,
        SessionId(number if is_cache else 0),
    )


def book_shape(resource: ResourceId) -> TableShape:
    return TableShape(_owner, lambda owner, text: _reservation(resource, owner, text))


def read_clock(raw: Mapping[bytes, bytes]) -> StoredClock | None:
    """Returns the pair of moments that was written last; None if none ever was.

    Raises:
        UnreadableRecord: The stored fields are no such pair.
    """
    if not raw:
        return None
    try:
        fields = [raw[name].decode() for name in (b"scheduler_ns", b"redis_us")]
    except (KeyError, UnicodeDecodeError) as error:
        raise UnreadableRecord(f"is no pair of moments: {error}") from None
    clock: StoredClock = decode_line(" ".join(fields), StoredClock)
    return clock


SHAPES: Mapping[RedisTable, TableShape] = {
    RedisTable.DEPLOYMENTS: TableShape(
        _bounded, lambda _, text: decode_document(text, DeploymentSpec)
    ),
    RedisTable.PLAN: TableShape(_bounded, _plan_field),
    RedisTable.MEASURED: TableShape(_place_or_link, _measurement),
    RedisTable.AGENTS: TableShape(_bounded, lambda _, text: decode_document(text, StoredAgent)),
    RedisTable.PEERS: TableShape(_bounded, _peer),
    RedisTable.DRAINING: TableShape(_bounded, lambda _, text: _identifier(text)),
    RedisTable.RESOURCES: TableShape(_resource, lambda _, text: True),
    RedisTable.BATCHES: TableShape(_identifier, lambda _, text: decode_document(text, StoredBatch)),
    RedisTable.SESSIONS: TableShape(_identifier, _hops),
    RedisTable.LENGTHS: TableShape(_model, _lengths),
}
