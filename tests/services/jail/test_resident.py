"""A jailed process that stays: it answers, is as confined as any other, and leaves nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from catenary_services.jail.orders import JailLimits, JailOrder, JailProtection
from catenary_services.jail.protections import offered
from catenary_services.jail.resident import ResidentProcess

SOCKETS = """
import os, stat
global found
found = 0
for number in range(3, 4096):
    try:
        found += stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        pass
"""
LIMITS = JailLimits(cpu_s=10, memory_bytes=1 << 30, file_bytes=0)


@contextmanager
def resident(name: str, job: bytes = b"") -> Iterator[ResidentProcess]:
    order = JailOrder(f"hostile.hostile_work:{name}", (), job, (), LIMITS)
    process = ResidentProcess(order)
    process.channel.settimeout(60)
    try:
        yield process
    finally:
        process.channel.close()
        process.kill()
        process.end()


def asked(process: ResidentProcess, text: str) -> str:
    process.channel.sendall(text.encode())
    return process.channel.recv(10_000).decode()


def test_it_answers_until_its_channel_is_closed() -> None:
    with resident("echoes", b"> ") as process:
        assert [asked(process, text) for text in ("a", "b")] == ["> a", "> b"]
        process.channel.close()
        assert process.end(grace_s=60) == 0
        assert not Path(f"/proc/{process.pid}").exists()


def test_it_is_the_first_to_go_where_memory_runs_out() -> None:
    with resident("echoes") as process:
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "1000\n"


def test_it_is_ended_when_it_is_not_wanted_any_more() -> None:
    with resident("echoes") as process:
        asked(process, "a")
        process.kill()
        assert process.end() == -signal.SIGKILL


@pytest.mark.skipif(JailProtection.SECCOMP not in offered(), reason="the kernel has no seccomp")
def test_its_channel_is_its_only_way_out() -> None:
    with resident("attempts_again") as process:
        for way in ("socket.socket()", "os.fork()", "os.kill(os.getppid(), 0)"):
            assert asked(process, way).startswith("refused PermissionError")
        # Nor does it have files of its parent.
        assert asked(process, f"exec({SOCKETS!r}) or found") == "did 1"


@pytest.mark.skipif(JailProtection.LANDLOCK not in offered(), reason="the kernel has no Landlock")
def test_it_reads_nothing_of_the_host() -> None:
    with resident("attempts_again") as process:
        assert asked(process, "open('/etc/shadow').read()").startswith("refused")
        assert asked(process, "open('/proc/1/environ').read()").startswith("refused")
