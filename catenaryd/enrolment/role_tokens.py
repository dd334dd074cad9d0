"""Tokens of roles, by which the processes of a cluster in containers get their certificates.

A token is "role.secret". Containers of one role share it, and unlike a join token it is not used
up: a pod that is made anew enrols again. The secret works both ways: the authority proves by it
that it is the right one, since a container has no join line with the digest of a key that was not
there yet when it was described.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from catenary_services.bounded_files import read_bounded
from catenary_services.errors import InvalidInput, PermissionDenied
from catenary_services.security.identity import Role

ROLES = (Role.GATEWAY, Role.SCHEDULER, Role.AGENT, Role.REDIS)
"""The roles whose processes may enrol; operators are people, who are given certificates."""
_SECRET = re.compile(r"[a-z0-9]{32,96}")
_LARGEST_BYTES = 256


class RoleTokens:
    """The secrets that an authority knows, one a role."""

    def __init__(self, secrets: Mapping[Role, str]) -> None:
        self._secrets = dict(secrets)

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(self._secrets)

    def role_of(self, token: str) -> Role:
        """Returns the role of a token.

        Raises:
            PermissionDenied: It is none; whoever does not know the secret learns nothing.
        """
        identifier, _, secret = token.partition(".")
        known = self._secret_of(identifier)
        if not hmac.compare_digest((known or "").encode(), secret.encode()) or not known:
            raise PermissionDenied("this cluster knows no such token")
        return Role(identifier)

    def proof(self, identifier: str, nonce: bytes, authorities: bytes) -> bytes:
        """Returns the proof for the holder of a token; empty if there is no such token."""
        secret = self._secret_of(identifier)
        return proof_of(secret, nonce, authorities) if secret and nonce else b""

    def _secret_of(self, identifier: str) -> str | None:
        return next((text for role, text in self._secrets.items() if role == identifier), None)


def proof_of(secret: str, nonce: bytes, authorities: bytes) -> bytes:
    """Returns what proves that whoever sends `authorities` knows the secret."""
    said = b"catenary authorities\0" + hashlib.sha256(nonce).digest()
    return hmac.digest(secret.encode(), said + hashlib.sha256(authorities).digest(), "sha256")


def read_secret(file: Path) -> str:
    """Returns the secret in a file.

    Raises:
        InvalidInput: The file cannot be read, or holds something else.
    """
    try:
        text = read_bounded(file, _LARGEST_BYTES).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise InvalidInput("token_file", f"{file} cannot be read: {error}") from error
    if _SECRET.fullmatch(text) is None:
        raise InvalidInput("token_file", f"{file}: 32 to 96 small letters and digits, at random")
    return text
