"""The calls of Open WebUI, as its routers make them for a connection of OpenAI's kind.

The program itself is a server with a page; what it sends is in its files `routers/openai.py`,
`routers/tasks.py`, `retrieval/utils.py` and `retrieval/models/external.py`.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from features import (
    API_KEY,
    BASE_URL,
    CHAT_MODEL,
    EMBEDDING_MODEL,
    RERANK_MODEL,
    feature,
    report,
)

HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
MESSAGES = [{"role": "user", "content": "Who are you?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "show_weather",
        "description": "Shows the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Paris", "Oslo"], "type": "string"}},
            "required": ["city"],
        },
    },
}


async def post(path: str, **payload: Any) -> Any:
    """Returns the answer, or the events of a stream."""
    async with (
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.post(f"{BASE_URL}/v1{path}", data=json.dumps(payload)) as answer,
    ):
        if answer.status >= 400:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        if "text/event-stream" not in answer.headers.get("Content-Type", ""):
            return await answer.json()
        lines = [line.decode().strip() async for line in answer.content]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]" or "response.completed" in data[-1] or "incomplete" in data[-1]
    return [json.loads(each) for each in data if each != "[DONE]"]


@feature("the connection's check and its models")
async def models() -> None:
    async with (
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.get(f"{BASE_URL}/v1/models") as answer,
    ):
        listed = (await answer.json())["data"]
    assert CHAT_MODEL in [model["id"] for model in listed]


@feature("a chat with all parameters of its page, streamed with usage")
async def chat() -> None:
    system = {"role": "system", "content": "Be kind."}
    events = await post(
        "/chat/completions",
        model=CHAT_MODEL,
        messages=[system, *MESSAGES],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=1,
        stop=["zzz"],
        max_tokens=16,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repeat_penalty=1.1,
        repeat_last_n=64,
        logit_bias={"5": -10},
        reasoning_effort="low",
        mirostat=0,
        tfs_z=1,
        num_ctx=2048,
        num_keep=24,
        num_batch=512,
        think=False,
    )
    assert "".join(
        event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]
    )
    assert events[-1]["usage"]["completion_tokens"] <= 16


@feature("a conversation of several turns, continued behind a message of the assistant")
async def continued() -> None:
    said = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    events = await post(
        "/chat/completions", model=CHAT_MODEL, messages=said, stream=True, max_tokens=4
    )
    assert events


@feature("titles, tags, follow-ups and queries (not streamed)")
async def tasks() -> None:
    task = "### Task:\nGenerate a concise title.\n### Chat History:\nUSER: Who are you?"
    answer = await post(
        "/chat/completions",
        model=CHAT_MODEL,
        messages=[{"role": "user", "content": task}],
        stream=False,
        max_tokens=16,
    )
    assert answer["choices"][0]["message"]["content"]


@feature("tools (function calling: native) and their results")
async def tools() -> None:
    asked = {"model": CHAT_MODEL, "stream": True, "max_tokens": 100, "tools": [TOOL]}
    # The page leaves the choice to the model; it is required here, since this one calls nothing.
    events = await post(
        "/chat/completions", **asked, messages=MESSAGES, tool_choice="required", temperature=0
    )
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    pieces = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(p["function"].get("arguments", "") for p in pieces if p["index"] == 0)
    call = {
        "id": pieces[0]["id"],
        "index": 0,
        "type": "function",
        "function": {"name": pieces[0]["function"]["name"], "arguments": arguments},
    }
    said = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "18"},
    ]
    assert await post("/chat/completions", **asked | {"max_tokens": 8}, messages=said)


@feature("a connection with the API type Responses")
async def responses() -> None:
    part = {"type": "input_text", "text": "Who are you?"}
    events = await post(
        "/responses",
        model=CHAT_MODEL,
        stream=True,
        input=[{"type": "message", "role": "user", "content": [part]}],
        instructions="Be kind.",
        max_output_tokens=16,
        temperature=0.7,
        top_p=0.9,
        store=False,
    )
    assert [event for event in events if event["type"] == "response.output_text.delta"]


@feature("embeddings of documents (engine: OpenAI)")
async def embeddings() -> None:
    answer = await post("/embeddings", model=EMBEDDING_MODEL, input=["a cat", "the dog"])
    assert [len(each["embedding"]) for each in answer["data"]] == [32, 32]


@feature("reranking (engine: external, the URL ends in /v1/rerank)")
async def rerank() -> None:
    texts = ["the dog", "a cat sat on the mat"]
    answer = await post(
        "/rerank", model=RERANK_MODEL, query="a cat", documents=texts, top_n=len(texts)
    )
    ordered = sorted(answer["results"], key=lambda each: each["index"])
    assert all(isinstance(each["relevance_score"], float) for each in ordered)


@feature("direct connections from the browser", partly="if `cors_origins` names the page's origin")
async def browser() -> None:
    asked = {
        "Origin": "https://chats.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with (
        aiohttp.ClientSession(headers=asked) as session,
        session.options(f"{BASE_URL}/v1/chat/completions") as answer,
    ):
        assert answer.headers["Access-Control-Allow-Origin"] == "https://chats.example"
        assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()


@feature("images in a chat", refused="this model reads text only")
async def images() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    content = [{"type": "text", "text": "What is this?"}, picture]
    await post(
        "/chat/completions", model=CHAT_MODEL, messages=[{"role": "user", "content": content}]
    )


@feature(
    "speech and transcriptions (engine: OpenAI)",
    refused="404",
    because="there are no such paths: no models of sound are served",
)
async def speech() -> None:
    await post("/audio/speech", model="tts-1", input="Hello", voice="alloy")


report("open-webui", version="0.12.4")
