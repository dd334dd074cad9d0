"""Documents in the order of a query, in the form of Jina's and Cohere's `/v1/rerank`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from aiohttp import web

from catenary_gateway.endpoints.http_calls import json_response
from catenary_gateway.openai_http.calls.bodies import typed
from catenary_gateway.openai_http.encoders.encoder_calls import (
    EncoderBody,
    encoder_call,
    require_some,
    usage_of,
)
from catenary_gateway.openai_http.encoders.scores import Activation, score
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.parameters import refuse


class DocumentText(msgspec.Struct):
    """A document in the form that has names."""

    text: str


class RerankBody(EncoderBody, kw_only=True):
    """The body of a request for documents in order."""

    query: str
    documents: Annotated[
        list[str | DocumentText],
        msgspec.Meta(description="At most 2048 texts, or objects with a `text`."),
    ]
    top_n: Annotated[int, msgspec.Meta(ge=0, description="How many are answered; 0 for all.")] = 0
    return_documents: Annotated[
        bool, msgspec.Meta(description="False for places and scores without the texts.")
    ] = True
    use_activation: Activation = True


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """A request for documents in order that was checked."""

    model: str
    priority: int
    query: str
    documents: list[str]
    top_n: int
    return_documents: bool
    use_activation: bool


async def answer_rerank(request: web.Request) -> web.Response:
    """Answers the documents that fit a query best, the best first."""
    async with encoder_call(request, _wanted, "query or documents") as (call, wanted):
        pairs = [(wanted.query, document) for document in wanted.documents]
        scores, tokens = await score(call, pairs, use_activation=wanted.use_activation)
    best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: wanted.top_n]
    document = {
        "id": f"rerank-{call.call.id}",
        "model": wanted.model,
        "usage": usage_of(tokens),
        "results": [_result(wanted, at, scores[at]) for at in best],
    }
    return json_response(document, headers=call.call.headers)


def _wanted(fields: Fields) -> RerankRequest:
    refuse(fields, "reranking")
    body = typed(fields, RerankBody)
    require_some("documents", body.documents)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    return RerankRequest(
        body.model,
        body.priority,
        body.query,
        texts,
        body.top_n or len(texts),
        body.return_documents,
        body.use_activation,
    )


def _result(wanted: RerankRequest, at: int, relevance: float) -> dict[str, Any]:
    result: dict[str, Any] = {"index": at, "relevance_score": relevance}
    if wanted.return_documents:
        result["document"] = {"text": wanted.documents[at]}
    return result
