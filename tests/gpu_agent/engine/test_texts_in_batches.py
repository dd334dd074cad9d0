"""Tensors whose elements or rows have no fixed size, on their way through an agent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from catenary_agent.engine.partitions import LoadedPartition
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.transport.bytes_tensors import decode_bytes, encode_bytes
from catenary_services.transport.frames import layout
from tests.support.agent_harness import MODEL, ScriptedExecutor, TestPeer, header


class Shouting(ScriptedExecutor):
    """Returns every text in capitals, and its length."""

    def __init__(self, first: int = 0, last: int = 1) -> None:
        super().__init__(PartitionKey(MODEL, first, last))
        self.inputs = (TensorSpec("words", "BYTES", (ANY, 2)),)
        self.outputs = (
            TensorSpec("words", "BYTES", (ANY, 2)),
            TensorSpec("lengths", "INT64", (ANY, 2)),
        )
        self.wrote_in_place = []

    def output_shapes(self, input_shapes: Sequence[tuple[int, ...]]):
        return [tuple(input_shapes[0])] * 2

    def run(self, inputs, outputs=None):
        self.wrote_in_place.append(outputs is not None)
        (words,) = inputs
        assert words.dtype == np.object_
        loud = np.array([[word.upper() for word in row] for row in words], np.object_)
        return [loud, np.array([[len(word) for word in row] for row in words], np.int64)]


class Adding(ScriptedExecutor):
    """Returns the sum of each row, whatever its length."""

    def __init__(self) -> None:
        super().__init__(PartitionKey(MODEL, 0, 1))
        self.inputs = (TensorSpec("ids", "INT64", (ANY, ANY)),)
        self.outputs = (TensorSpec("sums", "INT64", (ANY,)),)

    def output_shapes(self, input_shapes: Sequence[tuple[int, ...]]):
        return [(input_shapes[0][0],)]

    def run(self, inputs, outputs=None):
        self.ran.append(inputs[0].copy())
        return [inputs[0].sum(1)]


def texts(*rows: Sequence[str]) -> np.ndarray:
    return np.array([[word.encode() for word in row] for row in rows], np.object_)


async def send(
    gateway: TestPeer, made: frame_pb2.FrameHeader, words: np.ndarray, encoding: bytes | None = None
) -> None:
    encoding = encode_bytes(words) if encoding is None else encoding
    headers, _ = layout([("words", "BYTES", words.shape)], {"words": len(encoding)})
    made.tensors.extend(headers)
    await gateway.send("a-0", made, words=np.frombuffer(encoding, np.uint8))


def received(result, name: str = "words") -> np.ndarray:  # type: ignore[no-untyped-def]
    shape = next(tensor.shape for tensor in result.header.tensors if tensor.name == name)
    return decode_bytes(result.tensors[name], shape)


async def test_texts_of_a_batch_come_back_to_their_own_gateways(net):
    first, second = await net.gateway("gw-0"), await net.gateway("gw-1")
    node = await net.agent()
    executor = Shouting()
    node.engine.partitions.add(LoadedPartition(executor, False, 16))
    mine, theirs = (
        texts(("a", ""), ("ü" * 300, "b")),
        texts(
            ("cd", "e"),
        ),
    )
    await send(second, header(rows=1, batch_rows=3, first_row=1, gateway="gw-1", request=9), theirs)
    await send(first, header(rows=1, batch_rows=3, first_row=0, request=1), mine[:1])
    await send(first, header(rows=1, batch_rows=3, first_row=2, request=2), mine[1:])
    to_first, to_second = await first.next(), await second.next()
    assert received(to_first).tolist() == [[w.upper() for w in row] for row in mine.tolist()]
    assert received(to_second).tolist() == [[b"CD", b"E"]]
    assert to_first.tensors["lengths"].tolist() == [[1, 0], [600, 1]]
    assert executor.wrote_in_place == [False]


async def test_texts_pass_from_agent_to_agent_and_within_one(net):
    gateway = await net.gateway()
    node, other = await net.agent("a-0"), await net.agent("a-1")
    for place, hops in ((node, (0, 1)), (node, (1, 2)), (other, (2, 3))):
        executor = Shouting(*hops)
        executor.outputs = executor.outputs[:1]
        whole = executor.run
        executor.run = lambda inputs, outputs=None, whole=whole: whole(inputs, outputs)[:1]
        place.engine.partitions.add(LoadedPartition(executor, False, 16))
    words = texts(("one", "two"))
    await send(gateway, header(agents=["a-0", "a-0", "a-1"]), words)
    assert received(await gateway.next()).tolist() == [[b"ONE", b"TWO"]]


async def test_an_encoding_that_is_wrong_fails_its_batch_and_nothing_else(net):
    gateway, node = await net.gateway(), await net.agent()
    node.engine.partitions.add(LoadedPartition(Shouting(), False, 16))
    words = texts(("one", "two"))
    spoilt = bytearray(encode_bytes(words))
    spoilt[0] = 200
    await send(gateway, header(1), words, bytes(spoilt))
    (failed,) = await node.told.wait_for("batch_failed")
    assert failed.failure.reason == "INVALID_INPUT"
    await send(gateway, header(2), np.empty((10**6, 2), np.object_), encode_bytes(words))
    _, failed = await node.told.wait_for("batch_failed", 2)
    assert failed.failure.reason == "INVALID_INPUT"
    await send(gateway, header(3), words)
    assert received(await gateway.next()).tolist() == [[b"ONE", b"TWO"]]
    assert node.engine.held_bytes == 0


async def test_rows_of_unlike_lengths_share_a_batch_where_zeros_do_no_harm(net):
    gateway, node = await net.gateway(), await net.agent()
    executor = Adding()
    node.engine.partitions.add(LoadedPartition(executor, False, 16, pads=True))
    short, long = np.array([[1, 2]]), np.array([[3, 4, 5]])
    await gateway.send("a-0", header(rows=1, batch_rows=2, first_row=0, request=1), ids=short)
    await gateway.send("a-0", header(rows=1, batch_rows=2, first_row=1, request=2), ids=long)
    assert (await gateway.next()).tensors["sums"].tolist() == [3, 12]
    assert [each.tolist() for each in executor.ran] == [[[1, 2, 0], [3, 4, 5]]]
