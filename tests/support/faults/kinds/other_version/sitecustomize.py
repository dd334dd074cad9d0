"""Makes the agent that is started with this folder on its path speak as another version would.

What it sends lacks the newer fields and has some that nobody knows; its software is of another
version. Python imports a module of this name before anything else.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

_UNKNOWN = b"\xc2\x3e\x05later"
"""Field 1000, a string."""
_NEWER = ("software_version", "leader", "draining", "device_id", "virtual_level")
_real_version = importlib.metadata.version


def _version(name: str) -> str:
    return "99.0.0" if name == "catenary" else _real_version(name)


importlib.metadata.version = _version


def _older(data: bytes) -> bytes:
    from catenary_protos.catenary.v1 import scheduler_pb2

    messages = scheduler_pb2.AgentMessages.FromString(data)
    for message in messages.messages:
        if message.WhichOneof("kind") == "hello":
            for field in _NEWER:
                if field in message.hello.DESCRIPTOR.fields_by_name:
                    message.hello.ClearField(field)
    return bytes(messages.SerializeToString()) + _UNKNOWN


def _patch() -> None:
    from catenary_services.control.control_stream import ControlStream
    from catenary_services.transport.frames import MessageKind

    real = ControlStream.write

    @functools.wraps(real)
    def write(self: Any, kind: MessageKind, data: bytes) -> None:
        real(self, kind, _older(data) if kind is MessageKind.PACK else data)

    ControlStream.write = write  # type: ignore[method-assign]


_patch()
