"""Embeddings of texts, in the form of OpenAI's `/v1/embeddings`."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from aiohttp import web

from catenary_gateway.catalog import EMBEDDING, Model
from catenary_gateway.endpoints.http_bodies import OFF_LOOP
from catenary_gateway.generation.text.encoder_config import EncoderConfig
from catenary_gateway.openai_http.calls.bodies import typed
from catenary_gateway.openai_http.encoders.encoder_calls import (
    EncoderAnswer,
    EncoderBody,
    EncoderRows,
    Vectors,
    encoder_call,
    require_some,
    usage_of,
)
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.parameters import refuse
from catenary_services.errors import InvalidInput

_BASE64 = "base64"
_LEAST = 1e-12
"""The least length that a vector is divided by."""


class EmbeddingBody(EncoderBody, kw_only=True):
    """The body of a request for embeddings."""

    input: Annotated[
        str | list[str | int | list[int]],
        msgspec.Meta(description="A text, token ids, or a list of at most 2048 of one of them."),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"],
        msgspec.Meta(description="`base64` is of little-endian 32-bit floats."),
    ] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for embeddings that was checked, as far as no model has to be known for it."""

    model: str
    priority: int
    rows: EncoderRows
    encoding: str
    dimensions: int | None


async def answer_embeddings(request: web.Request) -> web.Response:
    """Answers the embedding of each text."""
    async with encoder_call(request, _wanted, "input") as (call, wanted):
        size = _size(call.model, wanted.dimensions, (await call.admitted.codec()).encoder)
        answer = await call.ask(wanted.rows, EMBEDDING)
        off_loop = request.app[OFF_LOOP]
        body = await off_loop.run(answer.rows.nbytes, lambda: _written(wanted, answer, size))
    return web.Response(body=body, content_type="application/json", headers=call.call.headers)


def _wanted(fields: Fields) -> EmbeddingRequest:
    refuse(fields, "embeddings")
    body = typed(fields, EmbeddingBody)
    return EmbeddingRequest(
        body.model,
        body.priority,
        _rows(body.input),
        body.encoding_format,
        body.dimensions,
    )


def _rows(given: str | list[str | int | list[int]]) -> EncoderRows:
    """Returns the rows of one of the four forms: a text, texts, token ids, or lists of these."""
    if isinstance(given, str):
        return EncoderRows(texts=(given,))
    if given and type(given[0]) is int:
        given = [given]  # type: ignore[list-item]  # what else is in the list is looked at below
    require_some("input", given)
    if all(isinstance(each, str) for each in given):
        return EncoderRows(texts=given)  # type: ignore[arg-type]
    if all(isinstance(each, list) and all(type(i) is int for i in each) for each in given):
        return EncoderRows(token_rows=given)  # type: ignore[arg-type]
    raise InvalidInput("input", "must be a text, texts, token ids or lists of token ids")


def _size(model: Model, wanted: int | None, config: EncoderConfig) -> int | None:
    """Returns the size to which embeddings are cut; None if they stay as they are.

    Raises:
        InvalidInput: The model was not made for embeddings that are cut, or not to this size.
    """
    if wanted is None or EMBEDDING not in model.output_index:
        return None
    most = model.outputs[model.output_index[EMBEDDING]].shape[-1]
    if wanted == most:
        return None
    if not config.is_matryoshka:
        raise InvalidInput(
            "dimensions",
            f"{model.key.name!r} does not support matryoshka representation: embeddings that are "
            f"cut would be poor, and it has {most} dimensions",
        )
    if config.dimensions and wanted not in config.dimensions:
        known = ", ".join(map(str, config.dimensions))
        raise InvalidInput("dimensions", f"{model.key.name!r} was made for {known} and {most}")
    if wanted > most:
        raise InvalidInput("dimensions", f"{model.key.name!r} has {most} dimensions")
    return wanted


def _written(wanted: EmbeddingRequest, answer: EncoderAnswer, size: int | None) -> bytes:
    rows = answer.rows if size is None else shortened(answer.rows, size)
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": at, "embedding": _embedding(row, wanted.encoding)}
                for at, row in enumerate(rows)
            ],
            "model": wanted.model,
            "usage": usage_of(answer.tokens),
        }
    )


def shortened(rows: Vectors, size: int) -> Vectors:
    """Returns the first `size` numbers of each vector, divided by their length."""
    cut = rows[:, :size]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    made: Vectors = cut / np.maximum(lengths, _LEAST)
    return made


def _embedding(row: Vectors, encoding: str) -> Any:
    if encoding == _BASE64:
        return base64.b64encode(row.astype("<f4", copy=False).tobytes()).decode()
    return row.tolist()
