"""The formats of our messages as a document: what may only be added to, never changed.

python tests/support/suite_rules/message_formats.py tests/services/message_formats.json     # at a release
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FileDescriptor

from catenary_protos.catenary.v1 import (
    admin_pb2,
    agent_pb2,
    common_pb2,
    frame_pb2,
    generation_pb2,
    scheduler_pb2,
)

_FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR
    for module in (admin_pb2, agent_pb2, common_pb2, frame_pb2, generation_pb2, scheduler_pb2)
)


def formats() -> dict[str, dict[str, list[object]]]:
    """Returns by message, and by number, the name, type and repetition of every field."""
    found: dict[str, dict[str, list[object]]] = {}
    for file in _FILES:
        for message in file.message_types_by_name.values():
            for each in _with_nested(message):
                found[each.full_name] = {
                    str(field.number): [field.name, field.type, field.is_repeated]
                    for field in each.fields
                }
    return found


def methods() -> dict[str, list[object]]:
    """Returns by method its request, response, and which of them are streams."""
    return {
        method.full_name: [
            method.input_type.full_name,
            method.output_type.full_name,
            method.client_streaming,
            method.server_streaming,
        ]
        for file in _FILES
        for service in file.services_by_name.values()
        for method in service.methods
    }


def document() -> dict[str, object]:
    """Returns both."""
    return {"messages": formats(), "methods": methods()}


def _with_nested(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for nested in message.nested_types:
        yield from _with_nested(nested)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(document(), indent=1, sort_keys=True) + "\n")
