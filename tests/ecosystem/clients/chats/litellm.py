"""LiteLLM, which calls servers of many kinds in one way."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are not fetched

import litellm
from features import (
    API_KEY,
    BASE_URL,
    CHAT_MODEL,
    EMBEDDING_MODEL,
    RERANK_MODEL,
    error_of,
    feature,
    report,
)
from pydantic import BaseModel

SERVED = {"api_base": f"{BASE_URL}/v1", "api_key": API_KEY, "num_retries": 0}
ASKED = [{"role": "user", "content": "What will the weather be like in Paris?"}]
SHORT: dict[str, Any] = {"messages": ASKED, "temperature": 0, "max_tokens": 8, **SERVED}
LONG = SHORT | {"max_tokens": 100}
TOOL = {
    "type": "function",
    "function": {
        "name": "show_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Weather(BaseModel):
    """What the weather is like."""

    city: Literal["Bern", "Paris", "Oslo"]
    celsius: bool


@feature("completion by openai/ and by hosted_vllm/, with a stream")
def chat() -> None:
    for provider in ("openai", "hosted_vllm"):
        asked = {"model": f"{provider}/{CHAT_MODEL}", **SHORT}
        whole = litellm.completion(**asked)
        assert whole.choices[0].message.content
        chunks = litellm.completion(**asked, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content


@feature("acompletion")
async def asynchronous() -> None:
    answer = await litellm.acompletion(model=f"openai/{CHAT_MODEL}", **SHORT)
    assert answer.usage.completion_tokens == 8


@feature("tools, tool_choice required or named")
def tools() -> None:
    named = {"type": "function", "function": {"name": "show_weather"}}
    for choice in ("required", named):
        answer = litellm.completion(
            model=f"openai/{CHAT_MODEL}", **LONG, tools=[TOOL], tool_choice=choice
        )
        (call, *_) = answer.choices[0].message.tool_calls
        assert call.function.name == "show_weather"


@feature("response_format with a class")
def structured() -> None:
    answer = litellm.completion(model=f"openai/{CHAT_MODEL}", **LONG, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)


@feature("n, logprobs, seed")
def sampling() -> None:
    answer = litellm.completion(
        model=f"openai/{CHAT_MODEL}", **SHORT, n=2, logprobs=True, top_logprobs=2, seed=1
    )
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.content) == 8


@feature("text_completion")
def completions() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{CHAT_MODEL}", prompt="The sky is", max_tokens=4, **SERVED
    )
    assert answer.choices[0].text


@feature("responses")
def responses() -> None:
    answer = litellm.responses(
        model=f"openai/{CHAT_MODEL}", input="Who are you?", max_output_tokens=16, **SERVED
    )
    assert answer.output[0].content[0].text


@feature("completion by anthropic/, with a stream")
def by_anthropic() -> None:
    asked = {"model": f"anthropic/{CHAT_MODEL}", **SHORT, "api_base": BASE_URL}
    assert litellm.completion(**asked).choices[0].message.content
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@feature("embedding")
def embeddings() -> None:
    texts = ["a cat sat on the mat", "the dog"]
    answer = litellm.embedding(model=f"openai/{EMBEDDING_MODEL}", input=texts, **SERVED)
    assert [len(each["embedding"]) for each in answer.data] == [32, 32]


@feature("rerank by hosted_vllm/")
def rerank() -> None:
    answer = litellm.rerank(
        model=f"hosted_vllm/{RERANK_MODEL}",
        query="a cat",
        documents=["the dog", "a cat sat on the mat"],
        top_n=1,
        api_base=BASE_URL,
        api_key=API_KEY,
    )
    assert len(answer.results) == 1


@feature("typed errors")
def errors() -> None:
    asked = {"model": f"openai/{CHAT_MODEL}", **SHORT}
    for kind, change in (
        (litellm.NotFoundError, {"model": "openai/nobody"}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
        (litellm.BadRequestError, {"temperature": 3}),
    ):
        error_of(kind, partial(litellm.completion, **asked | change))


report("litellm")
