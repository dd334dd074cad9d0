"""Hostile chat templates and tokenizers cost their own model only.

All of them are asked at once, and an honest model beside them. Times of a busy machine prove
nothing, so what is looked at is the process of the honest model, which must be the same one from the
first to the last answer; the longest piece of work of the gateway's event loop, in processor time;
and the memory of the gateway's process.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from catenary_gateway.generation.text.text_codec import TextCodecs
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import CatenaryError, InvalidInput, NoActivePlan
from hostile.hostile_texts import LONG_WORD, TEMPLATES, TOKENIZERS, Outcome
from small_models.tiny_tokenizer import text_model

pytestmark = pytest.mark.timeout(600)

MOST_CHARACTERS = 1_000_000
GOOD = ModelKey("good", "1")
SAID = [{"role": "user", "content": "How do you do?"}]
LONGEST_WORK_S = 0.25
MORE_MEMORY_BYTES = 96 << 20


async def outcome_of(codecs: TextCodecs, model: ModelKey) -> object:
    """Asks a model for a text, and returns what comes of it."""
    failed: CatenaryError | None = None
    try:
        codec = await codecs.of(model)
        asked = [{"role": "user", "content": LONG_WORD}]
        made = await codec.render(asked, {}, most_characters=MOST_CHARACTERS)
    except (InvalidInput, NoActivePlan) as error:
        failed = error
    if failed is not None:
        assert len(failed.message) < 1000
        if isinstance(failed, InvalidInput):
            return Outcome.REFUSED
        assert str(model) in failed.message
        assert failed.details["model"] == str(model)
        return failed.details.get("limit", Outcome.UNUSABLE)
    # A text that is too long is refused by whoever asked for it.
    return Outcome.REFUSED if made.characters > MOST_CHARACTERS else Outcome.ANSWERED


@asynccontextmanager
async def honest_beside(codecs: TextCodecs) -> AsyncIterator[None]:
    """Asks the honest model again and again, and requires that nothing of it changes."""
    codec = await codecs.of(GOOD)
    worker = codecs._workers[GOOD]
    expected, pid = await codec.render(SAID, {}, most_characters=999), worker.pid
    memory = resident_bytes()
    times: list[float] = []
    works: list[float] = []

    async def ask() -> None:
        worked_s = time.thread_time()
        while True:
            begun_s = time.perf_counter()
            assert await codec.render(SAID, {}, most_characters=999) == expected
            times.append(time.perf_counter() - begun_s)
            await asyncio.sleep(0.002)
            works.append(time.thread_time() - worked_s)
            worked_s = time.thread_time()

    asking = asyncio.create_task(ask())
    try:
        yield
        assert not asking.done(), asking.exception()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    middle, longest = sorted(times)[len(times) // 2], max(times)
    print(
        f"\n{len(times)} honest answers: median {middle * 1e3:.2f} ms, {longest * 1e3:.0f} at most"
    )
    print(f"the loop worked {max(works) * 1e3:.0f} ms at a time at most")
    assert worker.pid == pid
    assert max(works) < LONGEST_WORK_S
    assert resident_bytes() - memory < MORE_MEMORY_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def all_at_once(root: Path, expected: Mapping[str, object]) -> None:
    """Asks the models `evil-0`, `evil-1` and so on."""
    text_model(root, GOOD.name)
    codecs = TextCodecs(root)
    try:
        async with honest_beside(codecs):
            models = [ModelKey(f"evil-{number}", "1") for number in range(len(expected))]
            found = await asyncio.gather(*(outcome_of(codecs, model) for model in models))
        others = {
            name: (outcome, wanted)
            for (name, wanted), outcome in zip(expected.items(), found, strict=True)
            if outcome != wanted and not (isinstance(wanted, tuple) and outcome in wanted)
        }
        assert not others, others
    finally:
        await codecs.close()


async def test_hostile_templates_cost_their_own_models_only(tmp_path: Path) -> None:
    for number, (source, _) in enumerate(TEMPLATES.values()):
        text_model(tmp_path, f"evil-{number}", template=source)
    await all_at_once(tmp_path, {name: outcome for name, (_, outcome) in TEMPLATES.items()})


async def test_hostile_tokenizers_cost_their_own_models_only(tmp_path: Path) -> None:
    for number, (make, _) in enumerate(TOKENIZERS.values()):
        folder = text_model(tmp_path, f"evil-{number}")
        (folder / "tokenizer.json").write_text(make())
    await all_at_once(tmp_path, {name: outcome for name, (_, outcome) in TOKENIZERS.items()})


def test_there_are_twenty_of_each_kind() -> None:
    assert min(len(TEMPLATES), len(TOKENIZERS)) >= 20
