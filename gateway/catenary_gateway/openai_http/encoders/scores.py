"""Scores of pairs of texts, in the form of vLLM's `/v1/score`.

A cross encoder is given both texts at once, and its head says how well they go together. Of other
encoders the score is the cosine of the angle between the two embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from aiohttp import web

from catenary_gateway.catalog import EMBEDDING, LOGITS
from catenary_gateway.endpoints.http_calls import json_response
from catenary_gateway.generation.text.encoder_config import IDENTITY, SIGMOID
from catenary_gateway.openai_http.calls.bodies import typed
from catenary_gateway.openai_http.encoders.encoder_calls import (
    EncoderBody,
    EncoderCall,
    EncoderRows,
    Vectors,
    encoder_call,
    require_some,
    usage_of,
)
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.parameters import refuse
from catenary_services.errors import InvalidInput

_LEAST = 1e-8
"""The least product of two lengths that is divided by, as in PyTorch's cosine similarity."""
Pairs = list[tuple[str, str]]
Texts = Annotated[str | list[str], msgspec.Meta(description="A text, or at most 2048 of them.")]
Activation = Annotated[
    bool,
    msgspec.Meta(description="False for the logit of a cross encoder as it is."),
]


class ScoreBody(EncoderBody, kw_only=True):
    """The body of a request for scores: one text with one or many, or as many with as many."""

    text_1: Texts
    text_2: Texts
    use_activation: Activation = True


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request for the scores of pairs that was checked."""

    model: str
    priority: int
    pairs: Pairs
    use_activation: bool


async def answer_scores(request: web.Request) -> web.Response:
    """Answers how well the texts of each pair go together."""
    async with encoder_call(request, _wanted, "text_1 or text_2") as (call, wanted):
        scores, tokens = await score(call, wanted.pairs, use_activation=wanted.use_activation)
    document = {
        "id": f"score-{call.call.id}",
        "object": "list",
        "created": int(time.time()),
        "model": wanted.model,
        "data": [{"index": at, "object": "score", "score": s} for at, s in enumerate(scores)],
        "usage": usage_of(tokens),
    }
    return json_response(document, headers=call.call.headers)


def _wanted(fields: Fields) -> ScoreRequest:
    refuse(fields, "scores")
    body = typed(fields, ScoreBody)
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    require_some("text_1", first)
    require_some("text_2", second)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        text = f"has {len(second)} texts for {len(first)} of text_1; may be 1 to 1, 1 to N, N to N"
        raise InvalidInput("text_2", text)
    return ScoreRequest(
        body.model, body.priority, list(zip(first, second, strict=True)), body.use_activation
    )


async def score(
    call: EncoderCall, pairs: Pairs, *, use_activation: bool = True
) -> tuple[list[float], int]:
    """Returns the score of each pair, and the number of tokens of all.

    Raises:
        InvalidInput: The model answers neither embeddings nor the logit of one class.
        CatenaryError: The data plane has no answer.
    """
    model = call.model
    if not model.takes_pairs:
        unlike = list(dict.fromkeys(text for pair in pairs for text in pair))
        answer = await call.ask(EncoderRows(texts=unlike), EMBEDDING)
        return _cosines(answer.rows, unlike, pairs), answer.tokens
    classes = model.outputs[model.output_index[LOGITS]].shape[-1]
    if classes != 1:
        text = f"{model.key.name!r} tells {classes} classes apart; scores are of models with one"
        raise InvalidInput("model", text)
    activation = (await call.admitted.codec()).encoder.activation
    if activation not in (SIGMOID, IDENTITY):
        text = f"{model.key.name!r} makes scores by {activation[:60]!r}, which is not offered"
        raise InvalidInput("model", text)
    answer = await call.ask(EncoderRows(pairs=pairs), LOGITS)
    logits = answer.rows[:, 0].astype(np.float64)
    if use_activation and activation == SIGMOID:
        logits = 0.5 * (1.0 + np.tanh(0.5 * logits))  # the sigmoid, without overflow
    return logits.tolist(), answer.tokens


def _cosines(rows: Vectors, texts: Sequence[str], pairs: Pairs) -> list[float]:
    place = {text: at for at, text in enumerate(texts)}
    wide = rows.astype(np.float64)
    one = wide[[place[first] for first, _ in pairs]]
    other = wide[[place[second] for _, second in pairs]]
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: list[float] = ((one * other).sum(axis=1) / np.maximum(lengths, _LEAST)).tolist()
    return found
