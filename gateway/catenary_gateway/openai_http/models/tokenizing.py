"""Texts to tokens and back, in the form of vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web

from catenary_gateway.endpoints.http_calls import json_response
from catenary_gateway.generation.intake import is_unicode
from catenary_gateway.generation.request import ChatPrompt
from catenary_gateway.generation.text.text_codec import TextCodec
from catenary_gateway.openai_http.calls.bodies import ModelName, typed
from catenary_gateway.openai_http.calls.prompt_calls import read_call
from catenary_gateway.openai_http.completion_request import chat_of
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.parameters import refuse
from catenary_services.errors import InvalidInput

MOST_CHARACTERS = 1 << 20
"""Most characters of a text; the answer is several times as long."""
MOST_TOKENS = 1 << 18
MOST_DECODED_CHARACTERS = 1 << 23
Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of a request for the tokens of a prompt or a conversation: one of the two."""

    model: ModelName
    prompt: str | None = None
    messages: Annotated[
        list[dict[str, Any]] | None, msgspec.Meta(description="As in a chat completion.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        msgspec.Meta(description="True for a prompt and false for a conversation if absent."),
    ] = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of a request for the text of tokens."""

    model: ModelName
    tokens: Annotated[list[Token], msgspec.Meta(max_length=MOST_TOKENS)]


async def answer_tokens(request: web.Request) -> web.Response:
    """Answers the tokens of a prompt, or of a conversation as the model would be given it."""
    async with read_call(request, _tokenize_body) as (call, body):
        model, codec = await call.pipeline.codec(call.principal, body.model)
        ids = list(await _tokens(codec, body))
        tokens = list(map(codec.table.text_of, ids)) if body.return_token_strs else None
    document = {
        "count": len(ids),
        "max_model_len": model.most_tokens,
        "tokens": ids,
        "token_strs": tokens,
    }
    return json_response(document, headers=call.headers)


async def answer_text(request: web.Request) -> web.Response:
    """Answers the text of tokens, special ones included."""
    async with read_call(request, _detokenize_body) as (call, body):
        _, codec = await call.pipeline.codec(call.principal, body.model)
        if body.tokens and max(body.tokens) >= codec.vocabulary_size:
            text = f"token ids of this model lie in 0..{codec.vocabulary_size - 1}"
            raise InvalidInput("tokens", text)
        if codec.table.characters(body.tokens) > MOST_DECODED_CHARACTERS:
            text = f"would be a text of more than {MOST_DECODED_CHARACTERS} characters"
            raise InvalidInput("tokens", text)
        text = await asyncio.to_thread(codec.table.decode, body.tokens)
    return json_response({"prompt": text}, headers=call.headers)


def _tokenize_body(fields: Fields) -> TokenizeBody:
    refuse(fields, "tokens")
    body = typed(fields, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("prompt", "and messages: one of them must be given")
    return body


def _detokenize_body(fields: Fields) -> DetokenizeBody:
    return typed(fields, DetokenizeBody)


async def _tokens(codec: TextCodec, body: TokenizeBody) -> Sequence[int]:
    """Returns the tokens of a prompt, or of a conversation."""
    if body.prompt is not None:
        _check_length("prompt", len(body.prompt))
        if not is_unicode(body.prompt):
            raise InvalidInput("prompt", "has halves of characters (lone surrogates)")
        return await codec.encode(body.prompt, special_tokens=body.add_special_tokens is not False)
    chat = chat_of(
        {
            "model": body.model,
            "messages": body.messages,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
    ).prompts[0]
    assert isinstance(chat, ChatPrompt)
    _check_length("messages", sum(len(str(each["content"])) for each in chat.messages))
    made = await codec.render(
        chat.messages,
        chat.variables,
        most_characters=MOST_CHARACTERS,
        add_generation_prompt=body.add_generation_prompt,
        special_tokens=body.add_special_tokens is True,
    )
    _check_length("messages", made.characters)
    return made.ids


def _check_length(field: str, characters: int) -> None:
    if characters > MOST_CHARACTERS:
        raise InvalidInput(field, f"has {characters} characters; at most {MOST_CHARACTERS}")
