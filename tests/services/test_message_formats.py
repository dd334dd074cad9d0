"""Processes of two versions understand each other while a cluster is upgraded.

The rule: fields and methods are added, never changed, renumbered or removed. What is recorded in
`message_formats.json` (written anew at a release) is what processes that run somewhere send.
"""

from __future__ import annotations

import json
from pathlib import Path

from catenary_protos.catenary.v1 import scheduler_pb2
from suite_rules import message_formats

RECORDED = json.loads((Path(__file__).parent / "message_formats.json").read_text())


def test_no_field_of_a_message_in_use_was_changed() -> None:
    now = message_formats.formats()
    changed = [
        f"{message} {number}: {was} became {now.get(message, {}).get(number)}"
        for message, fields in RECORDED["messages"].items()
        for number, was in fields.items()
        if now.get(message, {}).get(number) != was
    ]
    assert changed == []


def test_no_method_in_use_was_changed() -> None:
    now = message_formats.methods()
    changed = [name for name, was in RECORDED["methods"].items() if now.get(name) != was]
    assert changed == []


def test_what_a_newer_process_adds_is_ignored() -> None:
    newer = b"\x9a\x3f\x03new"  # field 1011, a text
    hello = scheduler_pb2.AgentHello(agent_id="agent-0", incarnation=7)
    read = scheduler_pb2.AgentHello.FromString(hello.SerializeToString() + newer)
    assert (read.agent_id, read.incarnation) == ("agent-0", 7)


def test_a_message_of_a_kind_nobody_here_knows_has_none() -> None:
    newer = b"\xf2\x06\x00"  # field 110: a kind to come
    for message in (
        scheduler_pb2.SchedulerToAgentMessage,
        scheduler_pb2.SchedulerToGatewayMessage,
        scheduler_pb2.AgentMessage,
        scheduler_pb2.GatewayMessage,
    ):
        assert message.FromString(newer).WhichOneof("kind") is None


def test_what_an_older_process_leaves_out_has_a_meaning() -> None:
    hello = scheduler_pb2.AgentHello.FromString(b"\x0a\x07agent-0")
    assert hello.software_version == ""
    assert hello.virtual_level == 0
