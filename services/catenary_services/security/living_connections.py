"""Living TLS connections, whose peers' certificates are looked at again and again.

OpenSSL verifies a certificate once, at the handshake. A connection that goes on for weeks outlives
what it was verified by: the certificate ends, is revoked, or its authority is trusted no more. So
whoever makes or accepts a connection with certificates registers it, and those whose peers would
not be let in again are closed when the files change, and every minute. An honest peer connects
again with what it holds by then. A change of the authority concerns everybody, so those connections
are closed a few at a time: the cluster serves meanwhile.

Lists of revoked certificates (CRLs, PEM) stand in the file of the authorities, beside the authority
that signed them: they reach every process in the way the authorities do.

What reads certificates is imported where it is needed: most processes of an open cluster never do.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from catenary_services.errors import InvalidInput, Unauthenticated
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from cryptography import x509

SWEEP_S = 60.0
"""Seconds after which certificates are looked at again though no file has changed."""
TURNS = 5
"""Each sweep ends one in so many of the connections that are left and that a change of the
authority ends."""
MOST_LISTS = 64
_FEW = 64
_LIST = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)

_log = get_logger("catenary_services.security")


@dataclass(frozen=True, slots=True)
class TrustedAuthorities:
    """The authorities whose certificates are taken, and what they have revoked."""

    certificates: tuple[x509.Certificate, ...] = ()
    revoked: frozenset[tuple[bytes, int]] = frozenset()
    """Authority (by `fingerprint`) and serial number of each certificate."""
    number: int = 0
    """A number that grows whenever the files are read again."""


class _Refusal(StrEnum):
    """The reason why a peer would not be let in again; what is said of its certificate."""

    ENDED = "has ended"
    REVOKED = "was revoked"
    UNTRUSTED = "is of an authority that is not trusted any more"
    REPLACED = "may be of an authority that was replaced"


_OF_EVERYBODY = (_Refusal.UNTRUSTED, _Refusal.REPLACED)


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    serial: int
    ends: dt.datetime
    signer: bytes | None
    """The fingerprint of the authority that signed; None if an intermediate one did, which only
    the handshake knew."""
    number: int
    """The number of the files at the handshake."""


class LivingConnections:
    """The connections of a process that were let in by certificates. For one event loop."""

    def __init__(self) -> None:
        self._peers: dict[asyncio.BaseTransport, _Peer] = {}
        self._prune_at = _FEW
        """The number of connections at which those that are over are looked for."""
        self._swept: tuple[int, float] = (0, 0.0)
        """Number of the files, and time of the loop, at the last sweep."""

    def __len__(self) -> int:
        """Returns the number of connections that are registered."""
        return len(self._peers)

    def register(
        self, transport: asyncio.BaseTransport, certificate: bytes, trust: TrustedAuthorities
    ) -> Callable[[], None]:
        """Notes a connection right after its handshake; returns what takes it off again.

        One that is over is taken off without it, at the next sweep.

        Args:
            transport: The connection.
            certificate: The peer's certificate, DER, which the handshake has verified.
            trust: What is trusted now.

        Raises:
            Unauthenticated: The certificate was revoked, which the handshake does not notice; the
                connection is closed.
        """
        peer = _peer_of(certificate, trust)
        why = _refusal(peer, trust, dt.datetime.now(dt.UTC))
        if why is not None:
            _close(transport)
            raise Unauthenticated(f"the certificate of {peer.name} {why}")
        if len(self._peers) >= self._prune_at:  # many have come since the last sweep
            self._prune()
        self._peers[transport] = peer
        return partial(self._forget, transport)

    def sweep(self, trust: TrustedAuthorities) -> None:
        """Closes connections of peers that are not to be trusted any more.

        It costs next to nothing unless the files have changed or a minute has passed.
        """
        self._prune()
        now_s = asyncio.get_running_loop().time()
        number, then_s = self._swept
        if trust.number == number and now_s - then_s < SWEEP_S:
            return
        now = dt.datetime.now(dt.UTC)
        outdated = []
        for transport, peer in list(self._peers.items()):
            why = _refusal(peer, trust, now)
            if why in _OF_EVERYBODY:
                outdated.append((transport, why))
            elif why is not None:
                self._end(transport, why)
        at_once = math.ceil(len(outdated) / TURNS)
        for transport, why in outdated[:at_once]:
            self._end(transport, why)
        if len(outdated) == at_once:
            self._swept = (trust.number, now_s)

    def _forget(self, transport: asyncio.BaseTransport) -> None:
        self._peers.pop(transport, None)

    def _prune(self) -> None:
        """Forgets connections that are over."""
        for transport in [each for each in self._peers if each.is_closing()]:
            del self._peers[transport]
        self._prune_at = max(_FEW, 2 * len(self._peers))

    def _end(self, transport: asyncio.BaseTransport, why: _Refusal) -> None:
        peer = self._peers.pop(transport)
        _log.warning("connection_ended", peer=peer.name, why=f"its certificate {why}")
        _close(transport)


def fingerprint(certificate: x509.Certificate) -> bytes:
    """Returns the SHA-256 of a certificate."""
    from cryptography.hazmat.primitives import hashes

    return certificate.fingerprint(hashes.SHA256())


def peer_certificate(connection: object) -> bytes | None:
    """Returns the certificate of the other side, DER, by the `ssl_object` of a connection."""
    found = getattr(connection, "getpeercert", None)
    shown = found(binary_form=True) if found is not None else None
    return shown if isinstance(shown, bytes) else None


def revocation_lists(pem: bytes) -> list[x509.CertificateRevocationList]:
    """Returns the lists of revoked certificates that stand in the file of the authorities.

    Raises:
        InvalidInput: One cannot be read, or they are too many.
    """
    from cryptography import x509

    from catenary_services.security.x509 import UNREADABLE

    found = _LIST.findall(pem)
    if len(found) > MOST_LISTS or len(found) != pem.count(b"-----BEGIN X509 CRL-----"):
        raise InvalidInput(
            "tls_ca_file", f"holds broken lists of revoked ones, or over {MOST_LISTS}"
        )
    try:
        return [x509.load_pem_x509_crl(each) for each in found]
    except UNREADABLE as error:
        raise InvalidInput("tls_ca_file", f"a list of revoked ones: {error}") from error


def revoked_by(
    authorities: Iterable[x509.Certificate], lists: Iterable[x509.CertificateRevocationList]
) -> frozenset[tuple[bytes, int]]:
    """Returns what authorities have revoked; a list that none of them signed counts for nothing."""
    lists = list(lists)
    return frozenset(
        (fingerprint(authority), each.serial_number)
        for authority in authorities
        for revoked in lists
        if _is_of(revoked, authority)
        for each in revoked
    )


def _is_of(revoked: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    from catenary_services.security.x509 import UNREADABLE

    try:
        return revoked.issuer == authority.subject and revoked.is_signature_valid(
            authority.public_key()  # type: ignore[arg-type]  # others raise TypeError
        )
    except UNREADABLE:
        return False


def _peer_of(certificate: bytes, trust: TrustedAuthorities) -> _Peer:
    from cryptography import x509

    from catenary_services.security.x509 import UNREADABLE, identity_of, is_signed_by

    try:
        read = x509.load_der_x509_certificate(certificate)
        who = identity_of(read)
        name = str(who) if who is not None else read.subject.rfc4514_string()[:128]
        signer = next((each for each in trust.certificates if is_signed_by(read, each)), None)
        return _Peer(
            name,
            read.serial_number,
            read.not_valid_after_utc,
            fingerprint(signer) if signer is not None else None,
            trust.number,
        )
    except UNREADABLE as error:
        raise Unauthenticated("the certificate of the other side cannot be read") from error


def _refusal(peer: _Peer, trust: TrustedAuthorities, now: dt.datetime) -> _Refusal | None:
    """Returns why a peer would not be let in now; None if it would."""
    if peer.ends <= now:
        return _Refusal.ENDED
    if peer.signer is None:
        # Whether its authority is still there, a new handshake says.
        return _Refusal.REPLACED if peer.number != trust.number else None
    if (peer.signer, peer.serial) in trust.revoked:
        return _Refusal.REVOKED
    if all(fingerprint(each) != peer.signer for each in trust.certificates):
        return _Refusal.UNTRUSTED
    return None


def _close(transport: asyncio.BaseTransport) -> None:
    """Drops a connection; transports of uvloop are of no class of asyncio's."""
    getattr(transport, "abort", transport.close)()
