"""Makes what the processes of a compose cluster trust each other by; can be run again any time.

    python -m setup_cluster              # once, before anything else starts
    python -m setup_cluster --every 21600    # for ever: certificates are renewed in time

Certificates go to one volume per role, so that no container sees another role's keys; the
authority's own key stays in a volume that only this container mounts. Then come the users of Redis
and the file of hashed API keys. Passwords and keys are secrets of the compose file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path("/catenary")
SECRETS = Path("/run/secrets")
AUTHORITY = ROOT / "authority"
ISSUED = ROOT / "issued"
"""One folder, a volume each, per role."""
ALIVE = Path("/tmp/alive")
REDIS_USERS = ("scheduler", "view", "health")
KEYS = {"compose-client": ("api_key", ["infer", "view"]), "compose-admin": ("admin_key", ["*"])}
"""Name in the file -> secret, scopes."""


def processes(environment: dict[str, str]) -> dict[str, list[str]]:
    """Returns, by role, what `catenaryd certs --process` is asked for."""
    agents = range(1, int(environment.get("CATENARY_MOST_AGENTS") or 16) + 1)
    gpus = range(1, int(environment.get("CATENARY_MOST_GPU_AGENTS") or 8) + 1)
    reached_by = environment.get("CATENARY_CERTIFICATE_NAMES") or "localhost,127.0.0.1"
    return {
        "gateway": [f"gateway:gateway-0,gateway,{reached_by}"],
        "scheduler": ["scheduler:scheduler-0", "scheduler:scheduler-1"],
        "agent": [f"agent:agent-{n}" for n in agents] + [f"agent:agent-gpu-{n}" for n in gpus],
        "operator": ["operator:compose"],
    }


def issue(environment: dict[str, str]) -> None:
    """Makes or renews every certificate and lays it into its role's volume."""
    cluster = environment.get("CATENARY_CLUSTER") or "main"
    wanted = processes(environment)
    base = ["certs", "--out", str(AUTHORITY), "--cluster", cluster, "--authority-days", "3650"]
    asked = [each for role in wanted.values() for each in role]
    flags = [flag for each in asked for flag in ("--process", each)]
    _catenaryd(*base, "--renew", *flags)
    # Redis reads its certificate when it starts, so it gets one for long.
    _catenaryd(*base, "--renew", "--days", "730", "--process", "redis:redis,redis")
    for role in (*wanted, "redis"):
        for file in sorted(AUTHORITY.glob(f"{role}-*.pem"), key=_key_first):
            _lay(file, ISSUED / role / file.name)
        _lay(AUTHORITY / "ca.pem", ISSUED / role / "ca.pem")


def redis_users(environment: dict[str, str]) -> None:
    """Writes the users Redis lets in, each with the hash of its password and its own rights."""
    cluster = environment.get("CATENARY_CLUSTER") or "main"
    flags = []
    for user in REDIS_USERS:
        flags += ["--password-file", f"catenary-{user}={SECRETS / f'redis_{user}_password'}"]
    text = _catenaryd("redis-acl", "--cluster", cluster, *flags)
    _write(ROOT / "redis" / "users.acl", text)


def api_keys() -> None:
    """Writes the hashes of the two keys that are secrets; keys that others added are kept."""
    file = ROOT / "keys" / "keys.json"
    kept = json.loads(file.read_text())["keys"] if file.exists() else []
    entries = [entry for entry in kept if entry["name"] not in KEYS]
    for name, (secret, scopes) in KEYS.items():
        key = (SECRETS / secret).read_text(encoding="utf-8").strip()
        digest = hashlib.sha256(key.encode()).hexdigest()
        entries.append({"name": name, "sha256": digest, "scopes": scopes})
    _write(file, json.dumps({"keys": entries}, indent=2) + "\n")


def _catenaryd(*arguments: str) -> str:
    done = subprocess.run(["catenaryd", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"catenaryd {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def _key_first(file: Path) -> tuple[bool, str]:
    return not file.stem.endswith("-key"), file.name


def _lay(source: Path, target: Path) -> None:
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    scratch = target.with_name(f".{target.name}.new")
    shutil.copy2(source, scratch)
    scratch.replace(target)


def _write(target: Path, text: str) -> None:
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return
    scratch = target.with_name(f".{target.name}.new")
    scratch.touch(mode=0o600)
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(target)


def main() -> None:
    """Does everything once, or every so many seconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=float, metavar="SECONDS", help="Go on, so often.")
    every = parser.parse_args().every
    environment = dict(os.environ)
    while True:
        issue(environment)
        redis_users(environment)
        api_keys()
        ALIVE.touch()
        if every is None:
            return
        time.sleep(every)


if __name__ == "__main__":
    main()
