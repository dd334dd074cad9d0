"""Completions and chat completions, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from catenary_gateway.endpoints.http_calls import json_response
from catenary_gateway.openai_http.answers import AnswerWriter, whole_answer
from catenary_gateway.openai_http.calls.event_streams import prediction_headers
from catenary_gateway.openai_http.calls.prompt_calls import read_call
from catenary_gateway.openai_http.completion_request import (
    CompletionRequest,
    chat_of,
    completion_of,
)
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.streaming import stream_answer


async def answer_chat(request: web.Request) -> web.StreamResponse:
    """Answers a conversation with a chat completion, whole or streamed."""
    return await _complete(request, chat_of, chat=True)


async def answer_completion(request: web.Request) -> web.StreamResponse:
    """Answers a prompt with a completion, whole or streamed."""
    return await _complete(request, completion_of, chat=False)


async def _complete(
    request: web.Request, read: Callable[[Fields], CompletionRequest], *, chat: bool
) -> web.StreamResponse:
    async with read_call(request, read) as (call, wanted), call.answers(wanted) as answers:
        writer = AnswerWriter(f"{'chatcmpl' if chat else 'cmpl'}-{call.id}", wanted, chat)
        if wanted.stream:
            return await stream_answer(request, writer, answers, call.headers)
        document = await whole_answer(wanted, writer, answers)
        headers = call.headers | prediction_headers(answers.streams[0])
    return json_response(document, headers=headers)
