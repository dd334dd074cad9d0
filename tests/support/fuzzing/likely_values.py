"""Values that mean something to the models of the fuzzed cluster, for the OpenAPI document.

Each is put beside what the document says of its field, which is then as wide as it was: what is
valid and what is not stays the document's own.
"""

from __future__ import annotations

from typing import Any

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
    "tools": [[_TOOL]],
    "tool_choice": _CHOICES,
    "stream": [True],
    "n": [1, 2],
}
LIKELY: dict[str, dict[str, list[Any]]] = {
    "ChatCompletionsBody": _SAMPLED
    | {
        "messages": _SAID,
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
"""Some values of the fields of each body, beside any."""
_INPUTS = [
    [{"name": "words", "datatype": "BYTES", "shape": [1, 2], "data": ["Cat", "dog"]}],
    [{"name": "text", "datatype": "BYTES", "shape": [2], "data": _TEXTS}],
    [{"name": "text", "datatype": "BYTES", "shape": [1, 2], "data": _TEXTS}],
]
ENCODING = ("EmbeddingBody", "ScoreBody", "RerankBody")


def sharpen(document: Document, models: dict[str, list[str]], region: str, picture: Any) -> None:
    """Adds likely values to an OpenAPI document, in place.

    Args:
        document: The document.
        models: Names of models: those that are "chats", "encoders", and "inferred" by tensors.
        region: The name of a region of shared memory.
        picture: An input of the last model that is in it.
    """
    schemas = document["components"]["schemas"]
    for name, fields in LIKELY.items():
        properties = schemas[name]["properties"]
        _add(properties, "model", models["encoders" if name in ENCODING else "chats"])
        for field, values in fields.items():
            _add(properties, field, values)
    every = [name for names in models.values() for name in names]
    likely = {"model": every, "version": ["1"], "region": [region, "other"]}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                _add(parameter, "schema", likely.get(parameter["name"], []))
            if path.endswith("/infer"):
                body = operation["requestBody"]["content"]["application/json"]["schema"]
                _add(body["properties"], "inputs", [*_INPUTS, [picture]])


def _add(place: Document, field: str, values: list[Any]) -> None:
    if values:
        place[field] = {"anyOf": [{"enum": values}, place[field]]}
