"""API keys: the caller has 256 random bits, and the gateway only their SHA-256.

A slow hash protects guessable passwords. These keys cannot be guessed, and a check must not cost 50
ms of CPU at the gateway. The hash presented is compared with all stored ones in constant time, so
that timing tells neither which key matched nor how much of it was right.

The file (`key_file`) is examined again while the process runs: within `POLL_S` an added key is
known and a removed one refused. A file that is broken at that moment changes nothing, and is
logged.
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
"""The scope for inference with any model; `infer:<model>` allows one."""
SCOPE_VIEW = "view"
"""The scope for reading status, plan, sessions, traces and timelines."""
SCOPE_ADMIN = "admin"
"""The scope for changing plans, draining and deploying, and for all that `view` allows."""
SCOPE_ALL = "*"
"""The scope that allows everything."""

POLL_S = 1.0
"""Seconds between two looks at the file."""
_LONGEST_KEY = 512

_log = get_logger("catenary_services.security")
_Stamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller, with the scopes granted and the limits of the key."""

    name: str
    scopes: frozenset[str]
    limits: KeyLimits = USUAL

    def allows(self, scope: str) -> bool:
        """True for a scope that was granted by itself or as part of a wider one."""
        if not self.scopes.isdisjoint((scope, scope.partition(":")[0], SCOPE_ALL)):
            return True
        return scope == SCOPE_VIEW and SCOPE_ADMIN in self.scopes

    def require(self, scope: str) -> None:
        """Checks that `scope` is granted.

        Raises:
            PermissionDenied: It is not granted.
        """
        if not self.allows(scope):
            raise PermissionDenied(f"this key does not have the scope '{scope}'")

    def require_priority(self, priority: int) -> int:
        """Returns the priority of a request that asks for `priority`, or for none (0).

        A key whose limit is below 0 gets its limit if the request asks for none.

        Raises:
            PermissionDenied: The request asks for more than the limit.
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
    """Checks the keys that callers present. Without a file every caller is `ANYONE`."""

    def __init__(self, keys: Sequence[StoredKey] | None = None) -> None:
        self._path: Path | None = None
        self._stamp: _Stamp = None
        self.enabled = keys is not None
        """False if no keys are configured and everyone is admitted."""
        self._keys: tuple[_Known, ...] = tuple(map(_known, keys or ()))

    @property
    def names(self) -> frozenset[str]:
        """Names of the holders of all known keys."""
        return frozenset(known.principal.name for known in self._keys)

    @classmethod
    def load(cls, path: Path | None) -> ApiKeys:
        """Returns the keys in the file at `path`; disabled if `path` is None.

        Raises:
            InvalidInput: The file cannot be read or an entry is wrong. A configured but unreadable
                file never means "no keys needed".
        """
        if path is None:
            return cls()
        stamp = _stamp_of(path)
        keys = cls(read_keys(path))
        keys._path, keys._stamp = path, stamp
        return keys

    def refresh(self) -> bool:
        """Reads the file again if it has changed.

        Returns:
            True if the known keys have changed. A broken or missing file is logged once for each
                change
            of it, and the keys stay as they are.
        """
        if self._path is None:
            return False
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return False
        # The stamp is taken before the file is read, so that a later write is seen next time.
        self._stamp = stamp
        try:
            fresh = tuple(map(_known, read_keys(self._path)))
        except InvalidInput as error:
            _log.error("api_keys_not_reloaded", why=error.message, kept=len(self._keys))
            return False
        self._keys = fresh
        _log.info("api_keys_reloaded", keys=len(fresh))
        return True

    async def watch(self, poll_s: float = POLL_S) -> None:
        """Takes over changes of the file until cancelled."""
        while self._path is not None:
            await asyncio.sleep(poll_s)
            try:
                self.refresh()
            except Exception as error:  # nobody awaits this, and the next look must come
                _log.error("api_keys_watch_failed", exc_info=error)

    def check(self, presented: str | None) -> Principal:
        """Returns the caller who presented a key.

        Args:
            presented: The value of `Authorization` ("Bearer KEY"), the bare key, or None.

        Raises:
            Unauthenticated: There is no key, or it is unknown or has expired.
        """
        if not self.enabled:
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
