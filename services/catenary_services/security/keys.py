"""API keys: 256 random bits for the caller, only their SHA-256 for us.

A slow hash protects guessable passwords; these keys cannot be guessed, and a check must not cost
the endpoint 50 ms of CPU. Every stored hash is compared in constant time, all of them every time,
so timing tells neither which key nor how much of one was right.

The file (`key_file`) is looked at again while the process runs: a key that was added is known, one
that was removed is refused, within `POLL_S`. A file that is broken at that moment changes nothing
and is logged.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catenary_services.errors import InvalidInput, PermissionDenied, Unauthenticated
from catenary_services.log import get_logger
from catenary_services.security.key_file import StoredKey, add_key, digest_of, read_keys
from catenary_services.security.key_limits import UNLIMITED, USUAL, KeyLimits

__all__ = [
    "ANYONE",
    "POLL_S",
    "SCOPE_ADMIN",
    "SCOPE_ALL",
    "SCOPE_INFER",
    "SCOPE_VIEW",
    "ApiKeys",
    "Principal",
    "add_key",
]

SCOPE_INFER = "infer"
"""Any model. `infer:<model>` allows one."""
SCOPE_VIEW = "view"
"""Status, plan, sessions, traces and timelines; nothing is changed."""
SCOPE_ADMIN = "admin"
"""Plans, drain, deployments, and everything that `view` allows."""
SCOPE_ALL = "*"
"""Everything."""

POLL_S = 1.0
"""How often the file is looked at."""
_LONGEST_KEY = 512

_log = get_logger("catenary_services.security")
_Stamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls, what they may do, and how much of it."""

    name: str
    scopes: frozenset[str]
    limits: KeyLimits = USUAL

    def allows(self, scope: str) -> bool:
        """True for a scope that was granted, itself or as a part of a wider one."""
        if not self.scopes.isdisjoint((scope, scope.partition(":")[0], SCOPE_ALL)):
            return True
        return scope == SCOPE_VIEW and SCOPE_ADMIN in self.scopes

    def require(self, scope: str) -> None:
        """Returns if `scope` is granted.

        Raises:
            PermissionDenied: it is not.
        """
        if not self.allows(scope):
            raise PermissionDenied(f"this key does not have the scope '{scope}'")

    def require_priority(self, priority: int) -> int:
        """Returns the priority a request gets that asks for this one, or for none (0).

        A key whose limit is below 0 gets its limit if it asks for nothing.

        Raises:
            PermissionDenied: it asks for more than it may.
        """
        most = self.limits.max_priority
        if priority > most and priority != 0:
            raise PermissionDenied(
                f"this key may not ask for priority {priority}: its max_priority is {most}"
            )
        return min(priority, most)


ANYONE = Principal("anonymous", frozenset({SCOPE_ALL}), UNLIMITED)
"""The caller when no keys are configured."""


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    principal: Principal
    expires_unix_ns: int | None


class ApiKeys:
    """Checks presented keys. Without a file every caller is `ANYONE`."""

    def __init__(self, keys: Sequence[StoredKey] | None = None) -> None:
        self._path: Path | None = None
        self._stamp: _Stamp = None
        self._keys: tuple[_Known, ...] | None = None
        if keys is not None:
            self._keys = tuple(map(_known, keys))

    @property
    def enabled(self) -> bool:
        """False if no keys are configured and everyone is let in."""
        return self._keys is not None

    @property
    def names(self) -> frozenset[str]:
        """Whose keys are known."""
        return frozenset(known.principal.name for known in self._keys or ())

    @classmethod
    def load(cls, path: Path | None) -> ApiKeys:
        """Returns the keys in `path`; disabled if `path` is None.

        Raises:
            InvalidInput: the file cannot be read or an entry is wrong. A configured but unreadable
                file never means "no keys needed".
        """
        if path is None:
            return cls()
        stamp = _stamp_of(path)
        keys = cls(read_keys(path))
        keys._path, keys._stamp = path, stamp
        return keys

    def refresh(self) -> bool:
        """Looks whether the file has changed, and takes it up if it can be read.

        Returns:
            True if other keys are known now. A broken or missing file is logged, once for every
            change of it, and the keys stay as they are.
        """
        if self._path is None:
            return False
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return False
        # Before it is read: what is written meanwhile is found the next time.
        self._stamp = stamp
        try:
            fresh = tuple(map(_known, read_keys(self._path)))
        except InvalidInput as error:
            _log.error("api_keys_not_reloaded", why=error.message, kept=len(self._keys or ()))
            return False
        self._keys = fresh
        _log.info("api_keys_reloaded", keys=len(fresh))
        return True

    async def watch(self, poll_s: float = POLL_S) -> None:
        """Takes up changes of the file until cancelled."""
        while self._path is not None:
            await asyncio.sleep(poll_s)
            try:
                self.refresh()
            except Exception as error:  # nobody waits for this: the next look must come
                _log.error("api_keys_watch_failed", exc_info=error)

    def check(self, presented: str | None) -> Principal:
        """Returns who presented this key.

        Args:
            presented: The value of `Authorization` ("Bearer KEY"), the bare key, or None.

        Raises:
            Unauthenticated: no key, one nobody knows, or one that has expired.
        """
        if self._keys is None:
            return ANYONE
        key = _bare(presented)
        if not key:
            raise Unauthenticated("no API key; send 'authorization: Bearer KEY'")
        digest = digest_of(key)
        found: _Known | None = None
        for known in self._keys:
            # No early exit: the time taken must not tell which entry matched.
            if hmac.compare_digest(known.digest, digest):
                found = known
        if found is None:
            raise Unauthenticated("unknown API key")
        if found.expires_unix_ns is not None and time.time_ns() >= found.expires_unix_ns:
            raise Unauthenticated("this API key has expired")
        return found.principal


def _known(key: StoredKey) -> _Known:
    return _Known(key.digest, Principal(key.name, key.scopes, key.limits), key.expires_unix_ns)


def _stamp_of(path: Path) -> _Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # A file that is replaced has another inode, even within one tick of the clock.
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _bare(presented: str | None) -> str:
    text = (presented or "").strip()
    scheme, _, rest = text.partition(" ")
    bare = rest.strip() if scheme.lower() == "bearer" else text
    return bare if len(bare) <= _LONGEST_KEY else ""
