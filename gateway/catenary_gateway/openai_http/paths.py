"""The table of the paths that OpenAI's, vLLM's, Cohere's and Anthropic's clients call."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from catenary_gateway.endpoints.http_calls import json_response
from catenary_gateway.endpoints.route_descriptions import RouteDescription
from catenary_gateway.openai_http.anthropic.message_calls import answer_message, count_tokens
from catenary_gateway.openai_http.anthropic.message_request import ConversationBody, MessageBody
from catenary_gateway.openai_http.completion_request import chat_of, completion_of
from catenary_gateway.openai_http.completions import answer_chat, answer_completion
from catenary_gateway.openai_http.description.openapi import openapi_document
from catenary_gateway.openai_http.description.page import HEADERS, page_of
from catenary_gateway.openai_http.description.route_table import HttpRoute, ReadBody
from catenary_gateway.openai_http.encoders.embeddings import EmbeddingBody, answer_embeddings
from catenary_gateway.openai_http.encoders.reranking import RerankBody, answer_rerank
from catenary_gateway.openai_http.encoders.scores import ScoreBody, answer_scores
from catenary_gateway.openai_http.models.model_list import (
    answer_model,
    answer_models,
    answer_version,
)
from catenary_gateway.openai_http.models.tokenizing import (
    DetokenizeBody,
    TokenizeBody,
    answer_text,
    answer_tokens,
)
from catenary_gateway.openai_http.responses.response_calls import (
    answer_kept_response,
    answer_response,
    delete_response,
)
from catenary_gateway.openai_http.responses.response_request import ResponseBody

_CHAT = ReadBody(chat_of, {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
_COMPLETION = ReadBody(completion_of, {"model": "m", "prompt": "hi"})
_KEPT = "/v1/responses/{response_id}"

ROUTES = (
    HttpRoute("POST", "/v1/chat/completions", answer_chat, _CHAT, "chats", streams=True),
    HttpRoute(
        "POST", "/v1/completions", answer_completion, _COMPLETION, "completions", streams=True
    ),
    HttpRoute("POST", "/v1/responses", answer_response, ResponseBody, "responses", streams=True),
    HttpRoute("GET", _KEPT, answer_kept_response),
    HttpRoute("DELETE", _KEPT, delete_response),
    HttpRoute("POST", "/v1/messages", answer_message, MessageBody, "messages", streams=True),
    HttpRoute("POST", "/v1/messages/count_tokens", count_tokens, ConversationBody, "messages"),
    HttpRoute("POST", "/v1/embeddings", answer_embeddings, EmbeddingBody, "embeddings"),
    HttpRoute("POST", "/v1/rerank", answer_rerank, RerankBody, "reranking"),
    HttpRoute("POST", "/v2/rerank", answer_rerank, RerankBody, "reranking"),
    HttpRoute("POST", "/rerank", answer_rerank, RerankBody, "reranking"),
    HttpRoute("POST", "/v1/score", answer_scores, ScoreBody, "scores"),
    HttpRoute("POST", "/score", answer_scores, ScoreBody, "scores"),
    HttpRoute("POST", "/tokenize", answer_tokens, TokenizeBody, "tokens"),
    HttpRoute("POST", "/detokenize", answer_text, DetokenizeBody),
    HttpRoute("GET", "/v1/models", answer_models),
    HttpRoute("GET", "/v1/models/{model}", answer_model),
    HttpRoute("GET", "/version", answer_version),
)


def routes(others: Sequence[RouteDescription] = ()) -> list[web.RouteDef]:
    """Returns all routes, with those that describe them.

    Args:
        others: The further routes that the description tells of.
    """
    document = openapi_document(ROUTES, others)
    page = page_of(document)

    async def answer_description(request: web.Request) -> web.Response:
        return json_response(document)

    async def answer_page(request: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html", headers=HEADERS)

    # Open to everyone: they say what this release offers, and nothing of what is served here.
    described = [
        web.get("/openapi.json", answer_description),
        web.get("/docs", answer_page),
    ]
    return [*(route.definition for route in ROUTES), *described]
