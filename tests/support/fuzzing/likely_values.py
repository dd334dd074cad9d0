"""Values that mean something to the models of the fuzzed cluster, and requests with some of them.

What is drawn from the description alone names no model that is there, so that little of it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Document = dict[str, Any]

_TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "parameters": {"type": "object", "properties": {"utc": {"type": "boolean"}}},
    },
}
_SAID = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why?"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [
        {"role": "user", "content": "time?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ],
]
_TURNS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ],
]
_TEXTS = ["the cat", "a dog sat on the mat ."]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_CHOICES: list[Any] = ["auto", "none", "required"]
_FORMS: list[Any] = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
]
_SAMPLED = {
    "max_tokens": [1, 9],
    "temperature": [0, 0.7],
    "stop": ["x", ["a", "b"]],
    "logit_bias": [{"20": 1.5}],
    "stream": [True],
    "n": [1, 2],
}
_REQUIRED = ("messages", "prompt", "text_1", "text_2", "query", "documents", "tokens")
LIKELY: dict[str, dict[str, list[Any]]] = {
    "ChatCompletionsBody": _SAMPLED
    | {
        "messages": _SAID,
        "tools": [[_TOOL]],
        "tool_choice": _CHOICES,
        "max_completion_tokens": [1, 9],
        "logprobs": [True],
        "top_logprobs": [0, 3],
        "prompt_logprobs": [1],
        "response_format": _FORMS,
        "guided_regex": ["[ab]+"],
        "guided_choice": [["yes", "no"]],
        "guided_json": [_SCHEMA],
        "structured_outputs": [{"choice": ["yes", "no"]}],
        "stream_options": [{"include_usage": True}],
        "bad_words": [["a"]],
        "allowed_token_ids": [[20, 21, 22]],
        "stop_token_ids": [[20]],
    },
    "CompletionsBody": _SAMPLED
    | {
        "prompt": ["hi", ["a", "b"], [20, 21], [[20], [21, 22]]],
        "best_of": [2],
        "logprobs": [0, 3],
        "echo": [True],
        "guided_regex": ["[ab]+"],
        "guided_grammar": ["start: /[ab]+/"],
        "prompt_logprobs": [1],
    },
    "ResponseBody": {
        "input": ["hi", [{"role": "user", "content": "hi"}]],
        "max_output_tokens": [1, 9],
        "stream": [True],
        "tools": [[{"type": "function", "name": "now", "parameters": {}}]],
        "tool_choice": _CHOICES,
        "text": [{"format": {"type": "json_object"}}],
        "metadata": [{"a": "b"}],
    },
    "MessageBody": {
        "messages": _TURNS,
        "max_tokens": [1, 9],
        "stream": [True],
        "tools": [[{"name": "now", "input_schema": {"type": "object"}}]],
        "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "now"}],
    },
    "ConversationBody": {"messages": _TURNS},
    "EmbeddingBody": {"input": ["the cat", _TEXTS, [4, 5], [[4], [5, 6]]]},
    "ScoreBody": {"text_1": ["the cat"], "text_2": ["a dog", _TEXTS]},
    "RerankBody": {"query": ["the cat"], "documents": [_TEXTS, [{"text": "a dog"}]]},
    "TokenizeBody": {"prompt": ["hi"], "messages": _SAID},
    "DetokenizeBody": {"tokens": [[20, 21]]},
}
"""Some values of the fields of each body, by the name of its schema."""
_INPUTS = [
    [{"name": "words", "datatype": "BYTES", "shape": [1, 2], "data": ["Cat", "dog"]}],
    [{"name": "text", "datatype": "BYTES", "shape": [2], "data": _TEXTS}],
    [{"name": "text", "datatype": "BYTES", "shape": [1, 2], "data": _TEXTS}],
]
_ENCODED = ("EmbeddingBody", "ScoreBody", "RerankBody")
_MOST_LIKELY, _MOST_OTHER = 4, 2


@dataclass(frozen=True)
class LikelyRequests:
    """Requests that a cluster can answer.

    Args:
        chats: Names of models that generate text.
        encoders: Names of encoders.
        inferred: Names of models that are given tensors.
        region: The name of a region of shared memory.
        picture: An input of one of these models that is in it.
    """

    chats: list[str]
    encoders: list[str]
    inferred: list[str]
    region: str
    picture: Any

    def in_path(self, given: Document) -> st.SearchStrategy[Document]:
        """The parameters of a path, some of them with names of what is there."""
        names = [*self.chats, *self.encoders, *self.inferred]
        likely = {"model": names, "version": ["1"], "region": [self.region]}
        return st.fixed_dictionaries(
            {name: st.sampled_from([*likely.get(name, ()), value]) for name, value in given.items()}
        )

    def bodies(self, name: str, given: Document) -> st.SearchStrategy[Document]:
        """Bodies with likely values in the place of most of those that were given.

        Args:
            name: The name of the body's schema; "" for that of an inference.
            given: The body as it was drawn, valid or not.
        """
        fields = dict(LIKELY.get(name, {}))
        if name in LIKELY:
            fields["model"] = list(self.encoders if name in _ENCODED else self.chats)
        elif "inputs" in given:
            fields["inputs"] = [*_INPUTS, [self.picture]]
        if not fields:
            return st.just(given)
        needed = [field for field in fields if field in ("model", "input", "inputs", *_REQUIRED)]
        optional = [field for field in fields if field not in needed]

        @st.composite
        def body(draw: st.DrawFn) -> Document:
            others = st.sampled_from(sorted(given)) if given else st.nothing()
            kept = draw(st.lists(others, max_size=_MOST_OTHER)) if given else []
            chosen = (
                draw(st.lists(st.sampled_from(optional), max_size=_MOST_LIKELY)) if optional else []
            )
            likely = {field: draw(st.sampled_from(fields[field])) for field in [*needed, *chosen]}
            return likely | {field: given[field] for field in kept}

        # As it was but for the model, or nearly all of it likely.
        known = given | {"model": fields["model"][0]} if given.get("model") else given
        return st.one_of(st.just(known), body())
