"""A compose cluster on a real Docker engine, for tests that stand outside of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import catenary

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "compose"
SECRETS = FOLDER / "secrets"
COLLECTOR, COLLECTOR_FILE = "http://collector:4317", "../tests/compose/collector.yaml"
_COMMAND_S = 1500.0
"""The first build installs PyTorch and compiles the scheduler."""
_POLL_S = 0.05


def require_engine() -> None:
    """Skips the test where no Docker engine answers."""
    if shutil.which("docker") is None:
        pytest.skip("needs a Docker engine: there is no docker command")
    if subprocess.run(["docker", "version"], capture_output=True, check=False).returncode:
        pytest.skip("needs a Docker engine: none answers; set DOCKER_HOST")


@dataclass(frozen=True, slots=True)
class ComposeCluster:
    """One project; every call is a command line of a person."""

    project: str
    environment: dict[str, str]

    def cluster(self, *arguments: str, timeout_s: float = _COMMAND_S) -> str:
        """Runs `compose/cluster ...` and returns what it printed."""
        return self._run([str(FOLDER / "cluster"), *arguments], timeout_s)

    def docker(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """Runs `docker ...` and returns what it printed."""
        return self._run(["docker", *arguments], timeout_s)

    def container(self, service: str, number: int = 1) -> str:
        """Returns the id of a replica's container, running or not."""
        labels = self._labels(service, number)
        ids = self.docker("ps", "-aq", *labels).split()
        assert len(ids) == 1, f"{service} {number}: {ids}"
        return ids[0]

    def containers(self) -> list[dict[str, Any]]:
        """Returns what the engine knows of every container of the project."""
        ids = self.docker("ps", "-aq", *self._labels()).split()
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", *ids)) if ids else []
        return found

    def left_over(self) -> list[str]:
        """Returns containers, volumes and networks of the project that are still there."""
        label = ["--filter", f"label=com.docker.compose.project={self.project}"]
        return [
            *self.docker("ps", "-aq", *label).split(),
            *self.docker("volume", "ls", "-q", *label).split(),
            *self.docker("network", "ls", "-q", *label).split(),
        ]

    def spans(self) -> list[dict[str, Any]]:
        """Returns every span the collector has got so far."""
        text = self.docker("exec", self.container("collector"), "cat", "/tmp/spans.jsonl")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def grpc(self) -> str:
        return f"localhost:{self.environment['CATENARY_GRPC_PORT']}"

    @property
    def http(self) -> str:
        return f"https://localhost:{self.environment['CATENARY_HTTP_PORT']}"

    def connection(self, key: str = "admin_key") -> dict[str, Any]:
        """Returns what a client of the SDK is made with."""
        return {
            "target": self.grpc,
            "admin_target": f"localhost:{self.environment['CATENARY_ADMIN_PORT']}",
            "api_key": (SECRETS / key).read_text().strip(),
            "tls": catenary.TlsConfig(ca_file=SECRETS / "ca.pem"),
        }

    def _labels(self, service: str = "", number: int = 0) -> list[str]:
        labels = {"project": self.project, "service": service, "container-number": number}
        return [
            part
            for name, value in labels.items()
            if value
            for part in ("--filter", f"label=com.docker.compose.{name}={value}")
        ]

    def _run(self, command: list[str], timeout_s: float) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=ROOT,
            env=self.environment,
        )
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            pytest.fail(f"{' '.join(command)}: exit code {done.returncode}\n{tail}")
        return done.stdout


@contextmanager
def compose_cluster(project: str) -> Iterator[ComposeCluster]:
    """Builds and starts a cluster with a collector; removes all of it at the end."""
    with ExitStack() as stack:
        ports = [str(stack.enter_context(_held_port()).getsockname()[1]) for _ in range(3)]
    names = ("CATENARY_HTTP_PORT", "CATENARY_GRPC_PORT", "CATENARY_ADMIN_PORT")
    cluster = ComposeCluster(
        project,
        {
            **os.environ,
            **dict(zip(names, ports, strict=True)),
            "COMPOSE_PROJECT_NAME": project,
            "COMPOSE_MORE": ":".join(
                filter(None, (os.environ.get("COMPOSE_MORE"), COLLECTOR_FILE))
            ),
            "CATENARY_OTLP_ENDPOINT": COLLECTOR,
            "CATENARY_TRACE_SAMPLE_RATIO": "1.0",
            "CATENARY_AGENT_THREADS": "1",
        },
    )
    try:
        cluster.cluster("up")
        yield cluster
    except BaseException:
        print(cluster.cluster("logs", "--tail", "40"))
        raise
    finally:
        cluster.environment["PURGE"] = "1"
        cluster.cluster("down", "--timeout", "5")


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Returns after how many seconds `condition` was true; SDK errors mean "not yet"."""
    began = time.monotonic()
    last = ""
    while time.monotonic() - began < timeout_s:
        try:
            if condition():
                return time.monotonic() - began
        except catenary.CatenaryError as error:
            last = f" ({error})"
        time.sleep(_POLL_S)
    pytest.fail(f"{what}: not within {timeout_s:g} s{last}")


def _held_port() -> socket.socket:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held
