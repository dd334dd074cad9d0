"""The frame codec."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from catenary_protos.catenary.v1.frame_pb2 import TensorHeader
from catenary_services.domain.tensors import DATATYPE_OF, DTYPE_OF, MOST_BYTES_ELEMENTS
from catenary_services.errors import InvalidInput
from catenary_services.transport.bytes_tensors import EncodedBytes, decode_bytes, encode_bytes
from catenary_services.transport.frames import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    MessageKind,
    MessagePrefix,
    decode_prefix,
    encode_prefix,
    layout,
    tensor_views,
)

UINT64 = st.integers(0, 2**64 - 1)
PREFIXES = st.builds(
    MessagePrefix,
    st.sampled_from(MessageKind),
    st.integers(0, MAX_HEADER_BYTES),
    st.integers(0, 1 << 40),
    UINT64,
)
ARRAYS = st.lists(
    hnp.arrays(
        st.sampled_from(list(DTYPE_OF.values())),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    max_size=5,
)


@given(PREFIXES)
def test_a_prefix_comes_back_equal(prefix: MessagePrefix) -> None:
    data = encode_prefix(prefix)
    assert len(data) == PREFIX_BYTES
    assert decode_prefix(data, 1 << 40) == prefix


@given(PREFIXES, st.integers(0, PREFIX_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_prefix_is_noticed(prefix: MessagePrefix, at: int, flip: int) -> None:
    data = bytearray(encode_prefix(prefix))
    data[at] ^= flip
    with pytest.raises(InvalidInput):
        decode_prefix(bytes(data), 1 << 40)


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_no_prefix(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_prefix(data, 1 << 62)


def test_lengths_beyond_the_limits_are_refused() -> None:
    for prefix, field in (
        (MessagePrefix(MessageKind.FRAME, MAX_HEADER_BYTES + 1), "prefix.header_bytes"),
        (MessagePrefix(MessageKind.FRAME, 0, 101), "prefix.payload_bytes"),
    ):
        with pytest.raises(InvalidInput) as caught:
            decode_prefix(encode_prefix(prefix), 100)
        assert caught.value.field == field


@given(ARRAYS)
def test_tensors_come_back_equal_and_aligned(arrays: list[np.ndarray]) -> None:
    named = {f"t{index}": array for index, array in enumerate(arrays)}
    headers, nbytes = layout([(n, DATATYPE_OF[a.dtype], a.shape) for n, a in named.items()])
    payload = memoryview(bytearray(nbytes))
    for name, view in tensor_views(headers, payload).items():
        view[...] = named[name]
    back = tensor_views(headers, payload.toreadonly())
    assert list(back) == list(named)
    for header in headers:
        assert header.offset % 64 == 0
        assert back[header.name].dtype == named[header.name].dtype
        assert back[header.name].shape == named[header.name].shape
        assert back[header.name].tobytes() == named[header.name].tobytes()


HEADERS = st.builds(
    lambda name, datatype, shape, offset, nbytes: TensorHeader(
        name=name, datatype=datatype, shape=shape, offset=offset, nbytes=nbytes
    ),
    st.text(max_size=3),
    st.sampled_from([*DTYPE_OF, "BYTES", "BF16", "", "float"]),
    st.lists(st.one_of(st.integers(-2, 6), st.integers(-(2**63), 2**63 - 1)), max_size=40),
    st.one_of(st.sampled_from([0, 64, 128, 256]), UINT64),
    st.one_of(st.integers(0, 300), UINT64),
)


@given(st.lists(HEADERS, max_size=4), st.integers(0, 300))
def test_corrupted_headers_give_invalid_input_and_nothing_else(
    headers: list[TensorHeader], nbytes: int
) -> None:
    with contextlib.suppress(InvalidInput):
        for view in tensor_views(headers, memoryview(bytes(nbytes))).values():
            assert view.nbytes <= nbytes


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (TensorHeader(name="x", datatype="FP32", shape=[2], offset=0, nbytes=4), "nbytes"),
        (TensorHeader(name="x", datatype="FP32", shape=[2], offset=64, nbytes=8), "nbytes"),
        (TensorHeader(name="x", datatype="FP32", shape=[2], offset=4, nbytes=8), "offset"),
        (TensorHeader(name="x", datatype="FP32", shape=[-1], offset=0, nbytes=8), "shape"),
        (TensorHeader(name="x", datatype="BF16", shape=[2], offset=0, nbytes=4), "datatype"),
        (TensorHeader(name="x", datatype="FP32", shape=[0, 2**62], offset=0, nbytes=0), "shape"),
    ],
)
def test_the_error_names_the_field(header: TensorHeader, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        tensor_views([header], memoryview(bytes(64)))
    assert caught.value.field == f"tensors[0].{field}"


def test_two_tensors_of_one_name_are_refused() -> None:
    headers, nbytes = layout([("x", "UINT8", [1]), ("x", "UINT8", [1])])
    with pytest.raises(InvalidInput, match="twice"):
        tensor_views(headers, memoryview(bytes(nbytes)))


@pytest.mark.parametrize("tensor", [("x", "BYTES", [1]), ("x", "FP32", [-1])])
def test_layout_refuses_what_has_no_fixed_size(tensor: tuple[str, str, list[int]]) -> None:
    with pytest.raises(InvalidInput):
        layout([tensor])


def test_texts_lie_where_the_sizes_of_their_encodings_say() -> None:
    words, more = encode_bytes([b"one", b""]), encode_bytes([b"x" * 70])
    tensors = [("a", "BYTES", (2,)), ("n", "INT64", (2,)), ("b", "BYTES", (1, 1))]
    headers, nbytes = layout(tensors, {"a": len(words), "b": len(more)})
    payload = bytearray(nbytes)
    for header, content in zip(headers, (words, bytes(16), more), strict=True):
        assert header.offset % 64 == 0
        payload[header.offset : header.offset + header.nbytes] = content
    views = tensor_views(headers, memoryview(payload))
    assert EncodedBytes.of(views["a"], [2]).decoded().tolist() == [b"one", b""]
    assert EncodedBytes.of(views["b"], [1, 1]).decoded().tolist() == [[b"x" * 70]]


def test_more_elements_than_are_carried_are_refused_before_they_are_made() -> None:
    count = MOST_BYTES_ELEMENTS + 1
    encoding = np.zeros(4 * count, np.uint8)
    with pytest.raises(InvalidInput, match="elements"):
        EncodedBytes.of(encoding, [count])
    with pytest.raises(InvalidInput, match="elements"):
        decode_bytes(encoding, [count])
    with pytest.raises(InvalidInput, match="elements"):
        encode_bytes([b""] * count)


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_bytes_elements_come_back_equal(elements: list[bytes]) -> None:
    data = encode_bytes(elements)
    assert decode_bytes(data, [len(elements)]).tolist() == elements
    array = np.array(elements, np.object_).reshape(-1, 1)
    assert encode_bytes(array) == data
    raw = np.frombuffer(data or b"", np.uint8)
    assert decode_bytes(raw, [len(elements), 1]).ravel().tolist() == elements


@given(st.binary(max_size=40), st.lists(st.integers(-2, 2**62), max_size=4))
def test_arbitrary_bytes_elements_give_invalid_input_and_nothing_else(
    data: bytes, shape: list[int]
) -> None:
    with contextlib.suppress(InvalidInput):
        array = decode_bytes(data, shape)
        assert encode_bytes(array) == data


def test_elements_that_are_no_bytes_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"elements\[1\]"):
        encode_bytes(np.array([b"x", "y"], np.object_))
