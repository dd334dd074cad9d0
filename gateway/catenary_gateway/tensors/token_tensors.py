"""Requests with texts become requests with tokens, for models that are given tokens.

Every row is a text. Its tokens are cut at the most that the model takes, as its own library does.
Rows are put in the order of their lengths, so that rows of about one length share a batch and few
zeros are computed; the answer is put back into the order of the texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from catenary_gateway.catalog import Model
from catenary_gateway.inference import InferenceRequest, InferenceResponse, Tensor
from catenary_services.domain.tensors import DTYPE_OF, TensorSpec
from catenary_services.errors import InvalidInput, NoActivePlan

LONGEST_TEXT_BYTES = 1 << 20
"""The longest text. Whoever wants more of it embedded than the model takes has to cut it anyway."""
MOST_TOKENS = 1 << 21
"""The most tokens of a request, its texts filled up to the longest one."""
_KINDS = ("input_ids", "attention_mask", "token_type_ids")
"""The inputs that can be made of texts."""


async def with_tokens(
    request: InferenceRequest, tokenizer: Tokenizer
) -> tuple[InferenceRequest, NDArray[np.int64]]:
    """Returns a request of texts as one of tokens, and the text of each of its rows.

    Tokens are made on a thread, for the most part without the interpreter's lock.

    Raises:
        InvalidInput: A text is too long, or the texts are too many.
        NoActivePlan: The model wants inputs that no tokenizer makes.
    """
    model = request.model
    for spec in model.given:
        if spec.name not in _KINDS or len(spec.shape) != 2:
            text = f"model {model.key} takes {spec.name!r}, which is not made of texts"
            raise NoActivePlan(text, details={"model": str(model.key)})
    (texts,) = request.inputs.values()
    for index, element in enumerate(texts):
        if len(element) > LONGEST_TEXT_BYTES:
            text = f"row {index} has {len(element)} bytes; at most {LONGEST_TEXT_BYTES} may be"
            raise InvalidInput(model.inputs[0].name, text)
    inputs, lengths, order = await asyncio.to_thread(_inputs_of, tokenizer, texts.tolist(), model)
    tokens = msgspec.structs.replace(
        request,
        model=replace(model, inputs=model.given, given=()),
        inputs=inputs,
        row_sizes=tuple(lengths[order].tolist()),
    )
    return tokens, order


def in_order_of_texts(
    response: InferenceResponse, order: NDArray[np.int64], model: Model
) -> InferenceResponse:
    """Returns the answer to a request of tokens as that to one of texts."""
    outputs = []
    for rows in response.outputs:
        own = np.empty_like(rows)
        own[order] = rows
        outputs.append(own)
    return msgspec.structs.replace(response, model=model, outputs=tuple(outputs))


def _inputs_of(
    tokenizer: Tokenizer, texts: Sequence[bytes], model: Model
) -> tuple[dict[str, Tensor], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the inputs made of texts, the lengths of these in tokens, and the order of the rows.

    Raises:
        InvalidInput: The texts are too many.
    """
    made = _tokens(tokenizer, texts, model.text_tokens)
    lengths = np.array([len(each) for each in made], np.int64)
    longest = int(lengths.max())
    if longest * len(lengths) > MOST_TOKENS:
        text = f"{len(lengths)} texts of up to {longest} tokens are more than {MOST_TOKENS} in all"
        raise InvalidInput(model.inputs[0].name, text)
    order = np.argsort(lengths, kind="stable")
    ordered = [made[index] for index in order]
    return {spec.name: _tensor(spec, ordered, longest) for spec in model.given}, lengths, order


def _tokens(tokenizer: Tokenizer, texts: Sequence[bytes], most: int) -> list[Encoding]:
    room = most - tokenizer.num_special_tokens_to_add(False)
    found = []
    # Only the library's functions for batches release the interpreter's lock.
    for encoded in tokenizer.encode_batch([t.decode() for t in texts], add_special_tokens=False):
        if len(encoded) > room:
            encoded.truncate(room)
        found.append(tokenizer.post_process(encoded))
    return found


def _tensor(spec: TensorSpec, rows: Sequence[Encoding], longest: int) -> Tensor:
    """Returns one of the inputs, with zeros behind the tokens of each row."""
    tensor = np.zeros((len(rows), longest), DTYPE_OF[spec.datatype])
    for row, encoded in zip(tensor, rows, strict=True):
        row[: len(encoded)] = _values(spec.name, encoded)
    return tensor


def _values(kind: str, encoded: Encoding) -> Any:
    if kind == "input_ids":
        return encoded.ids
    return encoded.attention_mask if kind == "attention_mask" else encoded.type_ids
