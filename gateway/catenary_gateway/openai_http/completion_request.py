"""The request in the body of a completion or chat completion, checked field by field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catenary_gateway.generation.intake import is_unicode
from catenary_gateway.generation.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from catenary_gateway.openai_http.answer_forms import answer_form_of
from catenary_services.domain.sampling import MAX_BIASED_TOKENS, MAX_SEED, SamplingParameters
from catenary_services.errors import InvalidInput

Fields = Mapping[str, Any]


def text(fields: Fields, name: str) -> str:
    """Returns a text that must be present and not empty."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(name, "must be a text and not empty")
    return value


def flag(fields: Fields, name: str) -> bool:
    """Returns a boolean; False if it is absent or null."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(name, "must be true or false")
    return bool(value)


def integer(fields: Fields, name: str, default: int) -> int:
    """Returns an integer; `default` if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(name, "must be an integer")
    return value


def number(fields: Fields, name: str, default: float) -> float:
    """Returns a finite number, limited to 1e18 in magnitude; `default` if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(name, "must be a number")
    # JSON integers have any size; those beyond 1e18 are out of every field's range.
    value = float(min(max(value, -1e18), 1e18))
    if not math.isfinite(value):
        raise InvalidInput(name, "must be finite")
    return value


def mapping(fields: Fields, name: str) -> Fields:
    """Returns an object; an empty one if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInput(name, "must be an object")
    return value


COMPLETION_TOKENS = 16
"""Most tokens of a completion that names no limit, as with OpenAI and vLLM; chats have no limit."""
_PRIORITY_LIMIT = 2**31 - 1
_MOST_VARIABLES = 32
_MOST_DIGITS = 10
_ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}
"""The role that templates get for each role of a message: they know OpenAI's newer `developer` as
`system`."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion or chat completion as its client asks for it."""

    model: str
    prompt: Prompt
    sampling: SamplingParameters
    stream: bool
    include_usage: bool
    """True to send one more chunk with the usage at the end of a stream."""
    continuous_usage: bool
    """True to send the usage in every chunk of a stream."""
    priority: int
    grammar_field: str
    """The field that describes the grammar of the answer, for errors."""


def chat_of(fields: Fields) -> CompletionRequest:
    """Returns the request in the fields of a chat completion.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered.
    """
    _refuse(fields, _REFUSED | _REFUSED_IN_CHATS)
    limit = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidInput("messages", "must be a list of messages and not empty")
    variables = mapping(fields, "chat_template_kwargs")
    if len(variables) > _MOST_VARIABLES:
        raise InvalidInput("chat_template_kwargs", f"has more than {_MOST_VARIABLES} names")
    prompt = ChatPrompt(
        [_message(each, f"messages[{at}]") for at, each in enumerate(messages)], variables
    )
    return _wanted(fields, prompt, _limit(fields, limit, 0))


def completion_of(fields: Fields) -> CompletionRequest:
    """Returns the request in the fields of a completion.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered.
    """
    _refuse(fields, _REFUSED | _REFUSED_IN_COMPLETIONS)
    prompt = _prompt(fields.get("prompt"))
    return _wanted(fields, prompt, _limit(fields, "max_tokens", COMPLETION_TOKENS))


def _wanted(fields: Fields, prompt: Prompt, max_tokens: int) -> CompletionRequest:
    stream = flag(fields, "stream")
    options = mapping(fields, "stream_options")
    if options and not stream:
        raise InvalidInput("stream_options", "is for streams only")
    priority = integer(fields, "priority", 0)
    if abs(priority) > _PRIORITY_LIMIT:
        raise InvalidInput("priority", "must fit in 32 bits")
    form = answer_form_of(fields)
    return CompletionRequest(
        model=text(fields, "model"),
        prompt=prompt,
        sampling=_sampling(fields, max_tokens, form.grammar),
        stream=stream,
        include_usage=flag(options, "include_usage"),
        continuous_usage=flag(options, "continuous_usage_stats"),
        # This field is vLLM's, which serves the lowest value first; the scheduler the highest.
        priority=-priority,
        grammar_field=form.field,
    )


def _limit(fields: Fields, name: str, default: int) -> int:
    limit = integer(fields, name, default)
    if limit < 1 and fields.get(name) is not None:
        raise InvalidInput(name, "must be at least 1")
    return limit


