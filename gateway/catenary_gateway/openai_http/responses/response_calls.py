"""The paths of responses: to make one, and to read or delete one that is kept."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from catenary_gateway.endpoints.http_calls import enter, json_response
from catenary_gateway.generation.forms.conversations import Message
from catenary_gateway.openai_http.calls.event_streams import (
    prediction_headers,
    stream_items,
    write_items,
)
from catenary_gateway.openai_http.calls.prompt_calls import fields_called, read_call
from catenary_gateway.openai_http.responses.response_answers import ResponseWriter
from catenary_gateway.openai_http.responses.response_items import Document
from catenary_gateway.openai_http.responses.response_request import (
    ResponseRequest,
    name_of_field,
    response_of,
)
from catenary_gateway.openai_http.responses.response_store import ResponseStore, StoredResponse
from catenary_services.errors import InvalidInput, ModelNotFound

RESPONSES: web.AppKey[ResponseStore] = web.AppKey("responses", ResponseStore)
_SHOWN = 100


async def answer_response(request: web.Request) -> web.StreamResponse:
    """Answers a text or a conversation, which may continue a response that is kept."""
    store = request.app[RESPONSES]
    async with read_call(request, response_of) as (call, wanted):
        owner = call.principal.name
        conversation = wanted.conversation(_history(store, owner, wanted))

        def keep(document: Document, message: Message) -> None:
            if wanted.body.store:
                _keep(store, owner, document, (*conversation, message))

        writer = ResponseWriter(wanted.body, keep)
        with fields_called(name_of_field):
            async with call.answer(wanted.completion(conversation)) as stream:
                headers = call.headers
                if wanted.body.stream:
                    return await stream_items(request, headers, stream, writer)
                await write_items(stream, writer)
                headers |= prediction_headers(stream)
    return json_response(writer.document, headers=headers)


async def answer_kept_response(request: web.Request) -> web.Response:
    """Answers a response that this key has made, as long as it is kept."""
    principal = enter(request)
    response_id = request.match_info["response_id"]
    stored = request.app[RESPONSES].find(principal.name, response_id)
    if stored is None:
        raise _not_found(response_id)
    return json_response(stored.document)


async def delete_response(request: web.Request) -> web.Response:
    """Forgets a response that this key has made."""
    principal, response_id = enter(request), request.match_info["response_id"]
    if not request.app[RESPONSES].drop(principal.name, response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _history(store: ResponseStore, owner: str, wanted: ResponseRequest) -> Sequence[Message]:
    previous = wanted.body.previous_response_id
    if previous is None:
        return ()
    stored = store.find(owner, previous)
    if stored is None:
        error = InvalidInput("previous_response_id", _missing(previous))
        error.details["code"] = "previous_response_not_found"
        raise error
    return stored.messages


def _missing(response_id: str) -> str:
    return f"no response {response_id[:_SHOWN]!r} of this key is kept here"


def _not_found(response_id: str) -> ModelNotFound:
    facts = {"field": "response_id", "code": "response_not_found"}
    return ModelNotFound(_missing(response_id), details=facts)


def _keep(
    store: ResponseStore, owner: str, document: Document, conversation: Sequence[Message]
) -> None:
    document["store"] = True
    stored = StoredResponse.of(document, conversation)
    document["store"] = store.has_room(stored)
    if document["store"]:
        store.keep(owner, document["id"], stored)
