"""Conversion of a prompt in any form to a checked `GenerationRequest`."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

from catenary_gateway.catalog import Model
from catenary_gateway.generation.forms.answer_syntax import AnswerSyntax
from catenary_gateway.generation.forms.conversations import Message
from catenary_gateway.generation.request import (
    CHAT,
    TEXT_COMPLETION,
    ChatPrompt,
    GenerationOptions,
    GenerationRequest,
    Prompt,
    TextPrompt,
)
from catenary_gateway.generation.text.text_codec import TextCodec
from catenary_services.domain.sampling import MAX_PROMPT_LOGPROBS, MAX_SEED, SamplingParameters
from catenary_services.errors import InvalidInput

TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a prompt or an answer beyond the model's context."""
MOST_MESSAGES = 4096
"""Most messages of one conversation."""
_SEED_BITS = 63
_GENERATED = "generated_token_ids"


async def request_of(
    model: Model,
    codec: TextCodec,
    request_id: str,
    prompt: Prompt,
    sampling: SamplingParameters,
    options: GenerationOptions,
) -> GenerationRequest:
    """Returns the checked request that the session plane takes.

    Raises:
        InvalidInput: The prompt is empty, too long, or not of this model's vocabulary; or prompt
            and answer together may be longer than a session.
    """
    field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
    ids, syntax = await prompt_tokens(model, codec, prompt, field)
    if not ids:
        raise InvalidInput(field, "is empty")
    if len(ids) >= model.session_tokens:
        raise _too_long(model, field, f"has {len(ids)} tokens and leaves no room for an answer")
    _check_prompt_logprobs(len(ids), sampling)
    if sampling.bad_words:
        sampling = replace(sampling, bad_token_ids=await _bad_token_ids(codec, sampling))
    seed = random.SystemRandom().getrandbits(_SEED_BITS)
    grammar = syntax.grammar(sampling.grammar)
    if grammar != sampling.grammar:
        sampling = replace(sampling, grammar=grammar)
    try:
        resolved = sampling.resolved(len(ids), model.session_tokens, seed)
    except InvalidInput as error:
        error.details["code"] = TOO_LONG
        raise
    sampling.check_vocabulary(codec.vocabulary_size)
    _check_generated(options.generated, resolved, codec.vocabulary_size)
    return GenerationRequest(
        model=model,
        id=request_id,
        operation=CHAT if isinstance(prompt, ChatPrompt) else TEXT_COMPLETION,
        prompt=array("I", ids),
        sampling=resolved,
        codec=codec,
        options=options,
        syntax=syntax,
    )


def choices_of(request: GenerationRequest, count: int, first: int) -> list[GenerationRequest]:
    """Returns the requests for several answers to one prompt.

    The seed of each is higher by one than that of the one before.

    Args:
        request: The request for one answer.
        count: Number of answers.
        first: Index of the first of them among all that a client asks for; all but 0 are part of
            the id.
    """
    if count == 1 and not first:
        return [request]
    sampling, seed = request.sampling, request.sampling.seed or 0
    return [
        replace(
            request,
            id=f"{request.id}-{first + choice}" if first + choice else request.id,
            choice=choice,
            sampling=replace(sampling, seed=seed + choice & MAX_SEED),
        )
        for choice in range(count)
    ]


def is_unicode(text: str) -> bool:
    """Returns False for text with a lone surrogate, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def prompt_tokens(
    model: Model, codec: TextCodec, prompt: Prompt, field: str
) -> tuple[Sequence[int], AnswerSyntax]:
    """Returns the tokens of a prompt for a model that generates text, and what its answer may have.

    Raises:
        InvalidInput: The prompt can never fit into the model's context, or is not of its
            vocabulary; errors of texts name `field`.
    """
    syntax = AnswerSyntax()
    match prompt:
        case ChatPrompt(messages, variables, tools):
            most_characters = codec.most_characters(model.session_tokens)
            _check_messages(messages, most_characters, model)
            shown = tools.shown if tools is not None else ()
            made = await codec.render(messages, variables, shown, most_characters=most_characters)
            if made.characters > most_characters:
                raise _too_long(model, field, f"has {made.characters} characters")
            if prompt.parsed:
                syntax = AnswerSyntax.of(codec.forms, tools, made.text)
            return made.ids, syntax
        case TextPrompt(text):
            pass
        case _:
            return _checked("prompt", prompt.token_ids, codec.vocabulary_size), syntax
    if not is_unicode(text):
        raise InvalidInput(field, "has halves of characters (lone surrogates)")
    if len(text) > codec.most_characters(model.session_tokens):
        # Text that can never fit is refused before the work of encoding it.
        raise _too_long(model, field, f"has {len(text)} characters")
    return await codec.encode(text, special_tokens=True), syntax


def _check_messages(messages: Sequence[Message], most_characters: int, model: Model) -> None:
    """Refuses conversations that can never fit, before the work of rendering them."""
    if len(messages) > MOST_MESSAGES:
        raise InvalidInput("messages", f"are {len(messages)}, at most {MOST_MESSAGES} may be")
    texts = (text for each in messages for text in each.values() if isinstance(text, str))
    calls = (each["tool_calls"] for each in messages if "tool_calls" in each)
    characters = sum(map(len, texts)) + sum(
        len(json.dumps(each, ensure_ascii=False)) for each in calls
    )
    if characters > most_characters:
        raise _too_long(model, "messages", f"has {characters} characters")


async def _bad_token_ids(
    codec: TextCodec, sampling: SamplingParameters
) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of bad words, as they are encoded at the beginning of a text and in it."""
    words = [word.strip() for word in sampling.bad_words]
    if not all(words) or not all(map(is_unicode, words)):
        raise InvalidInput("bad_words", "a text has nothing but spaces, or halves of characters")
    encoded = await codec.encode_all([text for word in words for text in (word, f" {word}")])
    known = dict.fromkeys(sampling.bad_token_ids)
    return tuple(known | dict.fromkeys(tuple(each) for each in encoded if each))


def _check_prompt_logprobs(tokens: int, sampling: SamplingParameters) -> None:
    if sampling.prompt_logprobs is None:
        return
    wanted = tokens * (1 + sampling.prompt_logprobs)
    if wanted > MAX_PROMPT_LOGPROBS:
        raise InvalidInput(
            "prompt_logprobs",
            f"{tokens} tokens with {sampling.prompt_logprobs} of the likeliest each are {wanted} "
            f"numbers; at most {MAX_PROMPT_LOGPROBS} are given",
        )


def _check_generated(
    ids: Sequence[int], sampling: SamplingParameters, vocabulary_size: int
) -> None:
    """Raises InvalidInput if the answer cannot continue after the tokens `ids`."""
    if len(ids) >= sampling.max_tokens:
        raise InvalidInput(
            _GENERATED, f"{len(ids)} tokens leave nothing of max_tokens={sampling.max_tokens}"
        )
    _checked(_GENERATED, ids, vocabulary_size)


def _checked(field: str, ids: Sequence[int], vocabulary_size: int) -> Sequence[int]:
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary_size:
        raise InvalidInput(field, f"token ids of this model lie in 0..{vocabulary_size - 1}")
    return ids


def _too_long(model: Model, field: str, what: str) -> InvalidInput:
    error = InvalidInput(
        field,
        f"This model's maximum context length is {model.session_tokens} tokens, but the prompt "
        f"{what}",
    )
    error.details["code"] = TOO_LONG
    return error
