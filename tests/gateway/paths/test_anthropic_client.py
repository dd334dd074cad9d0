"""The `anthropic` client, unmodified, against a real gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import pytest
import pytest_asyncio

from catenary_services.security.keys import add_key
from generation_harness import TextStage
from shared_helpers.encoder_agent import all_paths_stage

ASKED = {
    "model": "tiny",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hi"}],
}

THINKING = {"type": "enabled", "budget_tokens": 1024}


def client_of(stage: TextStage, key: str = "any") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=stage.http, api_key=key, max_retries=0, timeout=30.0)


@pytest_asyncio.fixture(loop_scope="module")
async def asking(running: TextStage) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(running) as opened:
        yield opened


async def test_a_message_is_answered(asking: anthropic.AsyncAnthropic) -> None:
    found = await asking.messages.create(**ASKED, system="be", extra_body={"temperature": 0.5})
    assert [block.text for block in found.content] == ["Hello!"]
    assert (found.role, found.model, found.stop_reason) == ("assistant", "tiny", "end_turn")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (33, 7)
    assert found._request_id
    counted = await asking.messages.count_tokens(
        model="tiny", system="be", messages=ASKED["messages"]
    )
    assert counted.input_tokens == 33


async def test_a_stream_is_put_together(asking: anthropic.AsyncAnthropic) -> None:
    async with asking.messages.stream(**ASKED, stop_sequences=["lo"]) as stream:
        assert "".join([text async for text in stream.text_stream]) == "Hel"
        final = await stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "lo")
    assert final.usage.output_tokens > 2
    events = [event.type async for event in await asking.messages.create(**ASKED, stream=True)]
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"


async def test_errors_are_typed(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    mine = add_key(keys, "mine", ["infer:tiny"], {"requests_per_s": 0.001, "burst": 4})
    async with all_paths_stage(tmp_path, api_keys_file=keys) as stage:
        async with client_of(stage, "wrong") as nobody:
            with pytest.raises(anthropic.AuthenticationError):
                await nobody.messages.create(**ASKED)
        async with client_of(stage, mine) as client:
            with pytest.raises(anthropic.PermissionDeniedError):
                await client.messages.create(**(ASKED | {"model": "sentences"}))
            with pytest.raises(anthropic.BadRequestError, match="max_tokens: "):
                await client.messages.create(**(ASKED | {"max_tokens": 0}))
            with pytest.raises(anthropic.BadRequestError, match="thinking: "):
                await client.messages.create(**ASKED, thinking=THINKING)
            await client.messages.create(**ASKED)
            with pytest.raises(anthropic.RateLimitError):
                await client.messages.create(**ASKED)


async def test_models_are_listed_as_its_types_have_them(
    asking: anthropic.AsyncAnthropic,
) -> None:
    listed = [model async for model in asking.models.list()]
    assert {model.id for model in listed} >= {"tiny", "sentences"}
    for model in listed:
        assert (model.type, model.display_name, model.lifecycle) == ("model", model.id, "active")
        assert model.max_input_tokens is not None
        assert await asking.models.retrieve(model.id) == model
    with pytest.raises(anthropic.NotFoundError):
        await asking.models.retrieve("nobody")
