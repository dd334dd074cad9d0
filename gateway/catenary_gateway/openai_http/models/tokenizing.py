"""Texts to tokens and back, in the form of vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
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
        text, field = _text(codec, body)
        if len(text) > MOST_CHARACTERS:
            raise InvalidInput(field, f"has {len(text)} characters; at most {MOST_CHARACTERS}")
        if not is_unicode(text):
            raise InvalidInput(field, "has halves of characters (lone surrogates)")
        special = field == "prompt" if body.add_special_tokens is None else body.add_special_tokens
        ids = await codec.encode(text, special_tokens=special)
        tokens = [codec.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
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
        decode = codec.tokenizer.decode
        text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text}, headers=call.headers)


def _tokenize_body(fields: Fields) -> TokenizeBody:
    refuse(fields, "tokens")
    body = typed(fields, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("prompt", "and messages: one of them must be given")
    return body


def _detokenize_body(fields: Fields) -> DetokenizeBody:
    return typed(fields, DetokenizeBody)


def _text(codec: TextCodec, body: TokenizeBody) -> tuple[str, str]:
    """Returns the text that is encoded, and the field that it comes from."""
    if body.prompt is not None:
        return body.prompt, "prompt"
    chat = chat_of(
        {
            "model": body.model,
            "messages": body.messages,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
    ).prompts[0]
    assert isinstance(chat, ChatPrompt)
    if sum(len(str(each["content"])) for each in chat.messages) > MOST_CHARACTERS:
        # A template blocks the event loop, so what is too long is refused before.
        raise InvalidInput("messages", f"have more than {MOST_CHARACTERS} characters")
    text = codec.render(
        chat.messages, chat.variables, add_generation_prompt=body.add_generation_prompt
    )
    return text, "messages"
