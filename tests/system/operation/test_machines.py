"""Machines with addresses of their own become one cluster, as the page says, and leave it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import figures
from fault_cluster import IMAGES, shared_models
from joining_machines.machine_page import TestMachine, commands_of
from machine_faults.namespaces import VirtualNetwork, virtual_network

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

NAMES = ("first", "second", "third")
LATER = "fourth"
"""A machine that joins under load, over a link that is cut while it fetches."""
MBIT = 1e6 / 8
QUIET_S = 240.0
"""Seconds without any progress in the cluster after which a test has waited long enough."""
WRONG_TOKEN = "aaaaaaaa." + "b" * 32
_LINE = re.compile(r"catenary://\S+?(?=')")


@pytest.fixture
def ipv6(request: pytest.FixtureRequest) -> bool:
    return bool(getattr(request, "param", False))


@pytest.fixture
def network(ipv6: bool) -> Iterator[VirtualNetwork]:
    with virtual_network((*NAMES, LATER), ipv6=ipv6) as made:
        yield made


@pytest.fixture
def machines(network: VirtualNetwork, tmp_path: Path) -> Iterator[dict[str, TestMachine]]:
    """Machines with empty folders; only the first one has the models."""
    with ExitStack() as stack:
        made = {}
        for name in (*NAMES, LATER):
            made[name] = TestMachine(name, network.places[name], tmp_path / name)
            (made[name].folder / ".catenary").mkdir(parents=True)
            stack.callback(made[name].end)
        (made["first"].folder / ".catenary" / "models").symlink_to(shared_models())
        yield made


def line_in(text: str) -> str:
    found = _LINE.search(text)
    assert found, text
    return found[0]


def first_line(process: Any) -> str:
    line = process.stdout.readline()
    assert line, f"`up` ended with {process.wait(10)}"
    return str(line)


def until(first: TestMachine, condition: Callable[[], bool], what: str) -> None:
    """Waits as long as anything in the cluster makes progress: states, what is loaded and fetched."""
    seen, since = progress_of(first), time.monotonic()
    while not condition():
        if (now := progress_of(first)) != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() - since < QUIET_S, f"{what}; it stands at {seen}\n{first.logs()}"
        time.sleep(0.5)


def progress_of(first: TestMachine) -> list[object]:
    done = first.run("catenary machines --json")
    found = json.loads(done.stdout) if done.returncode == 0 else []
    return [
        (agent["agent_id"], agent["state"], agent["partitions"], agent["fetches"])
        for machine in found
        for agent in machine["agents"]
    ]


def hosting(machine: TestMachine) -> set[str]:
    """The machines with something loaded, by what the first one lists."""
    done = machine.run("catenary machines --json")
    found = json.loads(done.stdout) if done.returncode == 0 else []
    return {each["machine"] for each in found if each["models"]}


def test_machines_as_the_page_says(
    network: VirtualNetwork, machines: dict[str, TestMachine]
) -> None:
    network.impair(["first"], ["second"], delay_s=0.002, bytes_per_s=100 * MBIT)
    network.impair(["first", "second"], ["third"], delay_s=0.01, bytes_per_s=50 * MBIT)
    line, began = "", time.monotonic()
    first, third = machines["first"], machines["third"]
    done = []
    for command in commands_of():
        machine = machines[command.machine]
        text = command.line.replace("10.0.0.5", first.place.host).replace("JOIN_LINE", line)
        if command.line.startswith("catenaryd up"):
            process = machine.start(text)
            assert first_line(process).startswith("serving")
            line = line_in(first_line(process) + "'")
        elif text.startswith("catenaryd leave"):
            until(first, lambda: hosting(first) == set(NAMES), "all machines host something")
            figures.report(
                "three machines", "all host a model after", time.monotonic() - began, "s"
            )
            _leave_under_load(first, machine, text)
        else:
            said = machine.do(text)
            line = line_in(said) if "token create" in text else line
            _holds(text, said, third)
        done.append(text.split()[1])
    assert done.count("join") == 3
    assert {"up", "token", "machines", "bench", "leave"} <= set(done)
    _come_back(first, machines["second"])
    _join_under_load(network, first, machines[LATER])
    _refusals(first, third, line)


def _holds(command: str, said: str, third: TestMachine) -> None:
    """Checks what one command of the page printed."""
    if command.startswith("catenaryd token list"):
        assert "0 of 2 used" in said
        assert "1 of 1 used  second" in said
    if command.startswith("catenaryd join 'catenary://"):
        assert "is in cluster main" in said
    if "--dry-run" in command:
        assert "ExecStart=" in said
        assert "token" not in said
    if command.startswith("catenary machines"):
        assert third.place.host in said
        assert re.search(r"\d cores?, \d", said), said


def _leave_under_load(first: TestMachine, machine: TestMachine, leave: str) -> None:
    """A machine leaves while requests are served: each is answered."""
    load = first.start(
        f"catenary bench {IMAGES} --concurrency 3 --seconds 12 --timeout 120 --slo-ms 120000 --json"
    )
    time.sleep(5)
    began = time.monotonic()
    assert "has left cluster main" in machine.do(leave)
    left_s = time.monotonic() - began
    assert load.wait(240) == 0
    assert load.stdout is not None
    report = json.loads(load.stdout.read())
    figures.report("a machine leaves", "gone after", left_s, "s")
    figures.report("a machine leaves", "answered", float(report["answered"]), "requests")
    assert report["errors"] == {}
    assert report["answered"] > 0
    assert not list((machine.folder / ".catenary" / "certs").glob("*.pem"))
    until(first, lambda: machine.name not in hosting(first), "it hosts nothing any more")


def _join_under_load(network: VirtualNetwork, first: TestMachine, machine: TestMachine) -> None:
    """A machine joins over a slow link, which is cut while it fetches; no request is lost."""
    others = [name for name in NAMES if name != "third"]
    network.impair([machine.name], others, delay_s=0.01, bytes_per_s=50 * MBIT)
    line = first.facts("catenaryd token create")["join"]
    load = first.start(
        f"catenary bench {IMAGES} --concurrency 2 --seconds 30 --timeout 180 --slo-ms 180000 --json"
    )
    joining = machine.start(f"catenaryd join '{line}' --name {machine.name}")
    fetched = machine.folder / ".catenary" / "models"
    deadline = time.monotonic() + QUIET_S
    while not any(fetched.rglob(".fetched")):  # looked at often: the fetch takes a few seconds
        assert time.monotonic() < deadline, f"it does not begin to fetch\n{machine.logs()}"
        time.sleep(0.1)
    network.cut([machine.name], others)
    before = disk_bytes(fetched)
    time.sleep(6.0)  # longer than the scheduler waits for a silent agent
    network.impair([machine.name], others, delay_s=0.01, bytes_per_s=50 * MBIT)
    began = time.monotonic()
    until(first, lambda: machine.name in hosting(first), "it hosts a model after the cut")
    figures.report("a machine joins", "hosts after the cut", time.monotonic() - began, "s")
    assert joining.wait(120) == 0
    figures.report("a machine joins", "on its disk before the cut", before / 1e6, "MB")
    figures.report("a machine joins", "on its disk at last", disk_bytes(fetched) / 1e6, "MB")
    assert load.wait(600) == 0
    assert load.stdout is not None
    report = json.loads(load.stdout.read())
    assert report["errors"] == {}
    assert report["answered"] > 0


def disk_bytes(folder: Path) -> int:
    return 512 * sum(file.stat().st_blocks for file in folder.rglob("*") if file.is_file())


def _come_back(first: TestMachine, second: TestMachine) -> None:
    """A machine whose agents were killed joins again without a token."""
    again = second.run("catenaryd join")
    assert again.returncode == 1
    assert "run already" in again.stderr
    os.kill(int((second.folder / ".catenary" / "join.lock").read_text()), 9)
    until(first, lambda: second.name not in hosting(first), "agents end with their supervisor")
    assert "is in cluster main" in second.do("catenaryd join")
    until(first, lambda: second.name in hosting(first), "it hosts a model again")


def _refusals(first: TestMachine, third: TestMachine, used: str) -> None:
    """What does not let a machine in, and says why."""
    token = used.partition("token=")[2].partition("&")[0]
    made = first.facts("catenaryd token create")
    first.do(f"catenaryd token revoke {made['id']}")
    once = first.facts("catenaryd token create")["join"]
    short = first.facts("catenaryd token create --ttl 1s")["join"]
    pin = once.partition("ca=sha256:")[2]
    time.sleep(1.5)
    for line, why in (
        (made["join"], "was revoked"),
        (short, "has expired"),
        (used.replace(token, WRONG_TOKEN), "knows no such token"),
        (once.replace(pin, "0" * 64), "not the one the join line names"),
    ):
        done = third.run(f"catenaryd join '{line}'")
        assert done.returncode == 1
        assert why in done.stderr
    taken = third.run(f"catenaryd join '{once}' --name second")
    assert "name 'second' is taken" in taken.stderr
    third.do(f"catenaryd join '{once}'  --name third")
    third.do("catenaryd leave")
    done = third.run(f"catenaryd join '{once}' --name third")
    assert "used as often as it may be" in done.stderr


@pytest.mark.parametrize("ipv6", [True], ids=["ipv6"], indirect=True)
def test_over_ipv6_a_host_without_agents_serves_by_machines_that_join(
    machines: dict[str, TestMachine],
) -> None:
    first, second = machines["first"], machines["second"]
    process = first.start(
        f"catenaryd up --host :: --advertise {first.place.host} --name first --agents 0"
        f" --model {IMAGES} --json"
    )
    line = json.loads(first_line(process))["join"]
    assert f"[{first.place.host}]:8006" in line
    facts = second.facts(f"catenaryd join '{line}' --name second --transport-port 9100")
    assert facts["address"] == second.place.host
    until(first, lambda: hosting(first) == {"second"}, "the joined machine hosts the model")
    [only] = first.facts("catenary machines")
    assert (only["machine"], only["address"]) == ("second", second.place.host)
    report = first.facts(f"catenary bench {IMAGES} --seconds 3 --timeout 60 --slo-ms 60000")
    assert report["errors"] == {}
    assert report["answered"] > 0
    second.do("catenaryd leave")
