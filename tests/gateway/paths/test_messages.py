"""`/v1/messages` in Anthropic's form: as its client sends it, and what that client parses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.security.keys import add_key
from gateway_harness import Down
from generation_harness import Session, TextStage
from shared_helpers.encoder_agent import all_paths_stage

ASKED = {
    "model": "tiny",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hi"}],
}
HEADERS = {"x-api-key": "any", "anthropic-version": "2023-06-01"}


async def ask(
    stage: TextStage, path: str = "/v1/messages", key: str = "any", **body: object
) -> tuple[int, dict[str, Any], dict[str, str]]:
    async with (
        aiohttp.ClientSession(headers=HEADERS | {"x-api-key": key}) as session,
        session.post(f"{stage.http}{path}", json=body) as answer,
    ):
        return answer.status, await answer.json(), dict(answer.headers)


async def events_of(answer: aiohttp.ClientResponse) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream, each with its name."""
    events = []
    for block in (await answer.text()).strip().split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def asked_of(stage: TextStage) -> str:
    got = stage.agent.frames[-1].session_rows[0].opening.token_ids
    return "".join(chr(token - 3) if token > 2 else "|" for token in got)


async def test_a_conversation_is_answered(running: TextStage) -> None:
    status, answer, headers = await ask(
        running,
        **ASKED,
        system=[{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
        temperature=0,
        top_k=3,
        metadata={"user_id": "me"},
    )
    assert status == 200
    assert answer == {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 33,
            "output_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }
    assert answer["id"].startswith("msg_")
    assert headers["request-id"]
    assert asked_of(running) == "|system\nbe|\n|user\nhi|\n|assistant\n"
    sampling = running.agent.frames[-1].session_rows[0].opening.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (50, 0, 3)


async def test_messages_of_one_role_in_a_row_are_one_turn(running: TextStage) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    await ask(running, **(ASKED | {"messages": turns}))
    assert asked_of(running) == "|user\na\nb\nc|\n|assistant\nd|\n|user\ne|\n|assistant\n"


async def test_a_stream_has_the_events_of_the_api_in_their_order(running: TextStage) -> None:
    async with (
        aiohttp.ClientSession(headers=HEADERS) as session,
        session.post(f"{running.http}/v1/messages", json=ASKED | {"stream": True}) as answer,
    ):
        assert answer.headers["Content-Type"] == "text/event-stream"
        events = await events_of(answer)
    assert all(name == event["type"] for name, event in events)
    kinds = [name for name, _ in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == (
        [],
        None,
        21,
    )
    deltas = [event["delta"] for name, event in events if name == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == "Hello!"
    end = events[-2][1]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == {"output_tokens": 7}


@pytest.mark.parametrize(
    ("asked", "text", "reason", "sequence"),
    [
        ({"stop_sequences": ["zz", "lo"]}, "Hel", "stop_sequence", "lo"),
        ({"max_tokens": 3}, "Hel", "max_tokens", None),
    ],
)
async def test_the_reason_of_an_end_is_told(
    running: TextStage, asked: dict[str, object], text: str, reason: str, sequence: str | None
) -> None:
    _, answer, _ = await ask(running, **(ASKED | asked))
    assert answer["content"][0]["text"] == text
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


async def test_an_error_behind_the_first_token_is_an_event(running: TextStage) -> None:
    running.agent.script = None
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        url = f"{running.http}/v1/messages"
        asking = asyncio.create_task(session.post(url, json=ASKED | {"stream": True}))
        generating: Session = await running.agent.session()
        await generating.say("a")
        async with await asking as answer:
            failure = common_pb2.Failure(reason="PARTITION_LOST", message="gone")
            asked = generating.opening.request_id
            rejected = scheduler_pb2.RejectRequest(request_id=asked, failure=failure)
            running.scheduler.send(Down(reject=rejected))
            name, error = (await events_of(answer))[-1]
    assert name == "error"
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}


async def test_tokens_are_counted_without_an_answer(running: TextStage) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    status, answer, _ = await ask(running, "/v1/messages/count_tokens", **asked)
    assert (status, answer) == (200, {"input_tokens": 21})
    assert not running.agent.frames
    status, answer, _ = await ask(
        running, "/v1/messages/count_tokens", **(asked | {"model": "sentences"})
    )
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_keys_come_in_a_header_of_their_own_and_errors_in_anthropics_form(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.json"
    mine = add_key(keys, "mine", ["infer:tiny"], {"requests_per_s": 0.001, "burst": 3})
    async with all_paths_stage(tmp_path, api_keys_file=keys) as stage:

        async def error(key: str, **body: object) -> tuple[int, str]:
            status, answer, _ = await ask(stage, key=key, **(ASKED | body))
            assert answer["type"] == "error"
            assert isinstance(answer["error"]["message"], str)
            return status, answer["error"]["type"]

        assert await error("wrong") == (401, "authentication_error")
        assert await error(mine, model="sentences") == (403, "permission_error")
        assert await error(mine, max_tokens=None) == (400, "invalid_request_error")
        status, _, _ = await ask(stage, key=mine, **ASKED)
        assert status == 200
        assert await error(mine) == (429, "rate_limit_error")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{stage.http}/v1/messages") as answer,
        ):
            assert answer.status == 405
            assert (await answer.json())["type"] == "error"


WRONG = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 5000}),
    ("model", {"model": ""}),
    ("model", {"model": "sentences"}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 600}]}),
    ("messages[0].role", {"messages": [{"role": "system", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[1].role", {"messages": [*ASKED["messages"], {"role": "assistant", "content": "a"}]}),
    (
        "messages[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    ),
    (
        "messages[0].content[0].text",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    ),
    ("system", {"system": 5}),
    ("system[0].type", {"system": [{"type": "image"}]}),
    ("stop_sequences", {"stop_sequences": "a"}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("stream", {"stream": 1}),
    ("temperature", {"temperature": 3}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -2}),
    ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools[0].name", {"tools": [{"name": "", "input_schema": {}}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f", "input_schema": 5}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice.type", {"tool_choice": {"type": "all"}}),
    ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("mcp_servers", {"mcp_servers": [{}]}),
]


@pytest.mark.parametrize(("field", "asked"), WRONG)
async def test_what_is_wrong_or_not_offered_is_named(
    running: TextStage, field: str, asked: dict[str, object]
) -> None:
    status, answer, _ = await ask(running, **(ASKED | asked))
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(f"{field}: "), answer
    assert not running.agent.frames
