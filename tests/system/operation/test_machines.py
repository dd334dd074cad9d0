"""Machines with addresses of their own become one cluster, as the page says, and leave it.

They are network namespaces with empty folders, on links of 1 Gbit/s, 100 and 50 Mbit/s (of the first
one our switch carries what a process can); only the first one has the models, a vision model and a
language model. The times until they are served are reported, not limited: they depend on what else the
machine does. Whatever is waited for may take as long as anything in the cluster makes progress.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import figures
from catenary_services.content.record import CHUNK_BYTES
from fault_cluster import IMAGES, shared_models
from joining_machines.machine_page import PageCommand, TestMachine, commands_of
from joining_machines.watching import (
    METRICS_PORT,
    came,
    ended,
    here,
    hosting,
    is_fetched,
    listed,
    models_at,
    until,
)
from language_model import install
from machine_faults.namespaces import VirtualNetwork, virtual_network

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

NAMES = ("first", "second", "third")
LATER = "fourth"
"""A machine that joins under load, over a link that is cut while it fetches."""
CHATS = "smollm2-135m-int8"
MBIT = 1e6 / 8
LINKS = {"second": (0.0005, 1000 * MBIT), "third": (0.005, 100 * MBIT), LATER: (0.01, 50 * MBIT)}
"""Delay of one way, and bytes per second, between a machine and those before it."""
SLACK = 1.15
"""A link may be measured to be so much faster than it is: packets that wait on both sides come at once."""
SILENCE_S = 6.0
"""A link is cut for longer than the scheduler waits for a silent agent."""
STORY = f"catenary chat {CHATS} 'Tell a long story.' --max-tokens 100 --timeout 300 --json"
WRONG_TOKEN = "aaaaaaaa." + "b" * 32
_LINE = re.compile(r"catenary://\S+?(?=')")
_MEASURED = re.compile(r"round trip ([\d.]+) ms.*^link: ([\d.]+) MB/s", re.MULTILINE | re.DOTALL)


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
        models = made["first"].folder / ".catenary" / "models"
        shutil.copytree(shared_models() / IMAGES, models / IMAGES)
        install(models, CHATS)
        yield made


def line_in(text: str) -> str:
    found = _LINE.search(text)
    assert found, text
    return found[0]


def first_line(process: Any) -> str:
    line = process.stdout.readline()
    assert line, f"`up` ended with {process.wait(10)}"
    return str(line)


def test_machines_as_the_page_says(
    network: VirtualNetwork, machines: dict[str, TestMachine]
) -> None:
    for number, name in enumerate(NAMES[1:], 1):
        _shape(network, name, NAMES[:number])
    line, began = "", time.monotonic()
    first, third = machines["first"], machines["third"]
    done = []
    for command in commands_of():
        machine = machines[command.machine]
        text = command.line.replace("10.0.0.5", first.place.host).replace("JOIN_LINE", line)
        if command.line.startswith("catenaryd up"):
            process = machine.start(text)
            assert first_line(process).startswith("serving")
            _report("three machines", "one serves after", began)
            line = line_in(first_line(process) + "'")
        elif text.startswith("catenaryd leave"):
            _leave_under_load(first, machine, text)
        else:
            if text == "catenary machines":
                _are_served(first, began)
                _links_are_known(first)
            said = _said(machine, command, text)
            line = line_in(said) if "token create" in text else line
            _holds(text, said, third)
        done.append(text.split()[1])
    assert done.count("join") == 3
    assert {"up", "token", "machines", "bench", "chat", "leave"} <= set(done)
    _come_back(first, machines["second"])
    _join_under_load(network, first, machines[LATER])
    _refusals(first, third, line)


def _shape(network: VirtualNetwork, name: str, others: tuple[str, ...]) -> None:
    delay_s, bytes_per_s = LINKS[name]
    network.impair([name], others, delay_s=delay_s, bytes_per_s=bytes_per_s)


def _report(test: str, what: str, began: float, wanted: str = "") -> None:
    figures.report(test, what, time.monotonic() - began, "s", wanted)


def _are_served(first: TestMachine, began: float) -> None:
    """Every machine has something of a model, each model is on one that had none, and both answer."""

    def are_there() -> bool:
        found = models_at(first)
        joined = set().union(*(found.get(name, set()) for name in NAMES[1:]))
        return joined >= {IMAGES, CHATS} and all(found.get(name) for name in NAMES)

    until(first, are_there, "all machines host something, and both models are on a joined one")
    photographs = first.facts(f"catenary bench {IMAGES} --seconds 1 --timeout 120 --slo-ms 120000")
    assert photographs["errors"] == {}
    assert photographs["answered"] > 0
    assert first.facts(f"catenary chat {CHATS} 'Say hello.' --max-tokens 4")["text"]
    what = "vision and language are served by all after"
    _report("three machines", what, began, "180 wanted on two free cores")


def _said(machine: TestMachine, command: PageCommand, text: str) -> str:
    """Runs a command that must succeed; one that joins has measured its link as it is."""
    done = machine.done(text)
    if command.line.startswith("catenaryd join 'JOIN_LINE'"):
        _is_as_shaped(machine.name, done.stderr)
    return done.stdout


def _is_as_shaped(name: str, said: str) -> None:
    found = _MEASURED.search(said)
    assert found, said
    _is_link(f"of {name} as it joins", name, float(found[1]), float(found[2]))


def _links_are_known(first: TestMachine) -> None:
    """Agents have measured the link of every two machines, in both directions."""
    pairs = set(permutations(NAMES, 2))

    def links() -> dict[tuple[str, str], dict[str, Any]]:
        found = [link for machine in listed(first) for link in machine["links"]]
        return {(link["source_server_id"], link["target_server_id"]): link for link in found}

    until(first, lambda: set(links()) == pairs, "all links between the machines are measured")
    for (source, target), link in links().items():
        later = max(source, target, key=NAMES.index)
        round_trip_ms, megabytes_per_s = link["round_trip_ns"] / 1e6, link["bytes_per_second"] / 1e6
        _is_link(f"from {source} to {target}", later, round_trip_ms, megabytes_per_s)


def _is_link(which: str, shaped: str, round_trip_ms: float, megabytes_per_s: float) -> None:
    """A link is measured to be no better than it was shaped when the later machine came."""
    delay_s, bytes_per_s = LINKS[shaped]
    figures.report("three machines", f"link {which}, round trip", round_trip_ms, "ms")
    figures.report("three machines", f"link {which}, rate", megabytes_per_s, "MB/s")
    assert round_trip_ms >= 2e3 * delay_s
    assert 0.0 < megabytes_per_s <= SLACK * bytes_per_s / 1e6


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
    if command.startswith("catenary chat"):
        assert said.strip()
    if command.startswith("catenary machines"):
        assert third.place.host in said
        assert re.search(r"\d cores?, \d", said), said


def _leave_under_load(first: TestMachine, machine: TestMachine, leave: str) -> None:
    """A machine leaves while requests are served and a chat goes on: each is answered."""
    load = first.start(
        f"catenary bench {IMAGES} --concurrency 3 --seconds 12 --timeout 120 --slo-ms 120000 --json"
    )
    chat = first.start(STORY)
    time.sleep(5)
    began = time.monotonic()
    assert "has left cluster main" in machine.do(leave)
    _report("a machine leaves", "gone after", began)
    _lost_nothing(first, load, chat)
    assert not list((machine.folder / ".catenary" / "certs").glob("*.pem"))
    until(first, lambda: machine.name not in hosting(first), "it hosts nothing any more")


def _lost_nothing(
    first: TestMachine, load: subprocess.Popen[str], chat: subprocess.Popen[str]
) -> None:
    """Every photograph of a load has been answered, and a chat has come to its end."""
    for process, what in ((load, "the load ends"), (chat, "the chat ends")):
        assert ended(first, process, what) == 0, first.logs()
    assert load.stdout is not None
    assert chat.stdout is not None
    report = json.loads(load.stdout.read())
    figures.report("under load", "answered", float(report["answered"]), "requests")
    assert report["errors"] == {}
    assert report["answered"] > 0
    answer = json.loads(chat.stdout.read())
    assert answer["finish_reason"] in ("length", "stop"), answer
    figures.report("under load", "a chat's tokens", float(len(answer["token_ids"])))


def _join_under_load(network: VirtualNetwork, first: TestMachine, machine: TestMachine) -> None:
    """A machine joins over a slow link, which is cut in the middle of a fetch, and goes on with it.

    No request is lost. What had come before the cut does not come again: by the counter of its store,
    as many bytes have come in the end as are on its disk.
    """
    others = tuple(name for name in NAMES if name != "third")
    _shape(network, machine.name, others)
    machine.variables["CATENARY_METRICS_HOST"] = machine.place.host
    machine.variables["CATENARY_METRICS_PORT"] = str(METRICS_PORT)
    line = first.facts("catenaryd token create")["join"]
    load = first.start(
        f"catenary bench {IMAGES} --concurrency 2 --seconds 30 --timeout 180 --slo-ms 180000 --json"
    )
    chat = first.start(STORY)
    joining = machine.start(f"catenaryd join '{line}' --name {machine.name}")
    until(first, lambda: here(machine) >= CHUNK_BYTES, "it has fetched a chunk", pause_s=0.1)
    network.cut([machine.name], others)
    time.sleep(SILENCE_S)
    before = here(machine)
    _shape(network, machine.name, others)
    began = time.monotonic()
    until(first, lambda: machine.name in hosting(first), "it hosts a model after the cut")
    _report("a machine joins", "hosts after the cut", began)
    assert ended(first, joining, "it has joined") == 0
    _lost_nothing(first, load, chat)
    until(first, lambda: is_fetched(first, machine), "it has fetched all it was given")
    figures.report("a machine joins", "had come before the cut", before / 1e6, "MB")
    figures.report("a machine joins", "has come at last", here(machine) / 1e6, "MB")
    assert CHUNK_BYTES <= before < here(machine)
    assert came(machine) == here(machine)


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
