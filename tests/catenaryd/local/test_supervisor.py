"""The supervisor restarts what dies, drains what it stops, and leaves nobody behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from catenaryd.local.supervisor import ChildProcess
from shared_helpers.waiting import until


@pytest.fixture
def child(tmp_path: Path) -> ChildProcess:
    arguments = [
        "gateway",
        "--insecure",
        "--gateway-id",
        "g",
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--admin-port",
        "0",
        "--runtime-dir",
        str(tmp_path / "run"),
        "--scheduler-addresses",
        "127.0.0.1:9",
    ]
    return ChildProcess("g", arguments, tmp_path / "g.log")


def is_ready(child: ChildProcess) -> bool:
    return child.log_file.exists() and "ready" in child.log_file.read_text()


async def test_a_killed_child_is_started_again(child: ChildProcess) -> None:
    await child.start()
    try:
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.pid not in (None, first))
        assert child.restarts == 1
    finally:
        await child.stop(10)


async def test_a_stopped_child_drains_and_stays_down(child: ChildProcess) -> None:
    await child.start()
    await until(lambda: is_ready(child))
    pid = child.pid
    assert pid is not None
    await child.stop(15)
    assert child.pid is None
    assert child.restarts == 0
    assert "exit_code=0" in child.log_file.read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
