"""Messages are counted before they are made: who sends many small ones is named, and holds nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.errors import InvalidMessage
from catenary_services.rules.checking import MOST_VALUES, checked, too_many
from catenary_services.rules.sizing import has_few
from hostile.any_message import messages

Pack = scheduler_pb2.AgentMessages


def pack_of(partitions: int, times: int = 0) -> scheduler_pb2.AgentMessages:
    loaded = [scheduler_pb2.PartitionLoaded(compute_ns=[1] * times) for _ in range(partitions)]
    hello = scheduler_pb2.AgentHello(partitions=loaded)
    return Pack(messages=[scheduler_pb2.AgentMessage(hello=hello)])


def test_very_many_empty_messages_are_answered_with_an_offence() -> None:
    parse = checked(Pack.FromString, counted=True)
    assert parse is not None
    for pack in (
        pack_of(300_000),
        pack_of(1, 2_000_000),
        Pack(messages=[scheduler_pb2.AgentMessage()] * 300_000),
    ):
        offence = parse(pack.SerializeToString())
        assert isinstance(offence, InvalidMessage)
        assert "values" in offence.message


def test_as_many_as_there_may_be_are_read() -> None:
    pack = pack_of(MOST_VALUES // 2 - 2, 7)
    assert too_many(Pack.DESCRIPTOR, pack.SerializeToString()) is None


@given(messages(Pack.DESCRIPTOR))
def test_what_a_message_holds_is_counted(message: scheduler_pb2.AgentMessages) -> None:
    data = message.SerializeToString()
    assert has_few(Pack.DESCRIPTOR, data, len(data))
    if message.messages:
        assert not has_few(Pack.DESCRIPTOR, data, 0)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_left_to_the_parser(data: bytes) -> None:
    has_few(Pack.DESCRIPTOR, data, 1_000)