def _sampling(fields: Fields, max_tokens: int, grammar: str) -> SamplingParameters:
    seed = fields.get("seed")
    top_k = integer(fields, "top_k", 0)
    return SamplingParameters(
        max_tokens=max_tokens,
        min_tokens=integer(fields, "min_tokens", 0),
        temperature=number(fields, "temperature", 1.0),
        top_p=number(fields, "top_p", 1.0),
        # vLLM's clients send -1 for all tokens.
        top_k=0 if top_k == -1 else top_k,
        repetition_penalty=number(fields, "repetition_penalty", 1.0),
        stop=_stop(fields.get("stop")),
        # OpenAI allows any 64-bit integer; negative ones map to the upper half.
        seed=None if seed is None else integer(fields, "seed", 0) & MAX_SEED,
        ignore_eos=flag(fields, "ignore_eos"),
        presence_penalty=number(fields, "presence_penalty", 0.0),
        frequency_penalty=number(fields, "frequency_penalty", 0.0),
        min_p=number(fields, "min_p", 0.0),
        logit_bias=_bias(mapping(fields, "logit_bias")),
        grammar=grammar,
    )


def _bias(bias: Fields) -> tuple[tuple[int, float], ...]:
    """Returns pairs of a token id and its bias; in JSON the ids are the keys, and so texts."""
    if len(bias) > MAX_BIASED_TOKENS:
        raise InvalidInput("logit_bias", f"has more than {MAX_BIASED_TOKENS} tokens")
    pairs = []
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= _MOST_DIGITS):
            raise InvalidInput("logit_bias", f"{token[:20]!r} is not a token id")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInput("logit_bias", f"that of {token} must be a number")
        pairs.append((int(token), value))
    return tuple(pairs)


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise InvalidInput("stop", "must be a text or a list of texts")
    if not all(map(is_unicode, texts)):
        raise InvalidInput("stop", "has halves of characters (lone surrogates)")
    return tuple(texts)


def _prompt(value: Any) -> Prompt:
    """Returns the one prompt of a completion: a text, token ids, or a list of one of these."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, list) or not value:
        raise InvalidInput("prompt", "must be a text or a list of token ids, and not empty")
    if isinstance(value[0], str | list):
        raise InvalidInput("prompt", "several prompts in one request are not offered")
    if not all(type(each) is int for each in value):
        raise InvalidInput("prompt", "must be a text or a list of token ids")
    return TokenPrompt(value)


def _message(value: Any, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidInput(where, "must be an object")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidInput(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise InvalidInput(f"{where}.{name}", "is not offered")
    return {"role": _ROLES[role], "content": _content(value.get("content"), f"{where}.content")}


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidInput(where, "must be a text or a list of parts")
    parts: list[str] = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = kind if isinstance(kind, str) else "?"
            raise InvalidInput(
                f"{where}[{at}].type", f"{shown[:40]!r} is not offered: this model reads text only"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidInput(f"{where}[{at}].text", "must be a text")
        parts.append(part["text"])
    # vLLM joins parts like this for templates that take only text.
    return "\n".join(parts)


def _refuse(fields: Fields, refused: dict[str, tuple[Callable[[Any], bool], str]]) -> None:
    """Raises InvalidInput for fields that would change the answer and are not supported."""
    for name in fields.keys() & refused.keys():
        harmless, why = refused[name]
        if fields[name] is not None and not harmless(fields[name]):
            raise InvalidInput(name, why)


def _is(*values: object) -> Callable[[Any], bool]:
    def harmless(value: Any) -> bool:
        # The types must be equal: in `logprobs`, 0 asks for log probabilities and False does not.
        return any(type(value) is type(each) and value == each for each in values)

    return harmless


def _table(
    names: Sequence[str], harmless: Callable[[Any], bool], why: str
) -> dict[str, tuple[Callable[[Any], bool], str]]:
    return dict.fromkeys(names, (harmless, why))


_NOTHING = _is(False, [], {}, "")
_REFUSED = {
    **_table(("n", "best_of"), _is(1), "is not offered beyond 1: send several requests"),
    **_table(("bad_words", "allowed_token_ids"), _NOTHING, "is not offered"),
    **_table(("prompt_logprobs",), _is(0, 0.0, False), "is not offered"),
    **_table(("use_beam_search",), _NOTHING, "beam search is not offered"),
    **_table(("stop_token_ids",), _NOTHING, "is not offered: name the texts in stop"),
    **_table(("skip_special_tokens",), _is(True), "special tokens are always left out"),
}
_REFUSED_IN_CHATS = {
    **_table(("logprobs",), _is(False), "is not offered"),
    **_table(("top_logprobs",), _is(0), "is not offered"),
    **_table(("tools", "functions"), _NOTHING, "is not offered: no tool can be called"),
    **_table(("tool_choice", "function_call"), _is("none", "auto"), "no tool can be called"),
    **_table(("modalities",), _is([], ["text"]), "only text is answered"),
    **_table(("audio", "web_search_options"), _NOTHING, "is not offered"),
}
_REFUSED_IN_COMPLETIONS = {
    **_table(("logprobs",), _is(False), "is not offered"),
    **_table(("echo",), _is(False), "is not offered"),
    **_table(("suffix",), _NOTHING, "is not offered: text is added at the end only"),
}
