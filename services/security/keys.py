"""API keys: 256 random bits for the caller, only their SHA-256 for us.

A slow hash protects guessable passwords; these keys cannot be guessed, and a check must not cost
the door 50 ms of CPU. Every stored hash is compared in constant time, all of them every time, so
timing tells neither which key nor how much of one was right.

The file is JSON: `{"keys": [{"name": "ci", "sha256": "<hex>", "scopes": ["infer"]}]}`. Two entries
may share a name: keys are rotated by overlap.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.errors import InvalidInput, PermissionDenied, Unauthenticated

KEY_PREFIX = "ctn_"
"""Every key begins with it, so that secret scanners can find leaked ones."""

SCOPE_INFER = "infer"
"""Any model. `infer:<model>` allows one."""
SCOPE_ADMIN = "admin"
"""Plans, drain, deployments."""
SCOPE_ALL = "*"
"""Everything."""

_DIGEST_BYTES = 32
_LONGEST_KEY = 512


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls, and what they may do."""

    name: str
    scopes: frozenset[str]

    def allows(self, scope: str) -> bool:
        """True for a scope that was granted, itself or as a part of a wider one."""
        return not self.scopes.isdisjoint((scope, scope.partition(":")[0], SCOPE_ALL))

    def require(self, scope: str) -> None:
        """Returns if `scope` is granted.

        Raises:
            PermissionDenied: it is not.
        """
        if not self.allows(scope):
            raise PermissionDenied(f"this key does not have the scope '{scope}'")


ANYONE = Principal("anonymous", frozenset({SCOPE_ALL}))
"""The caller when no keys are configured."""


@dataclass(frozen=True, slots=True)
class _StoredKey:
    digest: bytes
    principal: Principal


class ApiKeys:
    """Checks presented keys. Without a file every caller is `ANYONE`."""

    def __init__(self, keys: Sequence[_StoredKey] | None = None) -> None:
        self._keys = None if keys is None else tuple(keys)

    @property
    def enabled(self) -> bool:
        """False if no keys are configured and everyone is let in."""
        return self._keys is not None

    @classmethod
    def load(cls, path: Path | None) -> ApiKeys:
        """Returns the keys in `path`; disabled if `path` is None.

        Raises:
            InvalidInput: the file cannot be read or an entry is wrong. A configured but unreadable
                file never means "no keys needed".
        """
        if path is None:
            return cls()
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInput("api_keys_file", f"cannot be read: {error}") from error
        entries = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise InvalidInput("api_keys_file", 'must be {"keys": [...]}')
        return cls([_stored_key(entry, f"keys[{at}]") for at, entry in enumerate(entries)])

    def check(self, presented: str | None) -> Principal:
        """Returns who presented this key.

        Args:
            presented: The value of `Authorization` ("Bearer KEY"), the bare key, or None.

        Raises:
            Unauthenticated: no key, or one nobody knows.
        """
        if self._keys is None:
            return ANYONE
        key = _bare(presented)
        if not key:
            raise Unauthenticated("no API key; send 'authorization: Bearer KEY'")
        digest = _digest(key)
        found: Principal | None = None
        for stored in self._keys:
            # No early exit: the time taken must not tell which entry matched.
            if hmac.compare_digest(stored.digest, digest):
                found = stored.principal
        if found is None:
            raise Unauthenticated("unknown API key")
        return found


def create_key(name: str, scopes: Iterable[str]) -> tuple[str, dict[str, object]]:
    """Returns a new key, shown once to its owner, and the entry to store for it."""
    key = KEY_PREFIX + secrets.token_urlsafe(_DIGEST_BYTES)
    return key, {"name": name, "sha256": _digest(key).hex(), "scopes": sorted(scopes)}


def add_key(path: Path, name: str, scopes: Iterable[str]) -> str:
    """Adds a new key to the file at `path` (made if missing, readable by its owner only).

    Returns:
        The key. It cannot be found out again later.
    """
    entries: list[object] = []
    if path.exists():
        ApiKeys.load(path)
        entries = json.loads(path.read_text(encoding="utf-8"))["keys"]
    key, entry = create_key(name, scopes)
    scratch = path.with_suffix(".new")
    scratch.touch(mode=0o600)
    scratch.write_text(json.dumps({"keys": [*entries, entry]}, indent=2), encoding="utf-8")
    scratch.replace(path)
    return key


def _bare(presented: str | None) -> str:
    text = (presented or "").strip()
    scheme, _, rest = text.partition(" ")
    bare = rest.strip() if scheme.lower() == "bearer" else text
    return bare if len(bare) <= _LONGEST_KEY else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _stored_key(entry: object, field: str) -> _StoredKey:
    if not isinstance(entry, dict):
        raise InvalidInput(f"api_keys_file.{field}", "must be an object")
    name, digest, scopes = entry.get("name"), entry.get("sha256"), entry.get("scopes")
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"api_keys_file.{field}.name", "must be a non-empty string")
    try:
        raw = bytes.fromhex(digest) if isinstance(digest, str) else b""
    except ValueError:
        raw = b""
    if len(raw) != _DIGEST_BYTES:
        raise InvalidInput(f"api_keys_file.{field}.sha256", "must be 64 hexadecimal digits")
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        raise InvalidInput(f"api_keys_file.{field}.scopes", "must be a list of strings")
    return _StoredKey(raw, Principal(name, frozenset(scopes)))
