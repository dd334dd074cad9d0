"""Conversion of typed tensor contents (`InferTensorContents`) to arrays and back.

FP32 and FP64 lists are packed on the wire exactly as in an array's memory, so they are copied from
and to the serialized message as a whole, which makes a thousand times fewer Python objects than one
by one. Integers are varints on the wire and have no such shortcut.
"""

from __future__ import annotations

import numpy as np

from catenary_gateway.inference import Tensor
from catenary_gateway.tensors.raw_tensors import check_texts, object_array
from catenary_gateway.tensors.validation import DeclaredInput
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.domain.tensors import DTYPE_OF
from catenary_services.errors import InvalidInput

FIELD_OF = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field that holds the elements of each datatype; FP16 has none."""

_NUMBER_OF = {
    name: oip.InferTensorContents.DESCRIPTOR.fields_by_name[name].number
    for name in ("fp32_contents", "fp64_contents")
}
_LENGTH_DELIMITED = 2


def has_typed_form(datatype: str) -> bool:
    """Returns False for datatypes that have only a raw form."""
    return datatype in FIELD_OF


def from_contents(contents: oip.InferTensorContents, tensor: DeclaredInput, field: str) -> Tensor:
    """Returns the array in typed contents.

    Raises:
        InvalidInput: Another list is filled, there are too few or too many elements, or one does
            not fit the datatype.
    """
    name = FIELD_OF.get(tensor.datatype)
    if name is None:
        raise InvalidInput(field, f"{tensor.datatype} has no typed form; send it raw")
    for filled, _ in contents.ListFields():
        if filled.name != name:
            raise InvalidInput(field, f"{tensor.datatype} belongs in {name}, not {filled.name}")
    values = getattr(contents, name)
    count = tensor.elements
    if len(values) != count:
        raise InvalidInput(
            field, f"{name} has {len(values)} elements, shape {list(tensor.shape)} takes {count}"
        )
    if name == "bytes_contents":
        check_texts(values, field)
        return object_array(list(values), tensor.shape)
    dtype = DTYPE_OF[tensor.datatype]
    if name in _NUMBER_OF:
        packed = contents.SerializeToString()
        # The message has no other list, so the elements are its last bytes.
        array = np.frombuffer(packed, dtype, count, len(packed) - count * dtype.itemsize)
        return array.reshape(tensor.shape)
    wide = np.fromiter(values, np.uint64 if name == "uint64_contents" else np.int64, count)
    return narrowed(wide, dtype, field).reshape(tensor.shape)


def to_contents(array: Tensor, datatype: str) -> oip.InferTensorContents:
    """Returns `array` as typed contents; the datatype must have a typed form."""
    name = FIELD_OF[datatype]
    if name in _NUMBER_OF and array.size:
        payload = array.tobytes()
        tag = bytes([_NUMBER_OF[name] << 3 | _LENGTH_DELIMITED])
        return oip.InferTensorContents.FromString(tag + _varint(len(payload)) + payload)
    contents = oip.InferTensorContents()
    getattr(contents, name).extend(array.reshape(-1).tolist())
    return contents


def narrowed(wide: Tensor, dtype: np.dtype[np.generic], field: str) -> Tensor:
    """Returns an array of integers, converted to `dtype`.

    Raises:
        InvalidInput: An integer is out of the range of `dtype`.
    """
    if dtype.kind in "iu" and wide.size:
        bits = dtype.itemsize * 8
        low, high = (
            (0, 2**bits - 1) if dtype.kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        )
        if int(wide.min()) < low or int(wide.max()) > high:
            raise InvalidInput(field, f"elements must be {low} to {high}")
    return wide.astype(dtype, copy=False)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
