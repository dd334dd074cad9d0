"""What the demo shows is judged, and its plans are plans, without a cluster."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import catenary
from catenary.rpc.plan_search import PlannedPipeline, PlannedPool
from catenary.text.generation import ChainChange, GenerationResult, Usage
from catenary_scheduler.planning import parse_placement
from catenary_services.errors import InternalError, Unavailable
from catenaryd.demo import chats, deadlines, plans, preparing, unlike_devices

ANSWER = GenerationResult("a b c", (1, 2, 3), "stop", Usage(5, 3), "demo", (), 0.1, 0.5)
KILLED = ChainChange("restart", 2, 10, 20, ("agent-1", "agent-0"), ("agent-2", "agent-0"))
WHOLE = (PlannedPipeline(8, (PlannedPool(0, 10, ("P4-1", "P4-2")),)),)


def test_an_answer_that_went_on_with_the_same_tokens_is_good(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chats.judged(replace(ANSWER, chain_changes=(KILLED,)), ANSWER, "restart")
    told = capsys.readouterr().out
    assert "Token 2 was the last from agent-1, agent-0; token 3 came 0 ms later" in told
    assert "none is missing" in told


@pytest.mark.parametrize("tokens", [(1, 3), (1, 2, 2, 3), ()])
def test_an_answer_with_other_tokens_is_not(
    tokens: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not chats.judged(
        replace(ANSWER, token_ids=tokens, chain_changes=(KILLED,)), ANSWER, "restart"
    )
    assert "DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [(), (replace(KILLED, how="kv"),)])
def test_an_answer_to_which_nothing_happened_is_not(changes: tuple[ChainChange, ...]) -> None:
    assert not chats.judged(replace(ANSWER, chain_changes=changes), ANSWER, "restart")


@pytest.mark.parametrize(("took_ms", "good"), [(3.0, True), (300.0, False)])
def test_a_refusal_is_good_if_it_came_before_answers_do(
    took_ms: float, good: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = catenary.SloUnattainableError(
        "would finish 100 ms after its deadline", retry_after_s=0.1
    )
    assert deadlines.judged(deadlines.DeadlineAttempt(error, took_ms, 250.0)) is good
    told = capsys.readouterr().out
    assert "would finish 100 ms after its deadline" in told
    assert "again in 0.10 s" in told


def test_the_demo_does_not_claim_a_gain_that_is_none() -> None:
    assert "No gain" in unlike_devices.verdict(50.0, 48.0, survives=False)
    assert "survives" not in unlike_devices.verdict(50.0, 48.0, survives=False)
    assert "1.25 times as many" in unlike_devices.verdict(40.0, 50.0, survives=True)


def test_the_plans_of_the_demo_are_plans() -> None:
    for document in (plans.demo_placement(10), plans.placement_of(WHOLE)):
        placement = parse_placement(plans.with_chats(document, 30))
        vision, chat = placement.models
        assert [vision.model.name, chat.model.name] == [plans.VISION_MODEL, plans.CHAT_MODEL]
        first, second = ({hop.agent for hop in chain.hops} for chain in chat.chains)
        assert len(first & second) == 1, "only one agent can be lost without losing the chat"
    assert plans.in_words(plans.placement_of(WHOLE)) == ["blocks 0 to 9 on P4-1 or P4-2"]


def test_what_is_to_be_prepared_is_said_with_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ("efficientnet-lite0", "smollm2-135m")
    assert preparing.announce(tmp_path / "models", models) == list(models)
    told = capsys.readouterr().out
    assert "efficientnet-lite0 and smollm2-135m" in told
    assert "1.3 GB" in told


def test_a_full_disk_is_said_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(preparing.NEEDED_BYTES, "smollm2-135m", 1 << 60)
    with pytest.raises(Unavailable, match="GB left of the"):
        preparing.announce(tmp_path, ("smollm2-135m",))


async def test_a_preparation_that_fails_says_why_and_where_to_look(tmp_path: Path) -> None:
    log = tmp_path / "prepare.log"
    steps: list[str] = []
    with pytest.raises(InternalError, match=r"nobody could not be prepared .*prepare\.log"):
        await preparing.prepare(tmp_path / "models", "nobody", log, steps.append)
    assert "'nobody' is not in" in steps[-1]
    assert log.exists()


async def test_a_preparation_that_is_cancelled_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    slow.write_text(
        f"#!{sys.executable}\nimport time\nprint('begins', flush=True)\ntime.sleep(600)"
    )
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))
    begun = asyncio.Event()
    task = asyncio.create_task(
        preparing.prepare(tmp_path, "model", tmp_path / "log", lambda _: begun.set())
    )
    await begun.wait()
    task.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
