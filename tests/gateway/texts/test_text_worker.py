"""The process of a model's templates: ended, replaced, left alone, and never in others' way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from catenary_gateway.generation.text.text_codec import RenderedPrompt, TextCodecs
from catenary_gateway.generation.text.text_worker import USUAL_LIMITS, delay_s
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import CatenaryError, InvalidInput, NoActivePlan
from catenary_services.jail.orders import JailLimit, JailProtection
from catenary_services.jail.protections import offered
from shared_helpers.waiting import until
from small_models.tiny_tokenizer import text_model, tokens_of

pytestmark = pytest.mark.timeout(300)

KEY = ModelKey("tiny", "1")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% set said = messages[0].content %}{% if said == 'spin' %}" + ENDLESS + "{% endif %}"
    "{{ said * (1000 if said == 'much' else 1) }}"
)


@pytest.fixture
async def codecs(tmp_path: Path) -> AsyncIterator[TextCodecs]:
    text_model(tmp_path, template=TEMPLATE)
    made = TextCodecs(tmp_path)
    try:
        yield made
    finally:
        await made.close()


async def ask(codecs: TextCodecs, said: str = "hi") -> RenderedPrompt:
    codec = await codecs.of(KEY)
    asked = [{"role": "user", "content": said}]
    return await codec.render(asked, {}, most_characters=10_000_000)


async def failure(codecs: TextCodecs, said: str) -> CatenaryError:
    with pytest.raises(NoActivePlan, match="tiny:1") as caught:
        await ask(codecs, said)
    return caught.value


def pid_of(codecs: TextCodecs) -> int:
    pid = codecs._workers[KEY].pid
    assert pid is not None
    return pid


async def test_what_waits_behind_an_order_that_ends_the_process_is_answered(
    codecs: TextCodecs,
) -> None:
    await ask(codecs)
    ended = pid_of(codecs)
    said = ["before", "spin", *(f"after {number}" for number in range(20))]
    found = await asyncio.gather(*(ask(codecs, each) for each in said), return_exceptions=True)
    for text, made in zip(said, found, strict=True):
        if text == "spin":
            assert isinstance(made, NoActivePlan)
            assert made.details == {"model": "tiny:1", "limit": JailLimit.CPU_TIME}
        else:
            assert isinstance(made, RenderedPrompt)
            assert (made.text, list(made.ids)) == (text, tokens_of(text))
    assert pid_of(codecs) != ended


async def test_a_model_that_fails_again_and_again_is_left_alone(codecs: TextCodecs) -> None:
    for _ in range(4):
        failed = await failure(codecs, "spin")
        if failed.retry_after_ns is not None:
            break
    # By then even what is honest is refused, with the time after which to try again.
    failed = await failure(codecs, "hi")
    assert failed.retry_after_ns is not None
    assert 0 < failed.retry_after_ns <= 60e9
    assert codecs._workers[KEY].pid is None


def test_the_first_failure_costs_no_time_and_none_costs_more_than_a_minute() -> None:
    delays = [delay_s(failures) for failures in range(40)]
    assert delays[:5] == [0, 0, 0.5, 1, 2]
    assert delays == sorted(delays)
    assert delays[-1] == 60


async def test_a_process_that_hangs_is_ended_by_the_clock(tmp_path: Path) -> None:
    text_model(tmp_path, template=TEMPLATE)
    codecs = TextCodecs(tmp_path, replace(USUAL_LIMITS, wall_clock_s=0.5, wall_clock_per_cpu=0))
    try:
        await codecs.of(KEY)
        os.kill(pid_of(codecs), signal.SIGSTOP)  # it takes no processor time at all
        assert (await failure(codecs, "hi")).details["limit"] == JailLimit.WALL_CLOCK
    finally:
        await codecs.close()


async def test_an_answer_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    text_model(tmp_path, template=TEMPLATE)
    limits = replace(USUAL_LIMITS, answer_bytes=1000, answer_bytes_per_byte=0)
    codecs = TextCodecs(tmp_path, limits)
    try:
        assert (await failure(codecs, "much")).details["limit"] == JailLimit.RESULT
        assert (await ask(codecs)).text == "hi"
    finally:
        await codecs.close()


async def test_a_process_that_somebody_kills_is_replaced(codecs: TextCodecs) -> None:
    await ask(codecs)
    killed = pid_of(codecs)
    os.kill(killed, signal.SIGKILL)
    await until(lambda: codecs._workers[KEY].pid is None, "its end is noticed")
    assert (await ask(codecs)).text == "hi"
    assert pid_of(codecs) != killed


async def test_a_caller_who_goes_away_changes_nothing_for_others(codecs: TextCodecs) -> None:
    await ask(codecs)
    asking = [asyncio.create_task(ask(codecs, str(number))) for number in range(20)]
    await asyncio.sleep(0)
    for gone in asking[::2]:
        gone.cancel()
    kept = await asyncio.gather(*asking[1::2])
    assert [made.text for made in kept] == [str(number) for number in range(1, 20, 2)]


async def test_the_process_is_confined_and_ends_with_the_gateway(codecs: TextCodecs) -> None:
    await ask(codecs)
    process = Path(f"/proc/{pid_of(codecs)}")
    facts = dict(line.split(":\t") for line in (process / "status").read_text().splitlines())
    if JailProtection.SECCOMP in offered():
        assert (facts["Seccomp"], facts["NoNewPrivs"]) == ("2", "1")
    if JailProtection.OWN_USER in offered():
        assert int(facts["Uid"].split()[0]) != os.getuid()
    await codecs.close()
    assert not process.exists()
    with pytest.raises(NoActivePlan):
        await ask(codecs)


async def test_texts_that_are_none_are_the_callers_mistake(codecs: TextCodecs) -> None:
    with pytest.raises(InvalidInput, match="lone surrogates"):
        await ask(codecs, "half \ud83d")
    codec = await codecs.of(KEY)
    with pytest.raises(InvalidInput, match="too large"):
        await codec.render([{"role": "user", "content": "x"}], {"n": 2**70}, most_characters=9)


async def test_a_long_text_may_take_more_than_a_short_one(codecs: TextCodecs) -> None:
    text = "Grüße aus Zürich! " * 50_000
    made = await ask(codecs, text)
    assert made.text == text
    assert len(made.ids) == len(text.encode())
