"""Tokens by which machines join: random, short-lived, counted, and stored as hashes.

    {"tokens": [{"id": "k3x9w2ab", "sha256": "<64 hex digits>", "uses": 1, "expires": 1795..,
                 "used": [{"machine": "pi4", "request": "<64 hex digits>", "at": 1795..}],
                 "revoked": false}]}

Several processes change the file (`catenaryd token`, and the host that counts uses), each under a
lock, and each by replacing it: what was counted is on the disk before a certificate is made.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from catenary_services.errors import InvalidInput, PermissionDenied
from catenaryd.enrolment.join_line import TOKEN
from catenaryd.enrolment.private_files import read_json, write_json

USUAL_LIFE_S = 3_600.0
LONGEST_LIFE_S = 30 * 86_400.0
MOST_USES = 1_000
MOST_TOKENS = 1_000
_KEPT_S = 86_400.0
"""Seconds for which a token that has ended can still be listed."""
_ALPHABET = string.ascii_lowercase + string.digits
_ID_CHARACTERS, _SECRET_CHARACTERS = 8, 32
_FIELD = "join tokens"


@dataclass(frozen=True, slots=True)
class TokenUse:
    """One machine that joined by a token."""

    machine: str
    request: str
    """Digest of what it asked for; the same request again, after a lost answer, is no second
    use."""
    at: float


@dataclass(frozen=True, slots=True)
class JoinToken:
    """One token, without its secret; times are in seconds since 1970."""

    id: str
    sha256: str
    uses: int
    expires: float
    used: tuple[TokenUse, ...] = ()
    revoked: bool = False

    def state(self, now: float) -> str:
        """Returns "revoked", "expired", "used" or "good"."""
        if self.revoked:
            return "revoked"
        if now >= self.expires:
            return "expired"
        return "used" if len(self.used) >= self.uses else "good"


class JoinTokens:
    """The file of a cluster's tokens."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        """Names the file, which `create` makes; `clock` tells seconds since 1970."""
        self._file = file
        self._clock = clock

    def create(self, uses: int = 1, life_s: float = USUAL_LIFE_S) -> str:
        """Returns a new token, "id.secret", which cannot be recovered later.

        Raises:
            InvalidInput: A number is out of range, there are too many tokens, or the file is
                damaged.
        """
        if not 1 <= uses <= MOST_USES:
            raise InvalidInput("uses", f"must be from 1 to {MOST_USES}")
        if not 1 <= life_s <= LONGEST_LIFE_S:
            raise InvalidInput("ttl", f"must be from 1 s to {LONGEST_LIFE_S / 86_400:.0f} days")
        secret = _random(_SECRET_CHARACTERS)
        with self._changing() as tokens:
            if len(tokens) >= MOST_TOKENS:
                raise InvalidInput(_FIELD, f"there are {MOST_TOKENS} already")
            identifier = _random(_ID_CHARACTERS)
            while identifier in tokens:
                identifier = _random(_ID_CHARACTERS)
            tokens[identifier] = JoinToken(
                identifier, _digest(secret).hex(), uses, self._clock() + life_s
            )
        return f"{identifier}.{secret}"

    def revoke(self, identifier: str) -> None:
        """Ends a token now, named by its id or by all of it.

        Raises:
            InvalidInput: There is none with this id.
        """
        identifier = identifier.partition(".")[0]
        with self._changing() as tokens:
            if identifier not in tokens:
                raise InvalidInput("token", f"there is none with the id {identifier[:64]!r}")
            tokens[identifier] = replace(tokens[identifier], revoked=True)

    def list(self) -> list[tuple[JoinToken, str]]:
        """Returns all tokens with their states, the one that ends last first."""
        now = self._clock()
        found = sorted(self._read().values(), key=lambda each: -each.expires)
        return [(each, each.state(now)) for each in found]

    def check(self, token: str, request: str) -> None:
        """Checks that a machine may join by a token, and counts nothing.

        Raises:
            PermissionDenied: It may not. Whoever does not know the secret learns nothing.
        """
        self._checked(self._read(), token, request)

    def use(self, token: str, machine: str, request: str) -> None:
        """Counts a use of a token, before its certificates are made.

        Args:
            token: The token.
            machine: The machine that joins.
            request: Digest of what it asks for: the same again counts once.

        Raises:
            PermissionDenied: It is unknown, revoked, expired or used up.
        """
        with self._changing() as tokens:
            known = self._checked(tokens, token, request)
            if all(each.request != request for each in known.used):
                use = TokenUse(machine, request, self._clock())
                tokens[known.id] = replace(known, used=(*known.used, use))

    def _checked(self, tokens: dict[str, JoinToken], token: str, request: str) -> JoinToken:
        identifier, _, secret = token.partition(".")
        known = tokens.get(identifier)
        # The comparison is made for unknown ids, too: the time taken tells nothing.
        wanted = bytes.fromhex(known.sha256) if known is not None else bytes(32)
        is_right = hmac.compare_digest(wanted, _digest(secret))
        if known is None or not is_right or TOKEN.fullmatch(token) is None:
            raise PermissionDenied("this cluster knows no such token")
        state = known.state(self._clock())
        is_repeated = any(each.request == request for each in known.used)
        if state == "good" or (state == "used" and is_repeated):
            return known
        why = {
            "revoked": "was revoked",
            "expired": "has expired",
            "used": "was used as often as it may be",
        }[state]
        raise PermissionDenied(
            f"the token {known.id} {why}; `catenaryd token create` on the host makes another"
        )

    @contextmanager
    def _changing(self) -> Iterator[dict[str, JoinToken]]:
        """Gives the tokens to change, and writes them unless the block raises."""
        folder = self._file.parent
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / f".{self._file.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = self._read()
            yield tokens
            oldest = self._clock() - _KEPT_S
            kept = [asdict(each) for each in tokens.values() if each.expires > oldest]
            write_json(self._file, {"tokens": kept})
        finally:
            os.close(lock)

    def _read(self) -> dict[str, JoinToken]:
        # A damaged file never means "no token was used": it raises.
        tokens = read_json(self._file, lambda found: [_token(each) for each in found["tokens"]])
        return {each.id: each for each in tokens or ()}


def _token(entry: Any) -> JoinToken:
    """Returns a checked entry of the file.

    Raises:
        ValueError, TypeError or KeyError: It has another form.
    """
    made = JoinToken(**{**entry, "used": tuple(TokenUse(**each) for each in entry["used"])})
    numbers = (made.uses, made.expires, *(each.at for each in made.used))
    texts = (made.id, made.sha256, *(each.request for each in made.used))
    if (
        not all(isinstance(each, int | float) for each in numbers)
        or not all(isinstance(each, str) for each in texts)
        or not isinstance(made.revoked, bool)
        or len(bytes.fromhex(made.sha256)) != hashlib.sha256().digest_size
    ):
        raise ValueError("an entry has values of other types")
    return made


def _random(characters: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(characters))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
