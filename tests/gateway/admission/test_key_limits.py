"""What API keys may do and have, at the endpoints of a real gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

import catenary
from catenary.command_line import main as catenary_main
from catenary_gateway.admission.quotas import Quotas
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.errors import QuotaExceeded
from catenary_services.security.key_file import add_key, revoke_keys
from catenary_services.security.key_limits import KeyLimits, RateLimit
from catenary_services.security.keys import Principal
from catenaryd.commands.keys import create_key, list_keys, revoke_key
from gateway_harness import Down, Stage, stage
from generation_harness import text_stage
from shared_helpers.waiting import until

ONE = {"in_0": np.ones((1, 4), np.float32)}
SECOND = 1_000_000_000


@asynccontextmanager
async def limited(tmp_path: Path, **limits: Any) -> AsyncIterator[tuple[Stage, str]]:
    """A gateway, and a key with these limits."""
    key = add_key(tmp_path / "keys.json", "ci", ["infer"], limits)
    async with stage(tmp_path, api_keys_file=tmp_path / "keys.json") as running:
        yield running, key


def sample(running: Stage, name: str, **labels: str) -> float | None:
    return running.gateway._metrics.registry.get_sample_value(name, labels)


# Priority


@pytest.mark.parametrize(("most", "asked", "sent"), [(3, 3, 3), (3, None, 0), (-2, None, -2)])
async def test_a_priority_that_is_allowed_reaches_the_scheduler(
    tmp_path: Path, most: int, asked: int | None, sent: int
) -> None:
    async with limited(tmp_path, max_priority=most) as (running, key):
        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            await client.infer("toy", ONE, priority=asked)
        assert (await running.scheduler.hear("submit")).priority == sent


async def test_a_priority_beyond_the_keys_is_refused_at_every_endpoint(tmp_path: Path) -> None:
    async with limited(tmp_path, max_priority=3) as (running, key):
        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            with pytest.raises(catenary.PermissionDeniedError, match="max_priority is 3"):
                await client.infer("toy", ONE, priority=4)
        tensor = {"name": "in_0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
        body = {"inputs": [tensor], "parameters": {"priority": 4}}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
            session.post(f"http://{running.http}/v2/models/toy/infer", json=body) as answer,
        ):
            assert answer.status == 403
            assert "max_priority is 3" in (await answer.json())["error"]
        assert running.scheduler.heard.empty()


async def test_a_generations_priority_is_checked_and_sent(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "ci", ["infer"], {"max_priority": 2})
    async with text_stage(tmp_path, api_keys_file=tmp_path / "keys.json") as running:
        running.agent.script = say_hello
        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            await client.generate("tiny", "Hello", max_tokens=4, priority=2)
            assert (await running.scheduler.hear("submit_session")).priority == 2
            with pytest.raises(catenary.PermissionDeniedError, match="max_priority is 2"):
                await client.generate("tiny", "Hello", priority=3)
        # vLLM's field: lower is more urgent.
        asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "priority": -3}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
            session.post(f"{running.http}/v1/completions", json=asked) as answer,
        ):
            assert answer.status == 403


# Rates


async def test_requests_beyond_the_rate_are_refused_with_a_delay(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_s=0.005, burst=2) as (running, key):
        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            await client.infer("toy", ONE)
            await client.infer("toy", ONE)
            with pytest.raises(catenary.QuotaExceededError) as caught:
                await client.infer("toy", ONE)
        assert 100.0 < (caught.value.retry_after_s or 0) <= 200.0
        assert "0.005 requests per second" in caught.value.message
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(f"http://{running.http}", headers=headers) as session,
            session.post("/v2/models/toy/infer", json={}) as answer,
        ):
            assert answer.status == 429
            assert 100 < int(answer.headers["Retry-After"]) <= 200
        assert sample(running, "catenary_quota_rejections_total", key="ci") == 2
        name = "catenary_key_requests_total"
        assert sample(running, name, key="ci", outcome="QUOTA_EXCEEDED") == 2
        assert sample(running, name, key="ci", outcome="OK") == 2


async def test_a_client_with_a_retry_policy_waits_as_long_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = catenary.RetryPolicy(attempts=2)
    waits: list[float | None] = []

    def noted(*arguments: Any) -> float | None:
        waits.append(wait_s(*arguments))
        return waits[-1]

    wait_s = policy.wait_s
    monkeypatch.setattr(catenary.RetryPolicy, "wait_s", lambda _, *arguments: noted(*arguments))
    async with (
        limited(tmp_path, requests_per_s=2, burst=1) as (running, key),
        catenary.AsyncClient(running.grpc, api_key=key, retry=policy) as client,
    ):
        first = time.monotonic()
        await client.infer("toy", ONE)
        second = time.monotonic()
        await client.infer("toy", ONE)
        done = time.monotonic()
        # A request every 500 ms, less what has passed; a tenth more, so that not all come at once.
        (waited_s,) = waits
        assert waited_s is not None
        assert 0.5 - (done - first - waited_s) <= waited_s <= 0.55
        assert done - second >= waited_s


async def test_the_command_says_in_one_sentence_that_the_quota_is_used_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "one.npy", ONE["in_0"])
    async with limited(tmp_path, requests_per_s=0.005, burst=1) as (running, key):
        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            await client.infer("toy", ONE)
        arguments = [
            "infer",
            "toy",
            "--input",
            f"in_0={tmp_path / 'one.npy'}",
            "--target",
            running.grpc,
            "--api-key",
            key,
        ]
        monkeypatch.setattr("sys.argv", ["catenary", *arguments])
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(catenary_main)
    assert ended.value.code == 1
    lines = capfd.readouterr().err.splitlines()
    (heard,) = [line for line in lines if "goaway" not in line]  # gRPC's own log
    assert "quota" in heard
    assert "try again in" in heard


async def test_every_gateway_gives_its_part_of_a_rate(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_s=0.005, burst=8) as (running, key):
        running.scheduler.send(
            Down(directory=scheduler_pb2.Directory(peers=running.scheduler.peers, gateways=4))
        )
        await until(lambda: running.gateway._authorizer.quotas.gateways == 4)
        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            await client.infer("toy", ONE)
            await client.infer("toy", ONE)
            with pytest.raises(catenary.QuotaExceededError) as caught:
                await client.infer("toy", ONE)
        assert 700.0 < (caught.value.retry_after_s or 0) <= 800.0


async def say_hello(session: Any) -> None:
    await session.say("Hi!", finish="stop")


async def test_tokens_are_reserved_at_the_beginning_and_given_back_at_the_end(
    tmp_path: Path,
) -> None:
    key = add_key(
        tmp_path / "keys.json", "ci", ["infer"], {"tokens_per_s": 0.001, "token_burst": 100}
    )
    async with text_stage(tmp_path, api_keys_file=tmp_path / "keys.json") as running:
        running.agent.script = say_hello
        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            first = await client.generate("tiny", "Hello", max_tokens=80)
            await running.agent.session()
            assert first.usage is not None
            used = first.usage.prompt_tokens + first.usage.completion_tokens
            left = running.gateway._authorizer.quotas._tokens["ci"].level(time.monotonic_ns())
            assert left == pytest.approx(100 - used, abs=0.1)
            with pytest.raises(catenary.QuotaExceededError, match="tokens per second"):
                await client.generate("tiny", "Hello", max_tokens=99)
            running.agent.script = None
            call = asyncio.ensure_future(client.generate("tiny", "Hello", max_tokens=20))
            await running.agent.session()
            held = running.gateway._authorizer.quotas._tokens["ci"].level(time.monotonic_ns())
            assert held < left - 20
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await running.scheduler.hear("cancel")
        level = running.gateway._authorizer.quotas._tokens["ci"].level
        assert level(time.monotonic_ns()) == pytest.approx(left, abs=0.1)


# Keys that come and go


async def test_a_revoked_key_is_refused_on_streams_it_opened_before(tmp_path: Path) -> None:
    async with limited(tmp_path) as (running, key):
        revoked = asyncio.Event()

        async def requests() -> AsyncIterator[catenary.InferRequest]:
            yield catenary.InferRequest("toy", ONE)
            await revoked.wait()
            yield catenary.InferRequest("toy", ONE)

        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            answers = aiter(client.infer_stream(requests()))
            assert (await anext(answers)).error is None
            revoke_keys(tmp_path / "keys.json", "ci")
            running.gateway._keys.refresh()
            revoked.set()
            assert isinstance((await anext(answers)).error, catenary.UnauthenticatedError)


async def test_the_gateway_takes_up_a_changed_file_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catenary_gateway.admission.authorizer.POLL_S", 0.02)
    async with limited(tmp_path) as (running, key):
        fresh = add_key(tmp_path / "keys.json", "fresh", ["infer"])
        await until(lambda: "fresh" in running.gateway._keys.names)
        async with catenary.AsyncClient(running.grpc, api_key=fresh) as client:
            await client.infer("toy", ONE)
        revoke_keys(tmp_path / "keys.json", "ci")
        await until(lambda: "ci" not in running.gateway._keys.names)
        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            with pytest.raises(catenary.UnauthenticatedError):
                await client.infer("toy", ONE)


# Overload


async def test_what_cannot_be_answered_in_time_is_refused_at_once(tmp_path: Path) -> None:
    async with limited(tmp_path) as (running, key):
        running.agent.hold = True
        async with catenary.AsyncClient(running.grpc, api_key=key) as client:
            first = asyncio.ensure_future(client.infer("toy", ONE))
            await asyncio.wait_for(running.agent.arrived.wait(), 30)
            (limiter,) = running.gateway._authorizer.fair._limiters.values()
            limiter.limit.value = 1.0
            async with asyncio.timeout(30):  # long before its own deadline
                with pytest.raises(catenary.OverloadedError) as caught:
                    await client.infer("toy", ONE, slo_ms=3_600_000)
            assert (caught.value.retry_after_s or 0) >= 0.1
            headers = {"Authorization": f"Bearer {key}"}
            async with (
                aiohttp.ClientSession(f"http://{running.http}", headers=headers) as session,
                session.post("/v2/models/toy/infer", data=b"never looked at") as answer,
            ):
                assert answer.status == 503
                assert int(answer.headers["Retry-After"]) >= 1
            running.agent.answer(*running.agent.held[0])
            await first
            assert limiter.unanswered == 0
            running.agent.hold = False
            await client.infer("toy", ONE)


# Without a gateway


def test_overlapping_keys_share_a_quota_and_other_keys_do_not() -> None:
    now = 0
    quotas = Quotas(lambda: now)
    limits = KeyLimits(requests=RateLimit(1.0, 2.0))
    old, new = (Principal("ci", frozenset(scopes), limits) for scopes in (["a"], ["b"]))
    quotas.enter(old)
    quotas.enter(new)
    with pytest.raises(QuotaExceeded):
        quotas.enter(old)
    quotas.enter(Principal("other", frozenset(), limits))
    now = SECOND
    quotas.enter(new)


def test_buckets_of_keys_that_are_gone_are_dropped() -> None:
    quotas = Quotas(lambda: 0)
    limits = KeyLimits(requests=RateLimit(1.0, 1.0), tokens=RateLimit(1.0, 10.0))
    quotas.enter(Principal("gone", frozenset(), limits))
    quotas.reserve(Principal("gone", frozenset(), limits), 5).settle(1)
    quotas.forget_others(frozenset({"here"}))
    assert not quotas._requests
    assert not quotas._tokens


def test_a_reservation_is_settled_once() -> None:
    quotas = Quotas(lambda: 0)
    key = Principal("ci", frozenset(), KeyLimits(tokens=RateLimit(1.0, 100.0)))
    reserved = quotas.reserve(key, 60)
    reserved.settle(10)
    reserved.settle(0)
    assert quotas._tokens["ci"].level(0) == 90


def test_the_files_entry_of_a_key_is_what_the_command_was_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "keys.json")
    create_key.main(
        [
            "ci",
            "--keys-file",
            file,
            "--scope",
            "view",
            "--max-priority",
            "4",
            "--requests-per-s",
            "2.5",
            "--burst",
            "5",
            "--tokens-per-s",
            "100",
            "--token-burst",
            "400",
            "--share",
            "3",
            "--expires",
            "2100-01-01T00:00:00Z",
            "--json",
        ],
        standalone_mode=False,
    )
    assert json.loads(capsys.readouterr().out)["key"].startswith("ctn_")
    (entry,) = json.loads(Path(file).read_text())["keys"]
    del entry["sha256"]
    assert entry == {
        "name": "ci",
        "scopes": ["view"],
        "max_priority": 4,
        "requests_per_s": 2.5,
        "burst": 5,
        "tokens_per_s": 100.0,
        "token_burst": 400,
        "share": 3.0,
        "expires": "2100-01-01T00:00:00Z",
    }
    list_keys.main(["--keys-file", file], standalone_mode=False)
    assert "share=3.0" in capsys.readouterr().out
    revoke_key.main(["ci", "--keys-file", file], standalone_mode=False)
    assert capsys.readouterr().out == "1 revoked\n"
