from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from catenary_services import lifecycle
from catenary_services.errors import Unavailable
from catenary_services.lifecycle import run_until_signal
from source_roots import IMPORT_PATH

PROGRAM = """
import asyncio, sys
from catenary_services.lifecycle import run_process
from catenary_services.log import configure_logging

class Example:
    name = "example"
    async def start(self):
        self.work = asyncio.create_task(asyncio.sleep(0.2))
    async def drain(self, timeout_s):
        print("draining", flush=True)
        if sys.argv[1] == "stubborn":
            await asyncio.Event().wait()
        await self.work
        print("finished work", flush=True)
    async def stop(self):
        print("stopped", flush=True)

configure_logging("example", "example", "info", False)
sys.exit(run_process(Example(), float(sys.argv[2]), on_ready=lambda: print("ready", flush=True)))
"""


@pytest.fixture
def program() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.wait(5)
        child.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_a_real_process_and_then_it_exits(program, number: signal.Signals) -> None:
    child = program("gentle", "10")
    child.send_signal(number)
    assert child.stdout.read() == "draining\nfinished work\nstopped\n"
    assert child.wait(10) == 0


def test_second_signal_stops_a_real_process_at_once(program) -> None:
    child = program("stubborn", "60")
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "draining\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.read() == "stopped\n"
    assert child.wait(10) == 0


def test_drain_that_never_ends_is_cut_off(program) -> None:
    child = program("stubborn", "0.1")
    child.send_signal(signal.SIGTERM)
    assert child.stdout.read() == "draining\nstopped\n"
    assert child.wait(10) == 0


class Example:
    """Notes its steps; each of them can be made to hang or fail."""

    name = "example"

    def __init__(self, **behaviour: Exception | asyncio.Event) -> None:
        self.behaviour = behaviour
        self.steps: list[str] = []

    async def step(self, name: str) -> None:
        self.steps.append(name)
        what = self.behaviour.get(name)
        if isinstance(what, Exception):
            raise what
        if what is not None:
            await what.wait()

    async def start(self) -> None:
        await self.step("start")

    async def drain(self, timeout_s: float) -> None:
        await self.step("drain")

    async def stop(self) -> None:
        await self.step("stop")


def stop_soon() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_steps_come_in_order() -> None:
    process = Example()
    assert await run_until_signal(process, 1.0, stop_soon) == 0
    assert process.steps == ["start", "drain", "stop"]


async def test_failed_start_stops_and_reports() -> None:
    process = Example(start=Unavailable("port taken"))
    assert await run_until_signal(process, 1.0, stop_soon) == 1
    assert process.steps == ["start", "stop"]


async def test_signal_during_start_interrupts_it() -> None:
    process = Example(start=asyncio.Event())
    asyncio.get_running_loop().call_later(0.01, stop_soon)
    assert await run_until_signal(process, 1.0) == 0
    assert process.steps == ["start", "stop"]


async def test_failed_drain_still_stops() -> None:
    process = Example(drain=RuntimeError("bug"))
    assert await run_until_signal(process, 1.0, stop_soon) == 1
    assert process.steps == ["start", "drain", "stop"]


async def test_failed_stop_is_an_exit_code() -> None:
    process = Example(stop=RuntimeError("bug"))
    assert await run_until_signal(process, 1.0, stop_soon) == 1


async def test_stop_that_hangs_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "STOP_TIMEOUT_S", 0.05)
    process = Example(stop=asyncio.Event())
    with capture_logs() as lines:
        assert await run_until_signal(process, 1.0, stop_soon) == 1
    (line,) = (line for line in lines if line["event"] == "stop_timed_out")
    assert re.match(r"stop:\d+ > step:\d+ > wait:\d+", line["waiting"][0])


async def test_process_that_cannot_go_on_ends_without_a_drain() -> None:
    class Doomed(Example):
        async def failed(self) -> None:
            raise Unavailable("the device is gone")

    process = Doomed()
    assert await run_until_signal(process, 1.0) == 1
    assert process.steps == ["start", "stop"]


async def test_signals_mean_what_they_meant_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    await run_until_signal(Example(), 1.0, stop_soon)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) in (before, signal.default_int_handler)
