"""Key and quota come before the body, bodies are bounded before they are parsed, faults are charged."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
import zlib
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from catenary_gateway.admission.admission import Admission
from catenary_gateway.admission.quotas import Quotas
from catenary_gateway.doors.http_bodies import inflated
from catenary_gateway.tensors.json_documents import document_of, inference_of
from catenary_gateway.tensors.json_tensors import from_json
from catenary_gateway.tensors.validation import Declared
from catenary_services.errors import InvalidInput, Overloaded, PayloadTooLarge, QuotaExceeded
from catenary_services.security.key_file import add_key
from gateway_harness import stage

SECOND = 1_000_000_000
BOMB = gzip.compress(b'{"inputs":[' + b"[]," * 2_600_000 + b"[]]}")
INFER = "/v2/models/toy/infer"


def test_what_inflates_out_of_proportion_is_refused() -> None:
    small = bytes(1 << 20)
    assert inflated(gzip.compress(small), 31, 1 << 24) == small
    assert inflated(zlib.compress(b"text"), 47, 1 << 24) == b"text"
    with pytest.raises(PayloadTooLarge):
        inflated(gzip.compress(bytes(15 << 20)), 31, 1 << 24)
    with pytest.raises(PayloadTooLarge):
        inflated(gzip.compress(small), 31, 1 << 19)
    for broken in (b"not gzip", gzip.compress(b"x")[:-3], gzip.compress(b"x") + b"more"):
        with pytest.raises(InvalidInput):
            inflated(broken, 31, 1 << 24)


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[' + b"[]," * 2_600_000 + b"[]]}",
        b'{"inputs":[' + b'{"name":0},' * 700_000 + b"{}]}",
        b"[" * 8_000_000,
        b'{"id":' + b"7" * 1_000_000 + b"}",
        b'{"parameters":{' + b'"a":0,' * 500_000 + b'"b":0}}',
        b'{"inputs":[{"shape":[' + b"1," * 1_000_000 + b"1]}]}",
    ],
    ids=["lists", "objects", "deep", "digits", "parameters", "shape"],
)
def test_json_that_would_cost_much_is_refused_before_it_does(body: bytes) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidInput):
        inference_of(body)
    with pytest.raises(InvalidInput):
        document_of(body)
    # Python's own parser takes a second for some of them.
    assert time.thread_time() - began < 0.5


def tensor_in(data: object, *shape: int, datatype: str = "FP32") -> np.ndarray:
    body = json.dumps({"inputs": [{"data": data}]}).encode()
    raw = inference_of(body)["inputs"][0]["data"]  # type: ignore[index]
    return from_json(raw, Declared("x", datatype, shape), "data")


def test_large_tensors_are_read_in_pieces_like_small_ones() -> None:
    values = np.random.default_rng(0).standard_normal((8, 3, 40, 40)).astype(np.float32)
    for data in (values.tolist(), values.ravel().tolist()):
        assert np.array_equal(tensor_in(data, *values.shape), values)
    whole = np.arange(60_000, dtype=np.int64) - 30_000
    assert np.array_equal(tensor_in(whole.tolist(), 60_000, datatype="INT64"), whole)
    large = [2**64 - 1] * 20_000
    assert tensor_in(large, 20_000, datatype="UINT64").tolist() == large
    words = ["a,]b"] * 20_000
    assert tensor_in(words, 20_000, datatype="BYTES").tolist() == [b"a,]b"] * 20_000


@pytest.mark.parametrize(
    "data",
    [
        [[1.5] * 40_000, [1.5] * 39_999],
        [1.5] * 40_000 + ["x"],
        [1.5] * 39_999 + [[1.5]],
        [[1.5] * 40_000, 1.5],
        [1.5] * 40_000 + [None],
        [{}] * 40_000,
    ],
    ids=["ragged", "a text", "a list", "a number", "null", "objects"],
)
def test_large_tensors_that_are_none_are_refused(data: object) -> None:
    with pytest.raises(InvalidInput):
        tensor_in(data, 2, 40_000)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (b"[[0]," + b"0," * 5_000_000 + b"0]", (1, 5_000_002)),
        (b"[" + b"0," * 5_000_000 + b"0]", (1, 4)),
        (b"[" + b"[]," * 3_000_000 + b"[]]", (3_000_001, 0)),
        (b"[[" + b"0," * 5_000_000 + b"0]," + b"0]", (2, 5_000_001)),
    ],
    ids=["a list and numbers", "too many", "empty lists", "a number at the end"],
)
def test_millions_that_are_no_tensor_are_refused_before_they_are_made(
    text: bytes, shape: tuple[int, ...]
) -> None:
    raw = inference_of(b'{"inputs":[{"data":' + text + b"}]}")["inputs"][0]["data"]  # type: ignore[index]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput):
            from_json(raw, Declared("x", "FP32", shape), "data")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 48 << 20


def test_a_body_has_a_thousand_inputs_and_some_thousand_lists_at_most() -> None:
    with pytest.raises(InvalidInput, match="inputs"):
        inference_of(b'{"inputs":[' + b"{}," * 2_000 + b"{}]}")
    with pytest.raises(InvalidInput, match="lists and objects"):
        document_of(b'{"messages":[' + b"[]," * 30_000 + b"[]]}")
    tokens = document_of(b'{"prompt":[' + b"7," * 300_000 + b"7]}")["prompt"]
    assert isinstance(tokens, list)
    assert len(tokens) == 300_001


def test_one_source_holds_a_share_of_what_arrives_or_one_body_of_any_size() -> None:
    admission = Admission(256 << 20, 100, 64 << 20)
    with (
        admission.admit(0) as first,
        admission.admit(0) as second,
        admission.admit(0) as third,
    ):
        with first.arriving("a"), second.arriving("a"), third.arriving("b"):
            first.hold(64 << 20)
            third.hold(30 << 20)
            with pytest.raises(Overloaded):
                second.hold(1 << 20)
        with second.arriving("a"):
            second.hold(30 << 20)  # the first is a request by now
    assert (admission.bytes, admission.requests, len(admission._arriving)) == (0, 0, 0)


def test_faults_are_charged_by_what_was_read_and_forgotten_in_time() -> None:
    now = [0]
    quotas = Quotas(lambda: now[0], faults_per_s=10.0)
    for _ in range(99):
        quotas.require_good("a")
        quotas.fault("a", 0)
    quotas.fault("a", 64 * 1024 * 200)
    with pytest.raises(QuotaExceeded) as caught:
        quotas.require_good("a")
    assert caught.value.retry_after_ns
    quotas.require_good("b")
    now[0] = 30 * SECOND
    quotas.require_good("a")


async def test_a_key_over_its_quota_is_told_so_before_its_body_is_read(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "ci", ["infer"], {"requests_per_s": 0.01, "burst": 1})
    headers = {"Authorization": f"Bearer {key}", "Content-Encoding": "gzip"}
    async with (
        stage(tmp_path, api_keys_file=tmp_path / "keys.json") as running,
        aiohttp.ClientSession(f"http://{running.http}", headers=headers) as session,
    ):
        for path in (INFER, "/v1/chat/completions"):
            statuses = []
            for _ in range(2):
                async with session.post(path, data=BOMB) as answer:
                    statuses.append(answer.status)
            assert statuses[-1] == 429
            assert "Retry-After" in answer.headers


async def test_a_flood_of_faults_is_answered_with_a_delay(tmp_path: Path) -> None:
    async with (
        stage(tmp_path, bad_requests_per_s=1.0) as running,
        aiohttp.ClientSession(f"http://{running.http}") as session,
    ):
        statuses = []
        for path in (INFER, "/v2/models/nobody", "/nowhere"):
            for _ in range(6):
                async with session.post(path, data=b"{") as answer:
                    statuses.append(answer.status)
        assert statuses[0] == 400
        assert statuses[-1] == 429
        assert int(answer.headers["Retry-After"]) >= 1
