"""The request in the body of a completion or chat completion, checked field by field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from catenary_gateway.generation.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from catenary_gateway.openai_http.answer_forms import ANY_FORM, FORM_FIELDS, answer_form_of
from catenary_gateway.openai_http.fields import (
    Fields,
    flag,
    integer,
    mapping,
    number,
    text,
    texts,
    token_ids,
)
from catenary_gateway.openai_http.messages import messages_of
from catenary_gateway.openai_http.parameters import refuse
from catenary_gateway.openai_http.tool_fields import TOOL_FIELDS, tools_of
from catenary_services.domain.sampling import (
    MAX_BIASED_TOKENS,
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    MAX_SEED,
    SamplingParameters,
)
from catenary_services.errors import InvalidInput

COMPLETION_TOKENS = 16
"""Most tokens of a completion that names no limit, as with OpenAI and vLLM; chats have no limit."""
MOST_ANSWERS = 128
"""Most answers that are generated for one request, as with OpenAI's `n`."""
COMPLETION_LOGPROBS = 5
"""Most of the likeliest tokens that a completion names at each place."""
_PRIORITY_LIMIT = 2**31 - 1
_MOST_VARIABLES = 32
_MOST_DIGITS = 10


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion or chat completion as its client asks for it."""

    model: str
    prompts: Sequence[Prompt]
    sampling: SamplingParameters
    choices: int
    """Number of answers to each prompt that the client gets."""
    generated: int
    """Number of answers to each prompt that are generated; the best of them are `choices`."""
    logprobs: int | None
    """Number of the likeliest tokens named with each; None if no log probabilities are."""
    prompt_logprobs: int | None
    """The same for the tokens of the prompt, in vLLM's form."""
    echo: bool
    """True if the text of an answer begins with the prompt."""
    stream: bool
    include_usage: bool
    """True to send one more chunk with the usage at the end of a stream."""
    continuous_usage: bool
    """True to send the usage in every chunk of a stream."""
    priority: int
    grammar_field: str
    """The field that describes the grammar of the answer, for errors."""
    include_reasoning: bool = True
    """True if an answer has its reasoning, too."""


def chat_of(fields: Fields) -> CompletionRequest:
    """Returns the request in the fields of a chat completion.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered.
    """
    refuse(fields, "chats")
    limit = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    messages = messages_of(fields.get("messages"))
    variables = mapping(fields, "chat_template_kwargs")
    if len(variables) > _MOST_VARIABLES:
        raise InvalidInput("chat_template_kwargs", f"has more than {_MOST_VARIABLES} names")
    tools = tools_of(fields) if fields.keys() & TOOL_FIELDS else None
    prompt = ChatPrompt(messages, variables, tools, parsed=True)
    wanted = _wanted(fields, [prompt], _limit(fields, limit, 0))
    if fields.get("include_reasoning") is not None:
        wanted = replace(wanted, include_reasoning=flag(fields, "include_reasoning"))
    top = integer(fields, "top_logprobs", 0)
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidInput("top_logprobs", f"must be 0 to {MAX_LOGPROBS}")
    if flag(fields, "logprobs"):
        return _with_logprobs(wanted, top)
    if top:
        raise InvalidInput("top_logprobs", "is for requests with logprobs: true")
    return wanted


def completion_of(fields: Fields) -> CompletionRequest:
    """Returns the request in the fields of a completion.

    Raises:
        InvalidInput: A field is missing, wrong, or asks for what is not offered.
    """
    refuse(fields, "completions")
    prompts = _prompts(fields.get("prompt"))
    wanted = _wanted(fields, prompts, _limit(fields, "max_tokens", COMPLETION_TOKENS))
    wanted = replace(wanted, echo=flag(fields, "echo"))
    if fields.get("logprobs") is not None and fields["logprobs"] is not False:
        top = integer(fields, "logprobs", 0)
        if not 0 <= top <= COMPLETION_LOGPROBS:
            raise InvalidInput("logprobs", f"must be 0 to {COMPLETION_LOGPROBS}")
        wanted = _with_logprobs(wanted, top)
    return _best_of(fields, wanted)


def _with_logprobs(wanted: CompletionRequest, top: int) -> CompletionRequest:
    sampling = replace(wanted.sampling, logprobs=top)
    if wanted.echo:
        most = max(top, sampling.prompt_logprobs or 0)
        sampling = replace(sampling, prompt_logprobs=most)
    return replace(wanted, logprobs=top, sampling=sampling)


