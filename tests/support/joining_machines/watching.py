"""Watches machines of a cluster: what the first one lists of them, and what they have fetched."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from catenary_services.content.record import FETCHED_FOLDER
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenary_services.store.kept import KeptVersion
from joining_machines.machine_page import TestMachine

METRICS_PORT = 9464
_QUIET_S = 240.0
"""Seconds without any progress in the cluster after which a test has waited long enough."""
_LOOK_S = 5.0


def until(
    first: TestMachine, condition: Callable[[], bool], what: str, *, pause_s: float = 0.5
) -> None:
    """Waits as long as anything in the cluster makes progress: states, what is loaded and fetched."""
    seen, since = progress_of(first), time.monotonic()
    looked = since
    while not condition():
        if time.monotonic() - looked > _LOOK_S:
            if (now := progress_of(first)) != seen:
                seen, since = now, time.monotonic()
            looked = time.monotonic()
            assert looked - since < _QUIET_S, f"{what}; it stands at {seen}\n{first.logs()}"
        time.sleep(pause_s)


def ended(first: TestMachine, process: subprocess.Popen[str], what: str) -> int:
    """The exit code of a process that ends by itself, however long the cluster takes over its work."""
    until(first, lambda: process.poll() is not None, what)
    return process.wait()


def listed(machine: TestMachine) -> list[Any]:
    """What `catenary machines` lists; nothing while there is no answer."""
    done = machine.run("catenary machines --json")
    return list(json.loads(done.stdout)) if done.returncode == 0 else []


def progress_of(first: TestMachine) -> list[object]:
    return [
        (agent["agent_id"], agent["state"], agent["partitions"], agent["fetches"])
        for machine in listed(first)
        for agent in machine["agents"]
    ]


def hosting(machine: TestMachine) -> set[str]:
    """The machines with something loaded, by what the first one lists."""
    return {name for name, models in models_at(machine).items() if models}


def models_at(machine: TestMachine) -> dict[str, set[str]]:
    """The models that each machine has something of, by what the first one lists."""
    return {
        each["machine"]: {name.partition(":")[0] for name in each["models"]}
        for each in listed(machine)
    }


def here(machine: TestMachine) -> int:
    """Bytes of models that a machine has fetched and written, by the maps of their chunks."""
    root = machine.folder / ".catenary" / "models"
    models = ModelRepository(root)
    total = 0
    for marks in root.glob(f"*/*/{FETCHED_FOLDER}"):
        key = ModelKey(marks.parent.parent.name, marks.parent.name)
        record = models.content(key)
        total += KeptVersion(marks.parent, record).bytes_here()[0] if record else 0
    return total


def came(machine: TestMachine) -> int:
    """Bytes that a machine's agent counts as having come from its peers."""
    url = f"http://{machine.place.host}:{METRICS_PORT}/metrics"
    with urllib.request.urlopen(url, timeout=60) as page:
        lines = page.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("catenary_fetched_bytes_total ")]
    return int(float(line.rpartition(" ")[2]))


def is_fetched(first: TestMachine, machine: TestMachine) -> bool:
    """True if a machine hosts something and fetches nothing any more."""
    return any(
        each["machine"] == machine.name
        and each["models"]
        and not any(agent["fetches"] for agent in each["agents"])
        for each in listed(first)
    )
