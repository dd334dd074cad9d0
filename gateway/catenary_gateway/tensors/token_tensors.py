"""Requests with texts become requests with tokens, for models that are given tokens.

Every row is a text, or a pair of texts where a model judges two together. Its tokens are cut at the
most that the model takes, as its own library does; of a pair the longer text is cut first. Rows are
put in the order of their lengths, so that rows of about one length share a batch and few zeros are
computed; the answer is put back into the order of the texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

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


class RowCodec(Protocol):
    """Makes tokens of rows of texts, as a `TextCodec` does."""

    def added_tokens(self, *, to_pair: bool) -> int:
        """Returns how many tokens stand around a text, or a pair of texts."""
        ...

    async def encode_rows(
        self, texts: Sequence[str], rows: Sequence[Sequence[int]], most: int
    ) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """Returns the tokens of rows of texts, and of which text of a pair each token is."""
        ...


async def with_tokens(
    request: InferenceRequest, codec: RowCodec
) -> tuple[InferenceRequest, NDArray[np.int64]]:
    """Returns a request of texts as one of tokens, and the text of each of its rows.

    Raises:
        InvalidInput: A text is too long, or the texts are too many.
        NoActivePlan: The model wants inputs that no tokenizer makes, takes too few tokens for a
            text or a pair of texts, or has files that fail at them.
    """
    model = request.model
    for spec in model.given:
        if spec.name not in _KINDS or len(spec.shape) != 2:
            text = f"model {model.key} takes {spec.name!r}, which is not made of texts"
            raise NoActivePlan(text, details={"model": str(model.key)})
    given = () if request.token_rows else tuple(request.inputs.values())
    texts: list[Any] = given[0].tolist() if given else []
    for index, row in enumerate(texts):
        size = max(map(len, row)) if isinstance(row, list) else len(row)
        if size > LONGEST_TEXT_BYTES:
            text = f"row {index} has {size} bytes; at most {LONGEST_TEXT_BYTES} may be"
            raise InvalidInput(model.inputs[0].name, text)
    if request.token_rows:
        rows = [_Row(ids, (0,) * len(ids)) for ids in request.token_rows]
    else:
        rows = await _tokens(codec, texts, model)
    inputs, lengths, order = await asyncio.to_thread(_inputs_of, rows, model)
    tokens = msgspec.structs.replace(
        request,
        model=replace(model, inputs=model.given, given=()),
        inputs=inputs,
        row_sizes=tuple(lengths[order].tolist()),
        token_rows=(),
    )
    return tokens, order


def in_order_of_texts(
    response: InferenceResponse, order: NDArray[np.int64], model: Model, tokens: int
) -> InferenceResponse:
    """Returns the answer to a request of `tokens` tokens as that to one of texts."""
    outputs = []
    for rows in response.outputs:
        own = np.empty_like(rows)
        own[order] = rows
        outputs.append(own)
    return msgspec.structs.replace(response, model=model, outputs=tuple(outputs), tokens=tokens)


class _Row(NamedTuple):
    """The tokens of one row, and of which text of a pair each is."""

    ids: Sequence[int]
    type_ids: Sequence[int]


def _inputs_of(
    made: Sequence[_Row], model: Model
) -> tuple[dict[str, Tensor], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the inputs made of texts, the lengths of these in tokens, and the order of the rows.

    Raises:
        InvalidInput: The texts are too many.
    """
    lengths = np.array([len(row.ids) for row in made], np.int64)
    longest = int(lengths.max())
    if longest * len(lengths) > MOST_TOKENS:
        text = f"{len(lengths)} texts of up to {longest} tokens are more than {MOST_TOKENS} in all"
        raise InvalidInput(model.inputs[0].name, text)
    order = np.argsort(lengths, kind="stable")
    ordered = [made[index] for index in order]
    return {spec.name: _tensor(spec, ordered, longest) for spec in model.given}, lengths, order


async def _tokens(
    codec: RowCodec, texts: Sequence[bytes] | Sequence[Sequence[bytes]], model: Model
) -> list[_Row]:
    rows = [(row,) if isinstance(row, bytes) else tuple(row) for row in texts]
    most, pairs = model.text_tokens, len(rows[0]) > 1
    if codec.added_tokens(to_pair=pairs) >= most:
        text = f"model {model.key} takes {most} tokens, which are no more than its special ones"
        raise NoActivePlan(text, details={"model": str(model.key)})
    # A query that is judged with a thousand documents is encoded once.
    places = {text: at for at, text in enumerate(dict.fromkeys(t for row in rows for t in row))}
    unlike = [text.decode() for text in places]
    numbered = [[places[text] for text in row] for row in rows]
    return [_Row(*row) for row in await codec.encode_rows(unlike, numbered, most)]


def _tensor(spec: TensorSpec, rows: Sequence[_Row], longest: int) -> Tensor:
    """Returns one of the inputs, with zeros behind the tokens of each row."""
    tensor = np.zeros((len(rows), longest), DTYPE_OF[spec.datatype])
    for line, row in zip(tensor, rows, strict=True):
        size = len(row.ids)
        if spec.name == "attention_mask":
            line[:size] = 1
        else:
            line[:size] = row.ids if spec.name == "input_ids" else row.type_ids
    return tensor
