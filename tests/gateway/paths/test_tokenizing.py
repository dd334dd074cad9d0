"""`/tokenize` and `/detokenize`, for models that generate and for encoders."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from catenary_gateway.openai_http.models import tokenizing
from catenary_services.security.keys import add_key
from generation_harness import SESSION_TOKENS, TextStage
from shared_helpers.encoder_agent import MOST, SENTENCES, all_paths_stage, word_tokenizer
from small_models.tiny_tokenizer import BEGIN, END, tokens_of

SAID = [{"role": "user", "content": "hi"}]


async def ask(stage: TextStage, path: str, **body: object) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stage.http}{path}", json=body) as answer,
    ):
        return answer.status, await answer.json()


async def test_prompts_and_conversations_become_the_tokens_that_models_get(
    running: TextStage,
) -> None:
    _, prompt = await ask(running, "/tokenize", model="tiny", prompt="hi", return_token_strs=True)
    assert prompt == {
        "count": 2,
        "max_model_len": SESSION_TOKENS,
        "tokens": tokens_of("hi"),
        "token_strs": ["h", "i"],
    }
    _, chat = await ask(running, "/tokenize", model="tiny", messages=SAID)
    before = [BEGIN, *tokens_of("user\nhi"), END, *tokens_of("\n")]
    assert chat["tokens"] == [*before, BEGIN, *tokens_of("assistant\n")]
    assert chat["token_strs"] is None
    _, bare = await ask(
        running, "/tokenize", model="tiny", messages=SAID, add_generation_prompt=False
    )
    assert bare["tokens"] == before
    for special, ids in ((None, word_tokenizer().encode("cat").ids), (False, [5])):
        _, encoder = await ask(
            running, "/tokenize", model=SENTENCES, prompt="cat", add_special_tokens=special
        )
        assert (encoder["tokens"], encoder["max_model_len"]) == (ids, MOST)


async def test_tokens_become_the_text_that_they_are_of(running: TextStage) -> None:
    ids = [BEGIN, *tokens_of("héllo"), END]
    status, answer = await ask(running, "/detokenize", model="tiny", tokens=ids)
    assert (status, answer) == (200, {"prompt": "<|im_start|>héllo<|im_end|>"})
    assert await ask(running, "/detokenize", model="tiny", tokens=[]) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "param", "asked"),
    [
        ("/tokenize", "model", {"prompt": "a"}),
        ("/tokenize", "model", {"model": "toy", "prompt": "a"}),
        ("/tokenize", "prompt", {"model": "tiny"}),
        ("/tokenize", "prompt", {"model": "tiny", "prompt": "a", "messages": SAID}),
        ("/tokenize", "prompt", {"model": "tiny", "prompt": "a" * 101}),
        (
            "/tokenize",
            "messages",
            {"model": "tiny", "messages": [SAID[0] | {"content": "a" * 101}]},
        ),
        ("/tokenize", "messages", {"model": "tiny", "messages": []}),
        ("/tokenize", "messages", {"model": SENTENCES, "messages": SAID}),
        ("/tokenize", "messages[0].role", {"model": "tiny", "messages": [{"content": "a"}]}),
        (
            "/tokenize",
            "chat_template",
            {"model": "tiny", "prompt": "a", "chat_template": "{{ 1 }}"},
        ),
        (
            "/tokenize",
            "add_special_tokens",
            {"model": "tiny", "prompt": "a", "add_special_tokens": 1},
        ),
        ("/detokenize", "tokens", {"model": "tiny"}),
        ("/detokenize", "tokens", {"model": "tiny", "tokens": [100_000]}),
        ("/detokenize", "tokens[1]", {"model": "tiny", "tokens": [1, -1]}),
        ("/detokenize", "tokens[0]", {"model": "tiny", "tokens": ["a"]}),
        ("/detokenize", "tokens[0]", {"model": "tiny", "tokens": [2**40]}),
    ],
)
async def test_what_is_wrong_is_named(
    running: TextStage,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    param: str,
    asked: dict[str, object],
) -> None:
    monkeypatch.setattr(tokenizing, "MOST_CHARACTERS", 100)
    status, answer = await ask(running, path, **asked)
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_keys_and_scopes_hold(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    mine = add_key(keys, "mine", ["infer:tiny"], {"requests_per_s": 0.001, "burst": 3})
    async with (
        all_paths_stage(tmp_path, api_keys_file=keys) as stage,
        aiohttp.ClientSession() as session,
    ):

        async def status(path: str, model: str, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": model, "prompt": "a", "tokens": [5]}
            async with session.post(f"{stage.http}{path}", json=body, headers=headers) as got:
                return got.status

        assert await status("/tokenize", "tiny", "wrong") == 401
        assert await status("/tokenize", SENTENCES, mine) == 403
        assert await status("/tokenize", "tiny", mine) == 200
        assert await status("/detokenize", "tiny", mine) == 200
        assert await status("/detokenize", "tiny", mine) == 429
