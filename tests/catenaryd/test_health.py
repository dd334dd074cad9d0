"""`catenaryd health` against a real health port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from catenary_services.grpc.probes import LEADER, Probes
from catenaryd.health import main


@pytest.fixture
async def probes() -> AsyncIterator[tuple[Probes, dict[str, str]]]:
    probes = Probes(LEADER)
    port = await probes.start("127.0.0.1", 0)
    yield probes, {"CATENARY_HEALTH_PORT": str(port)}
    await probes.stop()


async def code(environment: dict[str, str], *arguments: str) -> int:
    return await asyncio.to_thread(main, [*arguments, "--timeout-s", "2"], environment)


async def test_exit_code_is_what_the_process_says(
    probes: tuple[Probes, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    process, environment = probes
    assert await code(environment, "live") == 0
    assert await code(environment) == 1
    assert "is not ready" in capsys.readouterr().err
    process.set_ready(True)
    assert await code(environment, "ready") == 0
    assert await code(environment, "leader") == 1
    process.set(LEADER, True)
    assert await code(environment, "leader") == 0


async def test_nobody_there_is_a_sentence_and_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert await code({}, "ready", "--address", "127.0.0.1:1") == 1
    assert "127.0.0.1:1: UNAVAILABLE" in capsys.readouterr().err


def test_another_question_is_bad_usage() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["well"], {})
    assert ended.value.code == 2
