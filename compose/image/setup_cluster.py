"""Makes what a compose cluster rests on before it starts; can be run again any time.

The authority, whose key stays in a volume that nobody else mounts but the service `authority`; the
certificate of Redis, which makes none itself; the users of Redis; the file of hashed API keys.
Passwords and keys are secrets of the compose file. Processes get certificates from the authority,
each for a key of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path("/catenary")
SECRETS = Path("/run/secrets")
AUTHORITY = ROOT / "authority"
REDIS = ROOT / "issued" / "redis"
REDIS_USERS = ("scheduler", "view", "health")
KEYS = {"compose-client": ("api_key", ["infer", "view"]), "compose-admin": ("admin_key", ["*"])}
"""Name in the file -> secret, scopes."""
REDIS_DAYS = 730
"""Redis reads its certificate when it starts, so it gets one for long."""


def issue(cluster: str) -> None:
    """Makes the authority, and the certificate of Redis, unless they are there and good."""
    base = ["certs", "--out", str(AUTHORITY), "--cluster", cluster, "--authority-days", "3650"]
    _catenaryd(*base, "--renew", "--days", str(REDIS_DAYS), "--process", "redis:redis,redis")
    for name in ("redis-redis-key.pem", "redis-redis.pem"):
        _write(REDIS / name, (AUTHORITY / name).read_text(encoding="ascii"))
    authorities = (AUTHORITY / "ca.pem").read_text(encoding="ascii")
    for folder in (REDIS, ROOT / "keys"):
        _write(folder / "ca.pem", authorities)


def redis_users(cluster: str) -> None:
    """Writes the users Redis lets in, each with the hash of its password and its own rights."""
    flags = []
    for user in REDIS_USERS:
        flags += ["--password-file", f"catenary-{user}={SECRETS / f'redis_{user}_password'}"]
    _write(ROOT / "redis" / "users.acl", _catenaryd("redis-acl", "--cluster", cluster, *flags))


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


def _write(target: Path, text: str) -> None:
    """Replaces a file that the group of all containers may read, where its volume is mounted."""
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return
    scratch = target.with_name(f".{target.name}.new")
    scratch.unlink(missing_ok=True)
    scratch.touch(mode=0o600)
    scratch.chmod(0o640)
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(target)


def main() -> None:
    """Does everything once."""
    cluster = os.environ.get("CATENARY_CLUSTER") or "main"
    issue(cluster)
    redis_users(cluster)
    api_keys()


if __name__ == "__main__":
    main()
