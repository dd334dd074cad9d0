"""Completions and chat completions, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from catenary_gateway.endpoints.http_calls import json_response
from catenary_gateway.openai_http.answers import AnswerWriter, stream_answer, usage_of
from catenary_gateway.openai_http.calls.event_streams import prediction_headers, whole_text
from catenary_gateway.openai_http.calls.prompt_calls import read_call
from catenary_gateway.openai_http.completion_request import (
    CompletionRequest,
    Fields,
    chat_of,
    completion_of,
)


async def answer_chat(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    return await _complete(request, chat_of, chat=True)


async def answer_completion(request: web.Request) -> web.StreamResponse:
    """Continues a prompt."""
    return await _complete(request, completion_of, chat=False)


async def _complete(
    request: web.Request, read: Callable[[Fields], CompletionRequest], *, chat: bool
) -> web.StreamResponse:
    async with read_call(request, read) as (call, wanted), call.generation(wanted) as generation:
        writer = AnswerWriter(f"{'chatcmpl' if chat else 'cmpl'}-{call.id}", wanted.model, chat)
        if wanted.stream:
            return await stream_answer(request, wanted, writer, generation, call.headers)
        document = writer.whole(*await whole_text(generation), usage_of(generation))
        headers = call.headers | prediction_headers(generation)
    return json_response(document, headers=headers)
