"""The table of all parameters of the OpenAI paths: taken, refused, or ignored.

The page of these paths shows it, and refusals are made from it. A parameter that is not in the
table is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from catenary_gateway.openai_http.fields import Fields
from catenary_services.errors import InvalidInput


class ParameterKind(Enum):
    """The kind of a parameter."""

    TAKEN = "taken"
    REFUSED = "refused"
    """Refused with status 400, because the answer would not be what was asked for."""
    IGNORED = "ignored"
    """Ignored because it changes nothing that a client could miss."""


CHATS = frozenset({"chat"})
COMPLETIONS = frozenset({"completions"})
BOTH = CHATS | COMPLETIONS


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the OpenAI paths."""

    name: str
    paths: frozenset[str]
    """The paths on which it is treated so: "chat", "completions"."""
    kind: ParameterKind
    text: str
    """The range or meaning of one that is taken, else the reason why it is not."""
    harmless: Callable[[Any], bool] = lambda value: False
    """True for a value of a refused parameter that asks for nothing, as null does."""


def refuse(fields: Fields, path: str) -> None:
    """Raises InvalidInput for a field that would change the answer and is not supported."""
    refused = REFUSED[path]
    for name in fields.keys() & refused.keys():
        parameter, value = refused[name], fields[name]
        if value is not None and not parameter.harmless(value):
            raise InvalidInput(name, parameter.text)


def _is(*values: object) -> Callable[[Any], bool]:
    def harmless(value: Any) -> bool:
        # The types must be equal: 0 may ask for something, and False does not.
        return any(type(value) is type(each) and value == each for each in values)

    return harmless


_NOTHING = _is(False, [], {}, "")


def _taken(paths: frozenset[str], **texts: str) -> Iterable[Parameter]:
    return (Parameter(name, paths, ParameterKind.TAKEN, text) for name, text in texts.items())


def _refused(
    paths: frozenset[str], names: str, text: str, harmless: Callable[[Any], bool] = _NOTHING
) -> Iterable[Parameter]:
    return (
        Parameter(name, paths, ParameterKind.REFUSED, text, harmless) for name in names.split(", ")
    )


def _ignored(paths: frozenset[str], names: str, text: str) -> Iterable[Parameter]:
    return (Parameter(name, paths, ParameterKind.IGNORED, text) for name in names.split(", "))


