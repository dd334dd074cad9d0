"""Bodies that are read at once say the same as bodies that are read piece by piece."""

from __future__ import annotations

import json
from unittest import mock

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from catenary_gateway.tensors import json_documents
from catenary_gateway.tensors.json_documents import inference_of
from catenary_services.errors import InvalidInput

SCALARS = st.sampled_from(
    ["null", "true", "0", "-1", "1e400", "1e5", "9" * 30, '"a"', '"\\ud800"', '"é"', "[]", "{}"]
)


def objects(keys: list[str], values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Objects as text, in which a key may come twice."""
    pairs = st.lists(st.tuples(st.sampled_from(keys), values), max_size=5)
    return pairs.map(lambda ps: "{" + ", ".join(f"{json.dumps(k)}:{v}" for k, v in ps) + "}")


def lists(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(values, max_size=3).map(lambda vs: "[" + ",".join(vs) + "]")


VALUES = st.recursive(SCALARS, lambda v: lists(v) | objects(["a", "b"], v), max_leaves=6)
TENSORS = objects(["name", "datatype", "shape", "parameters", "data", "other"], VALUES)
INPUTS = lists(TENSORS | SCALARS) | SCALARS
BODIES = st.one_of(
    objects(["id", "outputs", "parameters", "other"], VALUES),
    INPUTS.map(lambda inputs: f'{{"id":"x","inputs":{inputs}}}'),
    VALUES,
)


def said(body: bytes) -> object:
    """What a body says, with the texts of its tensors, or the error that it is answered with."""
    try:
        document = inference_of(body)
    except InvalidInput as error:
        return error.message
    for tensor in document.get("inputs", []):  # type: ignore[attr-defined]
        if isinstance(tensor.get("data"), msgspec.Raw):
            tensor["data"] = bytes(tensor["data"])
    return document


@settings(max_examples=400, deadline=None)
@given(BODIES, st.integers(0, 200), st.sampled_from(["", "", "", ",", "}", '"', "\0"]))
@example('{"inputs":[' + "{}," * 1024 + "{}]}", 0, "")
@example('{"outputs":' + "[" * 5000 + "]" * 5000 + "}", 0, "")
def test_what_is_read_at_once_is_what_is_read_piece_by_piece(text: str, at: int, more: str) -> None:
    body = (text[:at] + more + text[at:]).encode()
    with mock.patch.object(json_documents, "_small_body") as at_once:
        at_once.decode.side_effect = ValueError
        by_pieces = said(body)
    assert repr(said(body)) == repr(by_pieces)
