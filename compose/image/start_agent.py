"""Starts an agent in a container, under a name that outlives the container.

Replicas of one compose service differ in nothing but their number, which only the engine's DNS
knows: the address of replica 3 of `agent` leads back to `<project>-agent-3`. So it is called
"agent-3", whatever was scaled or made anew before, is certified under that name, and has with
`CATENARY_DEVICE=cuda` the third GPU. An agent that is given CATENARY_AGENT_ID keeps it; elsewhere
(Kubernetes) it is called like its host.

This process becomes `catenaryd enrol` (`exec`), which has the agent's key certified by the
authority at CATENARY_AUTHORITY, runs the agent and passes signals on; without one it becomes the
agent.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import MutableMapping

TOKEN_FILE = "/run/secrets/agent_token"
CERTIFICATES = "/catenary/certs"
_REPLICA = re.compile(r"(?:^|[-_])(?P<service>agent(?:[-_][a-z]+)?)[-_](?P<number>[0-9]+)$")


def replica_of(name: str) -> tuple[str, int] | None:
    """Returns service and number of a container's DNS name, e.g. ("agent", 3).

    Args:
        name: "catenary-agent-3.catenary_internal" (compose v2) or "catenary_agent_3.…" (1.29).
    """
    found = _REPLICA.search(name.partition(".")[0])
    if found is None:
        return None
    return found["service"].replace("_", "-"), int(found["number"])


def settings_of(name: str, environment: MutableMapping[str, str]) -> None:
    """Fills in what follows from the container's DNS name, where nothing else was said."""
    replica = replica_of(name)
    host = name.partition(".")[0]
    agent = f"{replica[0]}-{replica[1]}" if replica else re.sub(r"[^A-Za-z0-9.-]", "-", host)
    environment.setdefault("CATENARY_AGENT_ID", agent)
    if environment.get("CATENARY_DEVICE") == "cuda":
        environment["CATENARY_DEVICE"] = f"cuda:{replica[1] - 1 if replica else 0}"


def command_of(environment: MutableMapping[str, str]) -> list[str]:
    """Returns the command that runs the agent, with a certificate if there is an authority."""
    agent = ["catenaryd", "agent"]
    authority = environment.pop("CATENARY_AUTHORITY", "")
    if not authority:
        return agent
    enrol = ["catenaryd", "enrol", "agent", environment["CATENARY_AGENT_ID"]]
    flags = [f"--authority={authority}", f"--token-file={TOKEN_FILE}", f"--out={CERTIFICATES}"]
    return [*enrol, *flags, "--", *agent]


def _own_name() -> str:
    """Returns what the engine's DNS calls this container's address; else the host's name."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        # /etc/hosts, which a usual look-up reads first, has nothing but the container's id.
        command = ["getent", "-s", "hosts:dns", "hosts", address]
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host
    return next(iter(found.stdout.split()[1:]), host)


if __name__ == "__main__":
    settings_of(_own_name(), os.environ)
    os.execvp("catenaryd", [*command_of(os.environ), *sys.argv[1:]])
