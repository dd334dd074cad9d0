from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from catenary import tensors, types
from catenary.errors import InvalidInputError, ProtocolError
from catenary.rpc import messages
from catenary_protos.inference import grpc_predict_v2_pb2 as oip

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
NUMBERS = st.sampled_from(sorted(tensors.DTYPE_OF)).flatmap(
    lambda name: hnp.arrays(
        tensors.DTYPE_OF[name].newbyteorder("<"), SHAPES, elements=None, fill=st.nothing()
    )
)
WORDS = st.lists(st.binary(max_size=9), max_size=12)


@given(NUMBERS)
def test_every_number_comes_back_bit_by_bit(array):
    datatype, raw = tensors.encode(array)
    decoded = tensors.decode(datatype, array.shape, raw)
    assert decoded.dtype == array.dtype
    assert decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()


@given(NUMBERS)
def test_layout_and_byte_order_do_not_matter(array):
    foreign = np.asfortranarray(array.astype(array.dtype.newbyteorder(">")))
    assert tensors.encode(foreign) == tensors.encode(array)
    if array.ndim:
        twice = np.repeat(array, 2, axis=-1)[..., ::2]
        assert tensors.encode(twice) == tensors.encode(array)


@given(WORDS)
def test_byte_strings_come_back(words):
    array = np.empty(len(words), dtype=object)
    array[:] = words
    datatype, raw = tensors.encode(array)
    assert datatype == "BYTES"
    assert list(tensors.decode(datatype, (len(words),), raw)) == words


@pytest.mark.parametrize(
    "array",
    [
        np.array([["ab", "ü"], ["", "c"]]),
        np.array([[b"ab", "ü".encode()], [b"", b"c"]]),
        np.array([["ab", "ü"], ["", "c"]], dtype=object),
    ],
)
def test_text_travels_as_utf8_with_four_byte_lengths(array):
    datatype, raw = tensors.encode(array)
    assert datatype == "BYTES"
    assert raw == b"\x02\0\0\0ab\x02\0\0\0\xc3\xbc\0\0\0\0\x01\0\0\0c"
    decoded = tensors.decode(datatype, (2, 2), raw)
    assert decoded.tolist() == [[b"ab", "ü".encode()], [b"", b"c"]]


@given(st.binary(max_size=40), st.integers(0, 5))
def test_malformed_byte_strings_are_refused_or_consistent(raw, count):
    try:
        decoded = tensors.decode("BYTES", (count,), raw)
    except ProtocolError:
        return
    assert tensors.encode(decoded)[1] == raw


def test_bfloat16_is_sent_as_it_is_and_widened_exactly():
    array = np.array([[1.5, -3.0e38], [0.0, np.inf]], ml_dtypes.bfloat16)
    datatype, raw = tensors.encode(array)
    assert (datatype, len(raw)) == ("BF16", 8)
    decoded = tensors.decode(datatype, (2, 2), raw)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, array.astype(np.float32))
    assert tensors.decode("BF16", (), raw[:2]).shape == ()


def test_decoding_copies_nothing():
    raw = np.arange(4, dtype=np.float32).tobytes()
    decoded = tensors.decode("FP32", (2, 2), raw)
    assert not decoded.flags.owndata
    assert not decoded.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, np.complex64),
        np.zeros(2, "datetime64[s]"),
        np.array([b"a", 3], dtype=object),
        np.array([None], dtype=object),
    ],
)
def test_values_without_a_datatype_name_their_input(array):
    with pytest.raises(InvalidInputError) as caught:
        messages.infer_request(types.InferRequest("net", {"x": array}))
    assert caught.value.field == 'inputs["x"]'


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [
        ("FP32", (2,), b"1234567"),
        ("FP32", (-1,), b""),
        ("COMPLEX", (1,), b"1"),
        ("BYTES", (1,), b"\x05\0\0\0ab"),
        ("BYTES", (2,), b"\x01\0\0\0a"),
        ("BYTES", (1,), b"\x01\0"),
    ],
)
def test_bytes_that_do_not_fit_are_a_protocol_error(datatype, shape, raw):
    with pytest.raises(ProtocolError):
        tensors.decode(datatype, shape, raw)


TYPED = {
    "BOOL": ("bool_contents", [True, False]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "FP32": ("fp32_contents", [0.5, -2.0]),
    "FP64": ("fp64_contents", [0.1, -2.0]),
    "BYTES": ("bytes_contents", [b"a", b""]),
}


@pytest.mark.parametrize("datatype", TYPED)
def test_replies_in_typed_form_are_read(datatype):
    field, values = TYPED[datatype]
    reply = oip.ModelInferResponse(id="7", model_name="net")
    tensor = reply.outputs.add(name="y", datatype=datatype, shape=[2])
    getattr(tensor.contents, field).extend(values)
    found = messages.infer_result(reply)["y"]
    assert found.tolist() == values
    assert tensors.datatype_of(found) == datatype


def test_a_typed_element_outside_its_datatype_is_a_protocol_error():
    contents = oip.InferTensorContents(int_contents=[300])
    with pytest.raises(ProtocolError, match="INT8"):
        tensors.decode_contents("INT8", (1,), contents)


def test_parameters_use_the_standard_fields_where_they_can():
    request = types.InferRequest(
        "net", {}, slo_ms=250.0, priority=2, parameters={"a": True, "b": "t", "c": 0.5, "d": 2**63}
    )
    sent = messages.infer_request(request).parameters
    assert sent["slo_ms"].int64_param == 250
    assert sent["priority"].int64_param == 2
    assert sent["a"].bool_param is True
    assert sent["b"].string_param == "t"
    assert sent["c"].double_param == 0.5
    assert sent["d"].uint64_param == 2**63
    fractional = types.InferRequest("net", {}, slo_ms=0.5)
    assert messages.infer_request(fractional).parameters["slo_ms"].double_param == 0.5


@pytest.mark.parametrize("slo_ms", [0, -1, float("nan"), float("inf")])
def test_an_impossible_slo_is_refused_before_sending(slo_ms):
    with pytest.raises(InvalidInputError) as caught:
        messages.infer_request(types.InferRequest("net", {}, slo_ms=slo_ms))
    assert caught.value.field == "slo_ms"
