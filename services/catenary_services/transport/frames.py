"""The frame codec: the 32-byte prefix every transport sends, and tensors inside a payload.

A message on the wire is `prefix, header, payload`. The prefix has the lengths of the others and a
checksum of its own, so that a stream out of step is noticed at the next message. The header is
opaque here (a serialized `catenary.v1.FrameHeader`). The payload is the raw bytes of the tensors,
each beginning at a multiple of 64, as vector instructions and device copies prefer.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from catenary_protos.catenary.v1.frame_pb2 import FrameHeader, TensorHeader
from catenary_services.domain.tensors import BYTES, DTYPE_OF
from catenary_services.errors import InvalidInput, InvalidMessage
from catenary_services.log import get_logger
from catenary_services.rules import parsed
from catenary_services.transport.interface import NOBODY, ReceivedFrame

ALIGNMENT = 64
PREFIX_BYTES = 32
MAX_HEADER_BYTES = 1 << 20
"""The longest header, longer than any route and its slices need; a longer one is refused."""
MAX_DIMENSIONS = 32

_log = get_logger("catenary_services.transport")
_BODY = struct.Struct("<4sBBHIQQ")
_PREFIX = struct.Struct("<4sBBHIQQI")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"CTN1"
_VERSION = 1


def read_header(frame: ReceivedFrame) -> FrameHeader:
    """Returns the parsed header of a frame, after checking the rules of messages.

    A peer that sends a bad header loses its connection with the next frame, because nothing else
    that the link carries can be trusted.

    Raises:
        InvalidMessage: The bytes are no header, or it breaks a rule.
    """
    try:
        return parsed(FrameHeader, frame.header)
    except InvalidMessage as error:
        if frame.sender is not NOBODY:
            frame.sender.is_refused = True
        _log.warning("invalid_frame", sender=frame.sender.name, why=error.message)
        raise


class MessageKind(IntEnum):
    """The kind of a message."""

    HELLO = 1
    """The first message of a link; its header is the sender's peer id."""
    WELCOME = 2
    """The answer to HELLO; its header is the receiver's peer id."""
    FRAME = 3
    """A frame whose payload follows the header."""
    SLOT = 4
    """A frame whose payload lies in shared or written memory; `argument` names the slot."""
    SEGMENT = 5
    """A file descriptor of `payload_bytes` of memory, which `argument` names from now on."""
    DROP = 6
    """Segment `argument` is no longer used."""
    RELEASE = 7
    """Slot `argument` may be written again."""
    CREDIT = 8
    """The receiver has taken `argument` bytes since the stream began."""
    PACK = 9
    """Messages of a control stream; they are the payload."""
    END = 10
    """The end of a control stream; its payload is the reason, a `google.rpc.Status`."""
    RING = 11
    """A sender's request for memory that it may write into, and the answer, whose header says where
    that is."""


_KINDS = {int(kind): kind for kind in MessageKind}


class MessagePrefix(NamedTuple):
    """The first 32 bytes of every message."""

    kind: MessageKind
    header_bytes: int = 0
    payload_bytes: int = 0
    argument: int = 0


def encode_prefix(prefix: MessagePrefix) -> bytes:
    body = _BODY.pack(
        _MAGIC, _VERSION, prefix.kind, 0, prefix.header_bytes, prefix.payload_bytes, prefix.argument
    )
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode_prefix(data: bytes | memoryview, max_payload_bytes: int) -> MessagePrefix:
    """Returns the prefix at the beginning of `data`.

    Raises:
        InvalidInput: It is no valid prefix, or announces more bytes than are ever sent.
    """
    if len(data) < PREFIX_BYTES:
        raise InvalidInput("prefix", f"{len(data)} bytes where {PREFIX_BYTES} are needed")
    magic, version, kind, spare, header_bytes, payload_bytes, argument, checksum = (
        _PREFIX.unpack_from(data)
    )
    if magic != _MAGIC:
        raise InvalidInput("prefix.magic", "not a Catenary frame")
    if version != _VERSION:
        raise InvalidInput("prefix.version", f"version {version}, this side speaks {_VERSION}")
    if checksum != zlib.crc32(data[: _BODY.size]):
        raise InvalidInput("prefix.checksum", "does not match")
    known = _KINDS.get(kind)
    if known is None or spare:
        raise InvalidInput("prefix.kind", f"unknown kind {kind}")
    if header_bytes > MAX_HEADER_BYTES:
        raise InvalidInput("prefix.header_bytes", f"{header_bytes} exceeds {MAX_HEADER_BYTES}")
    if payload_bytes > max_payload_bytes:
        raise InvalidInput("prefix.payload_bytes", f"{payload_bytes} exceeds {max_payload_bytes}")
    return MessagePrefix(known, header_bytes, payload_bytes, argument)