PARAMETERS: tuple[Parameter, ...] = (
    *_taken(BOTH, model="`name` or `name:version`"),
    *_taken(
        CHATS,
        messages="contents are texts, or parts of type `text`",
        tools="up to 128 functions, of which the model's template tells it; `strict` ones are "
        "held to their schema",
        tool_choice="`none`, `auto`, `required`, a function, or `allowed_tools`",
        parallel_tool_calls="false: one call at most",
        include_reasoning="vLLM's: false leaves out `reasoning_content`",
    ),
    *_taken(COMPLETIONS, prompt="a text, token ids, or a list of these, each answered by itself"),
    *_taken(
        BOTH,
        max_tokens="without it a chat has all of the context, a completion 16 tokens",
    ),
    *_taken(CHATS, max_completion_tokens="the newer name of `max_tokens`"),
    *_taken(
        BOTH,
        temperature="0 to 2, by default 1; 0 is greedy",
        top_p="above 0, to 1",
        n="answers to each prompt; at most 128 of all prompts together. Seeds count up from `seed`",
    ),
    *_taken(
        COMPLETIONS,
        best_of="so many are generated, and the `n` with the largest sum of log probabilities are "
        "answered; not in streams",
    ),
    *_taken(BOTH, seed="any 64-bit integer"),
    *_taken(BOTH, stop="a text, or up to 16"),
    *_taken(
        BOTH,
        presence_penalty="-2 to 2",
        frequency_penalty="-2 to 2",
        logit_bias="up to 1024 tokens, -100 to 100",
    ),
    *_taken(
        CHATS,
        logprobs="true: log probabilities of the answer's tokens",
        top_logprobs="those of the likeliest tokens at each place as well, up to 20",
    ),
    *_taken(
        COMPLETIONS,
        logprobs="0 to 5: the same, in the form completions have",
        echo="the text begins with the prompt; with `logprobs` it has those of the prompt, too",
    ),
    *_taken(BOTH, stream="true: server-sent events"),
    *_taken(BOTH, stream_options="`include_usage`, and of vLLM's `continuous_usage_stats`"),
    *_taken(
        BOTH,
        prompt_logprobs="vLLM's: 0 to 20, log probabilities of the prompt's tokens; not in streams",
        top_k="vLLM's",
        min_p="vLLM's: 0 to 1",
        repetition_penalty="vLLM's: 0.01 to 100",
        min_tokens="vLLM's",
        ignore_eos="vLLM's",
        stop_token_ids="vLLM's: up to 1024 tokens",
        include_stop_str_in_output="vLLM's",
        skip_special_tokens="vLLM's",
        bad_words="vLLM's: up to 128 texts that are not generated",
        allowed_token_ids="vLLM's: the only tokens that are generated, up to 1024",
        priority="vLLM's: lowest first; inside and everywhere else higher is more urgent, and "
        "`max_priority` of the key is its negative here",
    ),
    *_taken(
        BOTH,
        response_format="`text`, `json_object` or `json_schema`: [the form of the answer]"
        "(#structured-answers)",
        structured_outputs="vLLM's: the same, or a regular expression, a choice or a grammar",
        guided_json="vLLM's: the same, under its earlier names",
        guided_regex="vLLM's: the same, under its earlier names",
        guided_choice="vLLM's: the same, under its earlier names",
        guided_grammar="vLLM's: the same, under its earlier names",
        guided_whitespace_pattern="vLLM's: whitespace between the parts of JSON",
    ),
    *_taken(CHATS, chat_template_kwargs="vLLM's: up to 32 variables of the model's template"),
    *_refused(COMPLETIONS, "suffix", "is not offered: text is added at the end only"),
    *_refused(CHATS, "functions", "is OpenAI's older form of tools: send these"),
    *_refused(
        CHATS,
        "function_call",
        "is OpenAI's older form: send tools and tool_choice",
        _is("none", "auto"),
    ),
    *_refused(CHATS, "modalities", "only text is answered", _is([], ["text"])),
    *_refused(CHATS, "audio, web_search_options", "is not offered"),
    *_refused(BOTH, "use_beam_search", "beam search is not offered"),
    *_refused(BOTH, "logits_processors", "code of clients is not run"),
    *_refused(BOTH, "truncate_prompt_tokens", "prompts are never cut"),
    *_refused(COMPLETIONS, "prompt_embeds", "a prompt is a text or token ids"),
    *_refused(CHATS, "chat_template", "chats go through the model's own template"),
    *_refused(CHATS, "documents", "is not offered: put them into a message"),
    *_refused(CHATS, "continue_final_message", "an answer is always a new message"),
    *_refused(CHATS, "add_generation_prompt", "an answer is always a new message", _is(True)),
    *_refused(CHATS, "echo", "is for completions"),
    *_refused(CHATS, "add_special_tokens", "the model's template has them", _is(False)),
    *_refused(COMPLETIONS, "add_special_tokens", "send token ids to have none", _is(True)),
    *_refused(BOTH, "return_tokens_as_token_ids", "tokens are named by their texts and bytes"),
    *_refused(BOTH, "return_token_ids", "is not offered: ask over gRPC"),
    *_ignored(
        BOTH,
        "user, safety_identifier, metadata, store, service_tier, request_id",
        "nothing is done with it",
    ),
    *_ignored(BOTH, "prompt_cache_key, prompt_cache_retention, cache_salt", "no prompt is cached"),
    *_ignored(CHATS, "prediction", "it would make an answer faster, not another"),
    *_ignored(CHATS, "reasoning_effort, verbosity", "say it in `chat_template_kwargs`"),
    *_ignored(BOTH, "length_penalty, early_stopping", "are for beam search"),
    *_ignored(BOTH, "spaces_between_special_tokens", "there are none"),
)
REFUSED = {
    path: {
        parameter.name: parameter
        for parameter in PARAMETERS
        if parameter.kind is ParameterKind.REFUSED and path in parameter.paths
    }
    for path in BOTH
}
"""The parameters of each path that are not supported, by name."""
