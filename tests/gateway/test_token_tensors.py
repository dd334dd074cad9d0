"""Requests with texts, as the requests with tokens that they become."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from catenary_gateway.catalog import Catalog, Model
from catenary_gateway.inference import (
    InferenceOptions,
    InferenceRequest,
    InferenceResponse,
    RequestArrival,
)
from catenary_gateway.results.pending import PendingRequest
from catenary_gateway.tensors import token_tensors
from catenary_gateway.tensors.token_tensors import in_order_of_texts, with_tokens
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import InvalidInput, NoActivePlan
from catenary_services.telemetry.tracing import TraceContext
from gateway_harness import served, spec
from shared_helpers.encoder_agent import VOCABULARY, word_tokenizer
from small_models.text_here import codec_of

MOST = 6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return word_tokenizer()


def model_of(*inputs: str) -> Model:
    given_inputs = [spec(name, "INT64", -1, -1) for name in inputs]
    table = scheduler_pb2.ModelTable(
        models=[served("m", given_inputs, [spec("y", "FP32", -1, 4)], text_tokens=MOST)]
    )
    catalog = Catalog()
    catalog.update(table)
    return catalog.find("m", "")


def request_of(model: Model, texts: list[bytes]) -> InferenceRequest:
    array = np.empty(len(texts), np.object_)
    array[:] = texts
    return InferenceRequest(model, "id", {"text": array}, len(texts), (0,), InferenceOptions())


def test_a_model_of_tokens_is_asked_with_texts() -> None:
    model = model_of("input_ids", "attention_mask")
    assert model.inputs == (TensorSpec("text", "BYTES", (ANY,)),)
    assert [spec.name for spec in model.given] == ["input_ids", "attention_mask"]


TEXTS = st.lists(
    st.lists(st.sampled_from([*VOCABULARY[4:], "horse", "!"]), max_size=12).map(" ".join),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS)
async def test_rows_are_the_tokens_of_each_text_in_the_order_of_their_lengths(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    model = model_of("input_ids", "attention_mask", "token_type_ids")
    asked = request_of(model, [text.encode() for text in texts])
    made, order = await with_tokens(asked, codec_of(tokenizer))
    assert made.model.inputs == model.given
    assert made.rows == len(texts)
    assert list(made.row_sizes) == sorted(made.row_sizes)
    for row, index in enumerate(order):
        ids = tokenizer.encode(texts[index]).ids
        if len(ids) > MOST:  # what is cut is what is inside the special tokens
            ids = [*ids[: MOST - 1], ids[-1]]
        size = made.row_sizes[row]
        assert size == len(ids)
        assert made.inputs["input_ids"][row, :size].tolist() == ids
        assert not made.inputs["input_ids"][row, size:].any()
        mask = made.inputs["attention_mask"][row]
        assert mask.tolist() == [1] * size + [0] * (len(mask) - size)
    now = time.monotonic_ns()
    arrival = RequestArrival("m", now, time.time_ns(), TraceContext(1, 1, False), None)
    future: asyncio.Future[tuple[np.ndarray, ...]] = asyncio.get_running_loop().create_future()
    told = PendingRequest(1, made, arrival, now + 10**9, future).submission(now).submit
    assert [run.tokens for run in told.texts] == sorted(set(made.row_sizes))
    assert [run.rows for run in told.texts] == [
        made.row_sizes.count(run.tokens) for run in told.texts
    ]
    answer = InferenceResponse(made.model, "id", (order.astype(np.float32),))
    tokens = sum(made.row_sizes)
    whole = in_order_of_texts(answer, order, asked.model, tokens)
    assert whole.model is model
    assert whole.tokens == tokens
    assert whole.outputs[0].tolist() == list(range(len(texts)))


async def test_what_is_too_much_is_refused_by_its_row(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("input_ids")
    monkeypatch.setattr(token_tensors, "LONGEST_TEXT_BYTES", 8)
    with pytest.raises(InvalidInput, match="row 1 has 9 bytes; at most 8"):
        await with_tokens(request_of(model, [b"the cat", b"the  cat "]), codec_of(tokenizer))
    monkeypatch.setattr(token_tensors, "MOST_TOKENS", 11)
    with pytest.raises(InvalidInput, match="3 texts of up to 4 tokens are more than 11"):
        await with_tokens(request_of(model, [b"the cat", b"the", b""]), codec_of(tokenizer))


async def test_inputs_that_no_tokenizer_makes_are_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(NoActivePlan, match="'pixels'"):
        await with_tokens(
            request_of(model_of("input_ids", "pixels"), [b"the"]), codec_of(tokenizer)
        )