def _best_of(fields: Fields, wanted: CompletionRequest) -> CompletionRequest:
    best_of = integer(fields, "best_of", wanted.choices)
    if best_of < wanted.choices:
        raise InvalidInput("best_of", "must not be less than n")
    if best_of == wanted.choices:
        return wanted
    if wanted.stream:
        raise InvalidInput("best_of", "the best are known at the end, and so cannot be streamed")
    _check_answers("best_of", len(wanted.prompts) * best_of)
    # Answers are compared by the log probabilities of their tokens, also if nobody asked for them.
    sampling = replace(wanted.sampling, logprobs=wanted.sampling.logprobs or 0)
    return replace(wanted, generated=best_of, sampling=sampling)


def _check_answers(field: str, answers: int) -> None:
    if not 1 <= answers <= MOST_ANSWERS:
        why = f"{answers} answers; 1 to {MOST_ANSWERS} are generated for one request"
        raise InvalidInput(field, why)


def _wanted(fields: Fields, prompts: Sequence[Prompt], max_tokens: int) -> CompletionRequest:
    stream = flag(fields, "stream")
    options = mapping(fields, "stream_options")
    if options and not stream:
        raise InvalidInput("stream_options", "is for streams only")
    priority = integer(fields, "priority", 0)
    if abs(priority) > _PRIORITY_LIMIT:
        raise InvalidInput("priority", "must fit in 32 bits")
    choices = integer(fields, "n", 1)
    _check_answers("n", choices)
    _check_answers("prompt", choices * len(prompts))
    form = answer_form_of(fields) if fields.keys() & FORM_FIELDS else ANY_FORM
    sampling = _sampling(fields, max_tokens, form.grammar)
    if stream and sampling.prompt_logprobs is not None:
        raise InvalidInput("prompt_logprobs", "is not for streams")
    return CompletionRequest(
        model=text(fields, "model"),
        prompts=prompts,
        sampling=sampling,
        choices=choices,
        generated=choices,
        logprobs=None,
        prompt_logprobs=sampling.prompt_logprobs,
        echo=False,
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
        stop=texts(fields, "stop"),
        # OpenAI allows any 64-bit integer; negative ones map to the upper half.
        seed=None if seed is None else integer(fields, "seed", 0) & MAX_SEED,
        ignore_eos=flag(fields, "ignore_eos"),
        presence_penalty=number(fields, "presence_penalty", 0.0),
        frequency_penalty=number(fields, "frequency_penalty", 0.0),
        min_p=number(fields, "min_p", 0.0),
        logit_bias=_bias(mapping(fields, "logit_bias")),
        prompt_logprobs=_prompt_logprobs(fields),
        stop_token_ids=token_ids(fields, "stop_token_ids", MAX_LISTED_TOKENS),
        allowed_token_ids=_allowed(fields),
        bad_words=texts(fields, "bad_words"),
        include_stop_str_in_output=flag(fields, "include_stop_str_in_output"),
        skip_special_tokens=fields.get("skip_special_tokens") is None
        or flag(fields, "skip_special_tokens"),
        grammar=grammar,
    )


def _prompt_logprobs(fields: Fields) -> int | None:
    value = fields.get("prompt_logprobs")
    if value is None or value is False:
        return None
    top = integer(fields, "prompt_logprobs", 0)
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidInput("prompt_logprobs", f"must be 0 to {MAX_LOGPROBS}")
    return top


def _allowed(fields: Fields) -> tuple[int, ...]:
    tokens = token_ids(fields, "allowed_token_ids", MAX_LISTED_TOKENS)
    if fields.get("allowed_token_ids") == []:
        raise InvalidInput("allowed_token_ids", "is empty, so nothing could be generated")
    return tokens


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


def _prompts(value: Any) -> list[Prompt]:
    """Returns the prompts of a completion: a text, token ids, or a list of these."""
    if isinstance(value, str):
        return [TextPrompt(value)]
    if not isinstance(value, list) or not value:
        raise InvalidInput("prompt", "must be a text, a list of token ids, or a list of these")
    if type(value[0]) is int:
        return [_token_prompt(value)]
    _check_answers("prompt", len(value))
    return [TextPrompt(each) if isinstance(each, str) else _token_prompt(each) for each in value]


def _token_prompt(value: Any) -> TokenPrompt:
    if not isinstance(value, list) or not value:
        raise InvalidInput("prompt", "must be a text or a list of token ids, and not empty")
    if not all(type(each) is int for each in value):
        raise InvalidInput("prompt", "must be a text or a list of token ids")
    return TokenPrompt(value)