def align(nbytes: int) -> int:
    """Returns `nbytes` rounded up to a multiple of 64."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def layout(
    tensors: Sequence[tuple[str, str, Sequence[int]]], encoded: Mapping[str, int] | None = None
) -> tuple[list[TensorHeader], int]:
    """Computes where tensors lie in a payload, one after the other.

    Args:
        tensors: Name, Open Inference Protocol datatype and shape of each.
        encoded: The size of the encoding of each tensor of BYTES, by its name.

    Returns:
        A header for each tensor, and the payload's size in bytes.

    Raises:
        InvalidInput: A datatype is unknown, or a dimension negative.
    """
    headers: list[TensorHeader] = []
    end = 0
    for index, (name, datatype, shape) in enumerate(tensors):
        if shape and min(shape) < 0:
            raise InvalidInput(f"tensors[{index}].shape", f"{list(shape)} has a free dimension")
        dtype = DTYPE_OF.get(datatype)
        if dtype is not None:
            nbytes = math.prod(shape) * dtype.itemsize
        elif datatype == BYTES and encoded is not None and name in encoded:
            nbytes = encoded[name]
        else:
            raise InvalidInput(f"tensors[{index}].datatype", f"{datatype!r} has no fixed size")
        offset = align(end)
        headers.append(
            TensorHeader(name=name, datatype=datatype, shape=shape, offset=offset, nbytes=nbytes)
        )
        end = offset + nbytes
    return headers, end


def tensor_views(
    headers: Iterable[TensorHeader], payload: memoryview
) -> dict[str, npt.NDArray[np.generic]]:
    """Returns each tensor by name, without copying it.

    The arrays are writable if `payload` is, and valid as long as it is. A BYTES tensor is returned
    as the uint8 array of its encoding (`catenary_services.transport.bytes_tensors`).

    Raises:
        InvalidInput: A datatype, shape, size or offset is wrong.
    """
    views: dict[str, npt.NDArray[np.generic]] = {}
    for index, header in enumerate(headers):
        if header.name in views:
            raise InvalidInput(f"tensors[{index}].name", f"{header.name!r} appears twice")
        views[header.name] = _view(f"tensors[{index}]", header, payload)
    return views


def _view(field: str, header: TensorHeader, payload: memoryview) -> npt.NDArray[np.generic]:
    shape = tuple(header.shape)
    if len(shape) > MAX_DIMENSIONS or (shape and min(shape) < 0):
        raise InvalidInput(f"{field}.shape", f"{list(shape)[:MAX_DIMENSIONS]} is not possible")
    if header.offset % ALIGNMENT:
        raise InvalidInput(f"{field}.offset", f"{header.offset} is no multiple of {ALIGNMENT}")
    if header.offset + header.nbytes > len(payload):
        raise InvalidInput(
            f"{field}.nbytes",
            f"bytes {header.offset} to {header.offset + header.nbytes} of {len(payload)}",
        )
    if header.datatype == BYTES:
        return np.frombuffer(payload, np.uint8, header.nbytes, header.offset)
    dtype = DTYPE_OF.get(header.datatype)
    if dtype is None:
        raise InvalidInput(f"{field}.datatype", f"{header.datatype!r} is unknown")
    elements = math.prod(shape)
    if elements * dtype.itemsize != header.nbytes:
        raise InvalidInput(
            f"{field}.nbytes",
            f"{header.nbytes}, but {header.datatype} {list(shape)} has {elements * dtype.itemsize}",
        )
    if elements == 0:
        # frombuffer refuses empty buffers; NumPy itself refuses zeros beside huge dimensions.
        try:
            return np.empty(shape, dtype)
        except ValueError as error:
            raise InvalidInput(f"{field}.shape", str(error)) from error
    return np.frombuffer(payload, dtype, elements, header.offset).reshape(shape)
