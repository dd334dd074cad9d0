"""The paths of messages: to make one, and to count the tokens of a prompt."""

from __future__ import annotations

from aiohttp import web

from catenary_gateway.endpoints.http_calls import json_response
from catenary_gateway.generation.intake import prompt_tokens
from catenary_gateway.openai_http.anthropic.message_answers import MessageWriter
from catenary_gateway.openai_http.anthropic.message_request import (
    conversation_of,
    message_of,
    name_of_field,
)
from catenary_gateway.openai_http.calls.event_streams import (
    prediction_headers,
    stream_items,
    write_items,
)
from catenary_gateway.openai_http.calls.prompt_calls import PromptCall, fields_called, read_call
from catenary_services.errors import InvalidInput

_OWN_ID = "request-id"
"""The header in which Anthropic's clients look for the id of a request."""


async def answer_message(request: web.Request) -> web.StreamResponse:
    """Answers a conversation in Anthropic's form."""
    async with read_call(request, message_of) as (call, wanted):
        writer, headers = MessageWriter(wanted.model), _headers(call)
        with fields_called(name_of_field):
            async with call.answer(wanted) as stream:
                if wanted.stream:
                    return await stream_items(request, headers, stream, writer)
                await write_items(stream, writer)
                headers |= prediction_headers(stream)
    return json_response(writer.document, headers=headers)


async def count_tokens(request: web.Request) -> web.Response:
    """Counts the tokens of a conversation, as the model would be given it."""
    async with read_call(request, conversation_of) as (call, wanted):
        with fields_called(name_of_field):
            model, codec = await call.pipeline.codec(call.principal, wanted.model)
            if not model.generates:
                raise InvalidInput("model", f"{model.key.name!r} does not generate text")
            ids, _ = await prompt_tokens(model, codec, wanted.prompts[0], "messages")
    return json_response({"input_tokens": len(ids)}, headers=_headers(call))


def _headers(call: PromptCall) -> dict[str, str]:
    return {**call.headers, _OWN_ID: call.id}
