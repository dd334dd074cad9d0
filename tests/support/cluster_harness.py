"""Starts `catenaryd up` as a real process for tests and talks to it from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from catenary.types import ClusterStatus
from machine_faults.idle_book import idle_book
from source_roots import IMPORT_PATH

ROOT = Path(__file__).resolve().parents[2]
MODEL = "efficientnet-lite0"
START_TIMEOUT_S = 150.0


def environment() -> dict[str, str]:
    """The environment of a real user, plus the import path of this checkout."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CATENARY_")}
    return {**clean, "PYTHONPATH": IMPORT_PATH}


class RunningCluster:
    """A `catenaryd up` process and what it printed."""

    def __init__(
        self, process: subprocess.Popen[str], facts: dict[str, Any], data_dir: Path
    ) -> None:
        self.process = process
        self.facts = facts
        self.data_dir = data_dir

    @property
    def grpc(self) -> str:
        return str(self.facts["grpc"])

    @property
    def http(self) -> str:
        return str(self.facts["http"])

    @property
    def admin(self) -> str:
        return str(self.facts["admin"])

    def pid_of(self, name: str) -> int:
        """Returns the pid of a child, of "redis", or of a scheduler by its id."""
        if name == "redis":
            return redis_pid(self.data_dir)
        child = "scheduler" if name == "scheduler-0" else name
        return int(self.facts["pids"][child])

    def scheduler_port(self, name: str = "scheduler-0") -> int:
        """Returns the port of a scheduler that agents and gateways are told; it has others."""
        words = psutil.Process(self.pid_of(name)).cmdline()
        return int(words[words.index("--port") + 1])

    def kill(self, name: str) -> int:
        """Sends SIGKILL to the process that `pid_of` names and returns the pid it had."""
        pid = self.pid_of(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def assert_idle_book(self, test: str, timeout_s: float = 30.0) -> ClusterStatus:
        """Fails unless the book gets empty, and stays so over two audits; see `idle_book`."""
        return idle_book(self.grpc, self.admin, test, timeout_s)

    def logs(self) -> str:
        parts = []
        for file in sorted((self.data_dir / "logs").glob("*.log")):
            lines = file.read_text(errors="replace").splitlines()[-30:]
            parts.append(f"== {file.name}\n" + "\n".join(lines))
        return "\n".join(parts)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def redis_pid(data_dir: Path) -> int:
    """Returns the embedded server's process."""
    return int((data_dir / "redis" / "redis.pid").read_text())


@contextmanager
def running_cluster(
    data_dir: Path,
    *,
    models: tuple[str, ...] = (MODEL,),
    placement: dict[str, object] | None = None,
    config: dict[str, Any] | None = None,
    agents: int = 3,
    device: str = "cpu",
    virtual_gpus: int = 1,
    schedulers: int = 1,
    groups: int = 1,
    max_agents: int = 0,
    tls: bool = False,
) -> Iterator[RunningCluster]:
    """Runs a cluster for the length of the block; shows its logs if the block fails."""
    data_dir.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-m", "catenaryd"]
    if config is not None:
        file = data_dir / "catenary.yaml"
        file.write_text(yaml.safe_dump(config))
        arguments += ["--config", str(file)]
    arguments += [
        "up",
        "--json",
        "--agents",
        str(agents),
        "--device",
        device,
        "--virtual-gpus",
        str(virtual_gpus),
        "--schedulers",
        str(schedulers),
        "--groups",
        str(groups),
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--data-dir",
        str(data_dir),
    ]
    if tls:
        arguments.append("--tls")
    if max_agents:
        arguments += ["--max-agents", str(max_agents)]
    for model in models:
        arguments += ["--model", model]
    if placement is not None:
        plan = data_dir / "plan.json"
        plan.write_text(json.dumps(placement))
        arguments += ["--plan", str(plan)]
    with (data_dir / "up.log").open("w") as errors:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(), cwd=ROOT
        )
    cluster = RunningCluster(process, {}, data_dir)
    try:
        with futures.ThreadPoolExecutor(1) as pool:
            assert process.stdout is not None
            line = pool.submit(process.stdout.readline)
            try:
                text = line.result(START_TIMEOUT_S)
            except futures.TimeoutError:
                process.kill()
                raise AssertionError("the cluster did not become ready") from None
        assert text, "catenaryd up ended: " + (data_dir / "up.log").read_text()
        cluster.facts = json.loads(text)
        yield cluster
    except BaseException:
        print(cluster.logs(), file=sys.stderr)
        raise
    finally:
        if process.poll() is None:
            cluster.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Polls until `condition` holds and returns how long that took; fails after `timeout_s`."""
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        if condition():
            return time.monotonic() - start
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")
