"""The forms of answers and of errors. Tests hold the gateway's own answers against them."""

from __future__ import annotations

from catenary_gateway.endpoints.json_schemas import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    INTEGER,
    NUMBER,
    TEXT,
    Schema,
    list_of,
    nullable,
    one,
    record,
)

_MAYBE_TEXT = nullable(TEXT)
_REASONS = one("stop", "length", "tool_calls")
_LOGPROBS = nullable(ANY_OBJECT)
_TOKENS = record(prompt_tokens=COUNT, total_tokens=COUNT)
_USAGE = record(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
_HEAD = {"id": TEXT, "created": INTEGER, "model": TEXT}
_CALL = record(id=TEXT, type=one("function"), function=record(name=TEXT, arguments=TEXT))
_MESSAGE = record(
    {"reasoning_content": TEXT, "tool_calls": list_of(_CALL)},
    role=one("assistant"),
    content=_MAYBE_TEXT,
)
_MODEL = record(id=TEXT, object=one("model"), created=INTEGER, owned_by=TEXT, max_model_len=COUNT)
_RESPONSE = record(
    id=TEXT,
    object=one("response"),
    created_at=INTEGER,
    status=one("completed", "incomplete"),
    model=TEXT,
    output=list_of(record(id=TEXT, type=TEXT, status=TEXT)),
    store=FLAG,
    usage=record(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
)
_RANKED = record(
    id=TEXT,
    model=TEXT,
    usage=_TOKENS,
    results=list_of(record({"document": record(text=TEXT)}, index=COUNT, relevance_score=NUMBER)),
)
_SCORED = record(
    **_HEAD,
    object=one("list"),
    data=list_of(record(index=COUNT, object=one("score"), score=NUMBER)),
    usage=_TOKENS,
)

ANSWERS: dict[tuple[str, str], Schema] = {
    ("POST", "/v1/chat/completions"): record(
        **_HEAD,
        object=one("chat.completion"),
        usage=_USAGE,
        choices=list_of(
            record(index=COUNT, message=_MESSAGE, logprobs=_LOGPROBS, finish_reason=_REASONS)
        ),
    ),
    ("POST", "/v1/completions"): record(
        **_HEAD,
        object=one("text_completion"),
        usage=_USAGE,
        choices=list_of(record(index=COUNT, text=TEXT, logprobs=_LOGPROBS, finish_reason=_REASONS)),
    ),
    ("POST", "/v1/responses"): _RESPONSE,
    ("GET", "/v1/responses/{response_id}"): _RESPONSE,
    ("DELETE", "/v1/responses/{response_id}"): record(
        id=TEXT, object=one("response"), deleted=one(True)
    ),
    ("POST", "/v1/messages"): record(
        id=TEXT,
        type=one("message"),
        role=one("assistant"),
        model=TEXT,
        content=list_of(record(type=one("text", "tool_use"))),
        stop_reason=one("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=_MAYBE_TEXT,
        usage=record(input_tokens=COUNT, output_tokens=COUNT),
    ),
    ("POST", "/v1/messages/count_tokens"): record(input_tokens=COUNT),
    ("POST", "/v1/embeddings"): record(
        object=one("list"),
        model=TEXT,
        usage=_TOKENS,
        data=list_of(
            record(
                object=one("embedding"),
                index=COUNT,
                embedding={"anyOf": [list_of(NUMBER), TEXT]},
            )
        ),
    ),
    **{("POST", path): _RANKED for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
    **{("POST", path): _SCORED for path in ("/v1/score", "/score")},
    ("POST", "/tokenize"): record(
        count=COUNT,
        max_model_len=COUNT,
        tokens=list_of(COUNT),
        token_strs=nullable(list_of(TEXT)),
    ),
    ("POST", "/detokenize"): record(prompt=TEXT),
    ("GET", "/v1/models"): record(object=one("list"), data=list_of(_MODEL)),
    ("GET", "/v1/models/{model}"): _MODEL,
    ("GET", "/version"): record(version=TEXT),
}
"""The answer of each path with status 200, unless it is a stream of events."""

ERRORS: dict[str, Schema] = {
    "OpenAIError": record(
        error=record(message=TEXT, type=TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT)
    ),
    "AnthropicError": record(type=one("error"), error=record(type=TEXT, message=TEXT)),
    "InferenceError": record(error=TEXT),
}
"""The forms of errors, by the names that `error_forms` has for them."""
