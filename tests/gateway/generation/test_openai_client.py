"""The `openai` client, unmodified, against a real gateway; and what it does not look at, raw."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import openai
import pytest

from catenary_gateway.openai_http.calls import event_streams
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.security.keys import add_key
from gateway_harness import Down
from generation_harness import Session, TextStage, answering, generating, text_stage
from small_models.tiny_tokenizer import END, tokens_of

SAID = [{"role": "user", "content": "hi"}]
ASKED = {"model": "tiny", "messages": SAID}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[TextStage]:
    async with text_stage(tmp_path) as started:
        started.agent.script = answering
        yield started


def client_of(stage: TextStage, **facts: object) -> openai.AsyncOpenAI:
    known: dict[str, object] = {"api_key": "any", "max_retries": 0, "timeout": 10.0}
    return openai.AsyncOpenAI(base_url=f"{stage.http}/v1", **(known | facts))


def rejection(reason: str, retry_after_s: int = 0) -> object:
    """A script by which the scheduler refuses every session."""

    def script(submit: scheduler_pb2.SubmitSession) -> list[Down]:
        failure = common_pb2.Failure(reason=reason, message=f"says {reason}")
        return [
            Down(
                reject=scheduler_pb2.RejectRequest(
                    request_id=submit.request_id,
                    failure=failure,
                    retry_after_ns=retry_after_s * 10**9,
                )
            )
        ]

    return script


async def test_models_are_listed_and_told(running: TextStage) -> None:
    async with client_of(running) as client:
        listed = await client.models.list()
        assert [(model.id, model.owned_by) for model in listed.data] == [("tiny", "catenary")]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        for unknown in ("gpt-4", "toy"):
            with pytest.raises(openai.NotFoundError) as raised:
                await client.models.retrieve(unknown)
            assert raised.value.code == "model_not_found"


async def test_a_model_is_asked_with_an_adapter_by_either_name(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "good", ["infer:tiny"])
    asked: list[str] = []

    async def noting(session: Session) -> None:
        asked.append(session.opening.adapter)
        await answering(session)

    models = [generating(adapters=["terse", "slow"])]
    async with text_stage(tmp_path, models=models, api_keys_file=keys) as stage:
        stage.agent.script = noting
        async with client_of(stage, api_key=key) as client:
            ids = [model.id for model in (await client.models.list()).data]
            assert ids == ["tiny", "tiny:terse", "tiny:slow"]
            for name in ("tiny:terse", "slow", "tiny"):
                answer = await client.chat.completions.create(model=name, messages=SAID)
                assert (answer.model, answer.choices[0].message.content) == (name, "Hello!")
                assert (await client.models.retrieve(name)).id == name
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="tiny:rhyming", messages=SAID)
        assert asked == ["terse", "slow", ""]


async def test_chat_and_completion_answer_whole(running: TextStage) -> None:
    async with client_of(running) as client:
        chat = await client.chat.completions.create(**ASKED)
        (choice,) = chat.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")
        assert (choice.finish_reason, chat.model, chat.object) == (
            "stop",
            "tiny",
            "chat.completion",
        )
        assert chat.id.startswith("chatcmpl-")
        assert chat.usage is not None
        assert (chat.usage.completion_tokens, chat.usage.total_tokens) == (7, 28)
        for prompt in ("ab", ["ab"], tokens_of("ab"), [tokens_of("ab")]):
            answer = await client.completions.create(model="tiny:1", prompt=prompt)
            assert answer.choices[0].text == "Hello!"
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == 2
            opening = running.agent.frames[-1].session_rows[0].opening
            assert list(opening.token_ids) == tokens_of("ab")
            assert opening.sampling.max_tokens == 16


async def test_chat_and_completion_stream(running: TextStage) -> None:
    async with client_of(running) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                **ASKED, stream=True, stream_options={"include_usage": True}
            )
        ]
        first, *middle, usage = chunks
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        assert "".join(c.choices[0].delta.content or "" for c in middle) == "Hello!"
        assert [c.choices[0].finish_reason for c in middle][-1] == "stop"
        assert all(c.choices[0].delta.role is None for c in middle)
        assert usage.choices == []
        assert usage.usage is not None
        assert usage.usage.completion_tokens == 7
        assert len({chunk.id for chunk in chunks}) == 1
        parts = [
            chunk
            async for chunk in await client.completions.create(
                model="tiny",
                prompt="x",
                stream=True,
                stream_options={"include_usage": False, "continuous_usage_stats": True},
            )
        ]
        assert "".join(part.choices[0].text for part in parts) == "Hello!"
        assert parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == 7


def test_the_plain_client_streams_and_answers(tmp_path: Path) -> None:
    def ask(url: str) -> tuple[str, str, int]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            whole = client.chat.completions.create(**ASKED)
            stream = client.chat.completions.create(**ASKED, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content or "", streamed, len(client.models.list().data)

    async def run() -> tuple[str, str, int]:
        async with text_stage(tmp_path) as stage:
            stage.agent.script = answering
            return await asyncio.to_thread(ask, stage.http)

    assert asyncio.run(run()) == ("Hello!", "Hello!", 1)


async def test_parameters_reach_the_agent(running: TextStage) -> None:
    async with client_of(running) as client:

        async def sampling(**asked: object):
            await client.chat.completions.create(**(ASKED | asked))
            return running.agent.frames[-1].session_rows[0].opening.sampling

        usual = await sampling()
        assert (usual.temperature, usual.top_p, usual.top_k) == (1.0, 1.0, 0)
        assert usual.max_tokens == 512 - 21, "a chat may go on as long as there is room"
        got = await sampling(
            max_completion_tokens=9,
            max_tokens=5,
            temperature=0,
            top_p=0.5,
            seed=-1,
            presence_penalty=1,
            frequency_penalty=-1,
            logit_bias={"7": -100, "0": 1.5},
            extra_body={
                "top_k": 3,
                "min_p": 0.25,
                "min_tokens": 2,
                "ignore_eos": True,
                "repetition_penalty": 1.5,
                "something_else": {"x": 1},
            },
        )
        assert (got.max_tokens, got.min_tokens, got.temperature, got.top_p) == (9, 2, 0, 0.5)
        assert (got.top_k, got.repetition_penalty, got.ignore_eos) == (3, 1.5, True)
        assert (got.presence_penalty, got.frequency_penalty) == (1, -1)
        assert got.min_p == 0.25
        assert [(each.token_id, each.bias) for each in got.logit_bias] == [(7, -100), (0, 1.5)]
        assert got.seed == 2**64 - 1
        assert (await sampling(extra_body={"top_k": -1})).top_k == 0


async def test_messages_may_be_parts_and_developers_are_systems(running: TextStage) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    async with client_of(running) as client:
        await client.chat.completions.create(model="tiny", messages=said)
    got = running.agent.frames[-1].session_rows[0].opening.token_ids
    text = "".join(chr(token - 3) if token > 2 else "|" for token in got)
    assert text == "|system\nbe|\n|user\na\nb|\n|assistant\n"


@pytest.mark.parametrize("stop", ["lo", ["xx", "lo", "yy", "zz"]])
async def test_stop_texts_end_an_answer(running: TextStage, stop: object) -> None:
    async with client_of(running) as client:
        chat = await client.chat.completions.create(**ASKED, stop=stop)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("Hel", "stop")
        stream = await client.chat.completions.create(**ASKED, stop=stop, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Hel"


WRONG = [
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("logprobs", {"logprobs": 1}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("prompt_logprobs", {"stream": True, "extra_body": {"prompt_logprobs": 1}}),
    ("stop_token_ids", {"extra_body": {"stop_token_ids": [259]}}),
    ("stop_token_ids", {"extra_body": {"stop_token_ids": ["a"]}}),
    ("allowed_token_ids", {"extra_body": {"allowed_token_ids": []}}),
    ("bad_words", {"extra_body": {"bad_words": [" "]}}),
    ("bad_words", {"extra_body": {"bad_words": ["a"] * 129}}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("logit_bias", {"logit_bias": {"1": 200}}),
    ("logit_bias", {"logit_bias": {"259": 2}}),
    ("min_p", {"extra_body": {"min_p": 1.5}}),
    ("modalities", {"modalities": ["audio"]}),
    ("temperature", {"temperature": 3}),
    ("temperature", {"temperature": "warm"}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"extra_body": {"top_k": -2}}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": -1}),
    ("min_tokens", {"max_tokens": 2, "extra_body": {"min_tokens": 3}}),
    ("seed", {"seed": 1.5}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": {"a": 1}}),
    ("stream", {"extra_body": {"stream": "yes"}}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("ignore_eos", {"extra_body": {"ignore_eos": 1}}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("repetition_penalty", {"extra_body": {"repetition_penalty": 0}}),
    ("priority", {"extra_body": {"priority": 2**31}}),
    ("messages", {"messages": []}),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    (
        "messages[0].content[0].type",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x"}}],
                }
            ]
        },
    ),
    (
        "messages[0].tool_calls[0].function",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
    ),
    ("chat_template_kwargs", {"extra_body": {"chat_template_kwargs": {"messages": []}}}),
    ("x-slo-ttft-ms", {"extra_headers": {"x-slo-ttft-ms": "fast"}}),
    ("x-deadline-ms", {"extra_headers": {"x-deadline-ms": "-1"}}),
]


async def test_what_cannot_be_honoured_is_refused_by_name(running: TextStage) -> None:
    async with client_of(running) as client:
        for param, asked in WRONG:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.chat.completions.create(**(ASKED | asked))
            error = raised.value
            assert (error.param, error.type) == (param, "invalid_request_error"), asked
        for param, asked in [
            ("echo", {"echo": 1}),
            ("suffix", {"suffix": "x"}),
            ("logprobs", {"logprobs": 6}),
            ("logprobs", {"logprobs": True}),
            ("best_of", {"n": 3, "best_of": 2}),
            ("best_of", {"best_of": 2, "stream": True}),
            ("best_of", {"prompt": ["a", "b"], "best_of": 65}),
            ("prompt", {"prompt": ["a"] * 65, "n": 2}),
            ("prompt", {"prompt": ["a", ""]}),
            ("prompt", {"prompt": ["a", 1]}),
            ("prompt", {"prompt": ""}),
            ("prompt", {"prompt": [1, 1000]}),
            ("prompt", {"prompt": [1, "a"]}),
            ("prompt", {"prompt": [[1], []]}),
            ("model", {"model": "toy"}),
        ]:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.completions.create(**({"model": "tiny", "prompt": "a"} | asked))
            assert raised.value.param == param, asked
        assert not running.agent.frames


async def test_harmless_forms_of_what_is_not_offered_are_ignored(running: TextStage) -> None:
    async with client_of(running) as client:
        answer = await client.chat.completions.create(
            **ASKED,
            n=1,
            logprobs=False,
            tools=[],
            tool_choice="none",
            user="me",
            response_format={"type": "text"},
            modalities=["text"],
            logit_bias={},
            metadata={"a": "b"},
            store=False,
            parallel_tool_calls=False,
        )
        assert answer.choices[0].message.content == "Hello!"


async def test_errors_are_typed(running: TextStage, tmp_path: Path) -> None:
    async with client_of(running) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4", messages=SAID)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        for asked in (
            {"messages": [{"role": "user", "content": "a" * 600}]},
            {"max_tokens": 500},
            {"messages": [{"role": "user", "content": "a" * 90_000}]},
        ):
            with pytest.raises(openai.BadRequestError) as too_long:
                await client.chat.completions.create(**(ASKED | asked))
            assert too_long.value.code == "context_length_exceeded"
        for stream in (False, True):
            running.scheduler.session_script = rejection("OVERLOADED", 3)
            with pytest.raises(openai.InternalServerError) as full:
                await client.chat.completions.create(**ASKED, stream=stream)
            assert full.value.status_code == 503
            assert full.value.response.headers["Retry-After"] == "3"
            assert (full.value.code, full.value.type) == ("overloaded", "server_error")
            running.scheduler.session_script = rejection("QUOTA_EXCEEDED")
            with pytest.raises(openai.RateLimitError) as quota:
                await client.chat.completions.create(**ASKED, stream=stream)
            assert quota.value.status_code == 429
            assert "Retry-After" in quota.value.response.headers
        running.scheduler.session_script = lambda _: []
        with pytest.raises(openai.APIStatusError) as late:
            await client.chat.completions.create(**ASKED, extra_headers={"x-deadline-ms": "80"})
        assert late.value.status_code == 504
        assert (await running.scheduler.hear("cancel")).request_id > 0


async def test_keys_are_checked(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    good, other = add_key(keys, "good", ["infer:tiny"]), add_key(keys, "other", ["infer:toy"])
    async with text_stage(tmp_path, api_keys_file=keys) as stage:
        stage.agent.script = answering
        async with client_of(stage, api_key=good) as client:
            assert (await client.chat.completions.create(**ASKED)).choices
        async with client_of(stage, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(**ASKED)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(stage, api_key=other) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.chat.completions.create(**ASKED)


async def test_a_stream_goes_on_over_a_restart(tmp_path: Path) -> None:
    async with text_stage(tmp_path, agents=2) as stage, client_of(stage) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASKED, stream=True))
        old = await stage.agents[0].session()
        await old.say("One, ")
        stream = await asking
        got = ""
        async for chunk in stream:
            got += chunk.choices[0].delta.content or ""
            if got == "One, ":
                break
        stage.scheduler.send(stage.scheduler.start_session(1, "agent-1"))
        new = await stage.agents[1].session()
        await old.say("wrong")
        await new.say("two.", finish="stop")
        async for chunk in stream:
            got += chunk.choices[0].delta.content or ""
        assert got == "One, two."


async def test_an_error_behind_the_first_token_is_an_event(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, aiohttp.ClientSession() as session:
        url = f"{stage.http}/v1/chat/completions"
        asking = asyncio.create_task(session.post(url, json=ASKED | {"stream": True}))
        generating_session = await stage.agent.session()
        await generating_session.say("a")
        async with await asking as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            stage.scheduler.send(
                *rejection("PARTITION_LOST")(scheduler_pb2.SubmitSession(request_id=1))
            )
            lines = [line async for line in answer.content if line.strip()]
        assert lines[-1] == b"data: [DONE]\n"
        error = json.loads(lines[-2].removeprefix(b"data: "))["error"]
        assert (error["code"], error["type"]) == ("partition_lost", "server_error")
        # The unmodified client raises it.
        async with client_of(stage) as client:
            waiting = asyncio.create_task(client.chat.completions.create(**ASKED, stream=True))
            again = await stage.agent.session()
            await again.say("a")
            stream = await waiting
            stage.scheduler.send(
                *rejection("PARTITION_LOST")(scheduler_pb2.SubmitSession(request_id=2))
            )
            with pytest.raises(openai.APIError, match="says PARTITION_LOST"):
                async for _ in stream:
                    pass


async def test_ids_and_objectives_travel_in_headers(running: TextStage) -> None:
    async with client_of(running) as client:
        raw = await client.chat.completions.with_raw_response.create(
            **ASKED, extra_headers={"X-Request-Id": "mine", "x-slo-ttft-ms": "0.000001"}
        )
        assert raw.headers["X-Request-Id"] == "mine"
        assert raw.parse().id == "chatcmpl-mine"
        await client.chat.completions.create(
            **ASKED, extra_headers={"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "60000"}
        )
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(
                **ASKED, n=0, extra_headers={"X-Request-Id": "wrong"}
            )
        assert raised.value.request_id == "wrong"
    await running.is_empty()
    found = running.gateway._plane.request_metrics.recent.find("chatcmpl-mine")
    assert found is not None
    assert found.id == "mine"
    metrics = running.gateway._metrics
    met = {
        sample.labels["met"]: sample.value
        for metric in metrics.slo_requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    assert met == {"false": 1, "true": 1}, "the first wanted its first token within a nanosecond"


async def test_what_is_generated_is_counted(running: TextStage) -> None:
    async with client_of(running) as client:
        await client.chat.completions.create(**ASKED)
    await running.is_empty()
    registry = running.gateway._metrics.registry

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "tiny:1", **labels})

    assert value("catenary_prompt_tokens_total") == 21
    assert value("catenary_generation_tokens_total") == 7
    assert value("catenary_generations_total", finished_reason="stop") == 1
    assert value("catenary_inter_token_latency_seconds_count") == 6
    labels = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "catenary",
        "gen_ai_request_model": "tiny:1",
    }
    for name in ("time_to_first_token", "time_per_output_token"):
        assert registry.get_sample_value(f"gen_ai_server_{name}_seconds_count", labels) == 1
    labels["error_type"] = ""
    assert registry.get_sample_value("gen_ai_server_request_duration_seconds_count", labels) == 1
    assert registry.get_sample_value("catenary_sessions_running") == 0


async def test_a_client_that_disconnects_cancels_its_answer(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, client_of(stage) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASKED, stream=True))
        session = await stage.agent.session()
        await session.say("a")
        stream = await asking
        await stream.close()
        assert (await stage.scheduler.hear("cancel")).request_id == 1
        await stage.is_empty()
        # So does one that waits for the whole answer.
        waiting = asyncio.create_task(client.chat.completions.create(**ASKED))
        await stage.agent.session()
        waiting.cancel()
        assert (await stage.scheduler.hear("cancel")).request_id == 2


async def test_a_client_that_reads_nothing_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "READ_GRACE_S", 0.2)
    tokens = 1_000

    async def babbling(session: Session) -> None:
        for _ in range(tokens):
            await session.send(tokens_of("b")[0])
            for _ in range(5):  # so that each makes a chunk of its own
                await asyncio.sleep(0)

    models = [generating(session_tokens=tokens + 100)]
    async with text_stage(tmp_path, models=models) as stage:
        stage.agent.script = babbling
        body = json.dumps(ASKED | {"stream": True}).encode()
        for (
            listening
        ) in stage.gateway._http._listener._sockets:  # what the kernel holds must not be the answer
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(silent, ("127.0.0.1", stage.gateway.http_port))
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                f"X-Request-Id: {'i' * 256}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            await loop.sock_sendall(silent, head.encode() + body)
            assert (await stage.scheduler.hear("cancel")).request_id == 1
            await stage.is_empty()
            got = b""
            async with asyncio.timeout(30):
                with suppress(ConnectionResetError):
                    while more := await loop.sock_recv(silent, 65536):
                        got += more
            assert b"data: " in got
            assert b"[DONE]" not in got


HALF_CHARACTER = json.dumps(
    {"model": "tiny", "prompt": "\ud800", "messages": [{"role": "user", "content": "\udc00"}]}
).encode()


async def test_bodies_that_make_no_sense_are_refused(running: TextStage) -> None:
    async with aiohttp.ClientSession() as session:
        for body, status in (
            (b"", 400),
            (b"[]", 400),
            (b"{", 400),
            (b"[" * 100_000, 400),
            (b'{"model": 5}', 400),
            (HALF_CHARACTER, 400),
            (json.dumps(ASKED | {"prompt": "a", "stop": "\ud800"}).encode(), 400),
        ):
            for path in ("chat/completions", "completions"):
                async with session.post(f"{running.http}/v1/{path}", data=body) as answer:
                    assert answer.status == status
                    document = await answer.json()
                    assert document["error"]["type"] == "invalid_request_error"


async def test_end_tokens_are_never_text(tmp_path: Path) -> None:
    async def both(session: Session) -> None:
        await session.say("a")
        await session.send(END)
        await session.say("b", finish="length")

    async with text_stage(tmp_path) as stage, client_of(stage) as client:
        stage.agent.script = both
        answer = await client.chat.completions.create(**ASKED, extra_body={"ignore_eos": True})
        assert answer.choices[0].message.content == "ab"
