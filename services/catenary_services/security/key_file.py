"""The file of API keys, which holds hashes, never keys: reading, adding and revoking.

    {"keys": [{"name": "ci", "sha256": "<64 hex digits>", "scopes": ["infer:resnet", "view"],
               "max_priority": 0, "requests_per_s": 20, "burst": 40, "tokens_per_s": 5000,
               "token_burst": 50000, "share": 2.0, "expires": "2030-01-31T12:00:00Z"}]}

Only `name`, `sha256` and `scopes` are needed. Two entries may share a name, with the same limits:
keys are rotated by overlap.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from catenary_services.errors import InvalidInput
from catenary_services.security.key_limits import KeyLimits, expiry_of, limits_of

KEY_PREFIX = "ctn_"
"""Every key begins with this, so that secret scanners can find leaked ones."""

DIGEST_BYTES = 32
LARGEST_FILE_BYTES = 4 * 1024 * 1024
MOST_KEYS = 10_000
LONGEST_NAME = 128
"""The most characters of a key's name, which becomes a label of metrics and appears in logs."""
LONGEST_SCOPE = 256
_FIELD = "api_keys_file"
_KNOWN = frozenset(
    {
        "name",
        "sha256",
        "scopes",
        "max_priority",
        "requests_per_s",
        "burst",
        "tokens_per_s",
        "token_burst",
        "share",
        "expires",
    }
)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One checked entry of the file."""

    name: str
    digest: bytes
    scopes: frozenset[str]
    limits: KeyLimits
    expires_unix_ns: int | None


def read_keys(path: Path) -> tuple[StoredKey, ...]:
    """Returns the entries of a file.

    Raises:
        InvalidInput: The file cannot be read or is too large, or an entry is wrong.
    """
    entries = _entries(path)
    keys = tuple(_stored(entry, f"{_FIELD}.keys[{at}]") for at, entry in enumerate(entries))
    first: dict[str, int] = {}
    for at, key in enumerate(keys):
        before = first.setdefault(key.name, at)
        if keys[before].limits != key.limits:
            raise InvalidInput(
                f"{_FIELD}.keys[{at}]",
                f"has other limits than keys[{before}], which has the same name",
            )
    return keys


def add_key(
    path: Path, name: str, scopes: Iterable[str], limits: Mapping[str, object] | None = None
) -> str:
    """Adds a new key to the file at `path` (made if missing, readable by its owner only).

    Args:
        path: The file.
        name: Name of the key's holder.
        scopes: Scopes of the key.
        limits: Further fields of the entry, by their names in the file.

    Returns:
        The key, which cannot be recovered later.

    Raises:
        InvalidInput: The file is damaged, or a value is wrong.
    """
    entries: list[object] = []
    if path.exists():
        read_keys(path)
        entries = _entries(path)
    key = KEY_PREFIX + secrets.token_urlsafe(DIGEST_BYTES)
    entry: dict[str, object] = {"name": name, "sha256": digest_of(key).hex()}
    entry["scopes"] = sorted(set(scopes))
    entry |= {field: value for field, value in (limits or {}).items() if value is not None}
    _write(path, [*entries, entry])
    return key


def revoke_keys(path: Path, name: str, digest_prefix: str = "") -> int:
    """Removes the keys called `name` whose hash begins with `digest_prefix` from a file.

    Returns:
        The number of keys removed.

    Raises:
        InvalidInput: The file is damaged, or there is no such key.
    """
    keys = read_keys(path)
    gone = {
        at
        for at, key in enumerate(keys)
        if key.name == name and key.digest.hex().startswith(digest_prefix.lower())
    }
    if not gone:
        raise InvalidInput(_FIELD, f"has no key called {name!r} with such a hash")
    _write(path, [entry for at, entry in enumerate(_entries(path)) if at not in gone])
    return len(gone)


def describe_keys(path: Path) -> list[dict[str, object]]:
    """Returns what may be shown of every entry, with only the first digits of its hash.

    Raises:
        InvalidInput: The file is damaged.
    """
    now = datetime.now(UTC)
    shown: list[dict[str, object]] = []
    for key, entry in zip(read_keys(path), _entries(path), strict=True):
        expired = key.expires_unix_ns is not None and (
            key.expires_unix_ns <= now.timestamp() * 1_000_000_000
        )
        facts = {**entry, "sha256": key.digest.hex()[:12], "expired": expired}
        shown.append({"scopes": sorted(key.scopes), **facts})
    return shown


def digest_of(key: str) -> bytes:
    """Returns the SHA-256 of a key, which is what the file stores."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _entries(path: Path) -> list[Any]:
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise InvalidInput(_FIELD, f"is larger than {LARGEST_FILE_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(_FIELD, f"cannot be read: {error}") from error
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise InvalidInput(_FIELD, 'must be {"keys": [...]}')
    if len(entries) > MOST_KEYS:
        raise InvalidInput(_FIELD, f"has more than {MOST_KEYS} keys")
    return entries


def _stored(entry: object, field: str) -> StoredKey:
    if not isinstance(entry, dict):
        raise InvalidInput(field, "must be an object")
    for given in entry:
        if given not in _KNOWN:
            # Unknown names are refused, because a misspelt limit would be no limit.
            raise InvalidInput(f"{field}.{str(given)[:LONGEST_NAME]}", "is not known")
    name, digest, scopes = entry.get("name"), entry.get("sha256"), entry.get("scopes")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise InvalidInput(
            f"{field}.name", f"must be a text of 1 to {LONGEST_NAME} printable characters"
        )
    try:
        raw = bytes.fromhex(digest) if isinstance(digest, str) else b""
    except ValueError:
        raw = b""
    if len(raw) != DIGEST_BYTES:
        raise InvalidInput(f"{field}.sha256", "must be 64 hexadecimal digits")
    if not isinstance(scopes, list) or not all(
        isinstance(scope, str) and len(scope) <= LONGEST_SCOPE for scope in scopes
    ):
        raise InvalidInput(f"{field}.scopes", "must be a list of strings")
    limits, expires = limits_of(entry, field), expiry_of(entry, field)
    return StoredKey(name, raw, frozenset(scopes), limits, expires)


def _write(path: Path, entries: list[Any]) -> None:
    """Replaces the file atomically, so that a reader sees the old one or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        scratch.unlink(missing_ok=True)
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"keys": entries}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        read_keys(scratch)
        scratch.replace(path)
    except OSError as error:
        raise InvalidInput(_FIELD, f"cannot be written: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)
