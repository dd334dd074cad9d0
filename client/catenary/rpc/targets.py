"""The gateways of one cluster that a client may talk to, and the choice among them.

A client stays with one gateway (traces and recent requests are known where a request was served)
until that gateway cannot be reached or says that it is going. Then the client turns to the next
one. Clients begin with a random gateway, so that they spread over all of them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

from catenary.errors import InvalidInputError
from catenary.rpc.connection import Connection

Addresses = str | Sequence[str]
"""One target, several with commas between them, or a sequence of them."""

_LISTS = ("ipv4:", "ipv6:")
"""Schemes of gRPC whose targets may themselves be lists."""


class Targets:
    """The connections a client chooses from; safe to use from several threads."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._all = tuple(connections)
        self._at = random.randrange(len(self._all))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def current(self) -> Connection:
        """The connection that calls use now."""
        return self._all[self._at]

    @property
    def goes_on(self) -> bool:
        """True if a call that its gateway did not finish is sent again."""
        return len(self._all) > 1 or self.current.retry.attempts > 1

    def leave(self, connection: Connection) -> None:
        """Turns to the next connection, unless another call has done so already."""
        with self._lock:
            if self._all[self._at] is connection:
                self._at = (self._at + 1) % len(self._all)


def targets_of(common: Connection, targets: Addresses, admin_targets: Addresses | None) -> Targets:
    """Returns connections to `targets` with the settings of `common`, except for the addresses.

    Raises:
        InvalidInputError: There is no target, one may not be addressed unencrypted, or the admin
            targets are neither one for all nor one for each.
    """
    addresses = split(targets)
    if not addresses:
        raise InvalidInputError.at("target", "is empty")
    admins: Sequence[str | None] = [None] if admin_targets is None else split(admin_targets)
    if len(admins) not in (1, len(addresses)):
        raise InvalidInputError.at(
            "admin_target", f"has {len(admins)} addresses for {len(addresses)} targets"
        )
    if len(admins) == 1:
        admins = list(admins) * len(addresses)
    return Targets(
        [
            replace(common, target=target, admin_target=admin)
            for target, admin in zip(addresses, admins, strict=True)
        ]
    )


def split(targets: Addresses) -> list[str]:
    """Returns every single target, e.g. "a:8001, b:8001" as two."""
    if not isinstance(targets, str):
        return list(targets)
    if targets.startswith(_LISTS):
        return [targets]
    return [part.strip() for part in targets.split(",") if part.strip()]
