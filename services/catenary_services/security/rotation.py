"""Certificate files that may be replaced while a process runs.

The files are examined whenever a connection is made (three `stat` calls) and every few seconds. New
ones replace the old if they match each other, are valid now and name the same identity. Otherwise
the process keeps what it has and logs that once. A connection keeps what it was made with, as long
as its peer would be let in again (`living_connections`).

What reads certificates takes 8 MB, so it is imported when the first file is read.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from catenary_services.errors import InvalidInput
from catenary_services.log import get_logger
from catenary_services.security.identity import Identity
from catenary_services.security.living_connections import (
    LivingConnections,
    TrustedAuthorities,
    peer_certificate,
    revocation_lists,
    revoked_by,
)

if TYPE_CHECKING:
    from cryptography import x509

POLL_S = 2.0
WARN_SHARE_LEFT = 0.2
"""A certificate with a smaller share of its validity left should have been renewed."""
_WARN_EVERY_S = 3_600.0
_Stamp = tuple[tuple[int, int, int], ...]

_log = get_logger("catenary_services.security")


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The content of the files when they were last good."""

    chain: bytes | None
    key: bytes | None
    authorities: bytes | None
    certificate: x509.Certificate | None
    """The first certificate of `chain`."""
    ends: dt.datetime | None
    """The end of validity of the certificate or of the authority that signed it, whichever is
    first."""
    identity: Identity | None
    number: int = 0
    """A number that grows whenever the files are read again."""
    trust: TrustedAuthorities = field(default_factory=TrustedAuthorities)
    """The authorities and revocations in `authorities`."""


class WatchedFiles:
    """Certificate, key and authorities of one process.

    Thread-safe, because files are read and examined on several threads; but for the living
    connections, which belong to the event loop.
    """

    def __init__(self, cert: Path | None, key: Path | None, authorities: Path | None) -> None:
        """Names the files; nothing is read before `current`."""
        self._files = (cert, key, authorities)
        self._lock = threading.Lock()
        self._material: TlsMaterial | None = None
        self._seen: _Stamp = ()
        self._warned_s = -_WARN_EVERY_S
        self._contexts: dict[tuple[bool, bool, bool, str | None], tuple[int, ssl.SSLContext]] = {}
        """Contexts by kind, each with the number of the material it was made of."""
        self._living = LivingConnections()

    def current(self) -> TlsMaterial:
        """Returns the material in force, after reading files that changed if they are good.

        Raises:
            InvalidInput: The files were never good.
        """
        with self._lock:
            return self._current()

    def context(
        self,
        *,
        server: bool,
        checks_name: bool = True,
        needs_client: bool = True,
        speaks: str | None = None,
    ) -> ssl.SSLContext:
        """Returns an SSL context of the material in force; a new one after each change.

        Args:
            server: True for listening, False for connecting.
            checks_name: Whether a server's certificate must have the name by which the server is
                called.
            needs_client: Whether a client must show a certificate; otherwise it may.
            speaks: The protocol by its name for ALPN; None to name none.

        Raises:
            InvalidInput: The files were never good.
        """
        with self._lock:
            material = self._current()
            kind = (server, checks_name, needs_client, speaks)
            made = self._contexts.get(kind)
            if made is None or made[0] != material.number:
                made = material.number, _context_of(material, server=server)
                made[1].check_hostname = checks_name and not server
                if server and not needs_client:
                    made[1].verify_mode = ssl.CERT_OPTIONAL
                if speaks is not None:
                    made[1].set_alpn_protocols([speaks])
                self._contexts[kind] = made
            return made[1]

    def listening_context(self, speaks: str | None = None) -> ssl.SSLContext:
        """Returns a context for a listening socket, which always uses the material in force.

        A server keeps the context it was started with. This one therefore passes every new
        connection on to the newest context; OpenSSL calls back for that whether or not the client
        names a server.

        Args:
            speaks: The protocol by its name for ALPN; None to name none.

        Raises:
            InvalidInput: The files are not good.
        """
        outer = _context_of(self.current(), server=True)
        if speaks is not None:
            outer.set_alpn_protocols([speaks])

        def hand_over(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            connection.context = self.context(server=True, speaks=speaks)

        outer.sni_callback = hand_over
        return outer

    def seconds_left(self) -> float:
        """Returns the seconds for which the material is valid; logs a warning if they are few."""
        material = self.current()
        if material.certificate is None or material.ends is None:
            return float("inf")
        now = dt.datetime.now(dt.UTC)
        left = material.ends - now
        life = material.ends - material.certificate.not_valid_before_utc
        if left < WARN_SHARE_LEFT * life and time.monotonic() - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            _log.warning("certificate_ends_soon", file=str(self._files[0]), hours_left=left / _HOUR)
        return left.total_seconds()

    def register(self, transport: asyncio.BaseTransport) -> Callable[[], None]:
        """Notes a connection that was made with these files; returns what takes it off again.

        From then on it is closed once its peer would not be let in any more. A connection whose
        peer has shown no certificate is not noted.

        Raises:
            Unauthenticated: The peer's certificate was revoked; the connection is closed.
        """
        shown = peer_certificate(transport.get_extra_info("ssl_object"))
        if shown is None:
            return _nothing
        return self._living.register(transport, shown, self.current().trust)

    async def watch(self) -> None:
        """Examines the files, and the living connections, every few seconds until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.seconds_left()
            self._living.sweep(self.current().trust)

    # ---- private; the lock is held ----

    def _current(self) -> TlsMaterial:
        stamp = tuple(_stamp(file) for file in self._files if file is not None)
        known = self._material
        if known is not None and stamp == self._seen:
            return known
        try:
            fresh = self._read(known)
        except InvalidInput as error:
            if known is None:
                raise
            self._seen = stamp  # logged once for each change
            _log.warning("certificate_kept", error=error.message)
            return known
        self._seen = stamp
        self._material = fresh
        if known is not None:
            ends = fresh.ends.isoformat() if fresh.ends else ""
            _log.info("certificate_taken_up", file=str(self._files[0] or ""), ends=ends)
        return fresh

    def _read(self, known: TlsMaterial | None) -> TlsMaterial:
        from catenary_services.security.x509 import certificates_in, identity_of, is_signed_by

        cert, key, authorities = self._files
        trusted = _read("tls_ca_file", authorities) if authorities is not None else None
        number = known.number + 1 if known is not None else 1
        trust = _trust_in(trusted, number)
        if cert is None:
            return TlsMaterial(None, None, trusted, None, None, None, number, trust)
        chain, private = _read("tls_cert_file", cert), _read("tls_key_file", key)
        first = certificates_in("tls_cert_file", chain)[0]
        _check_pair(first, private)
        identity = identity_of(first)
        if known is not None:
            _check_change(first, known.identity, identity)
        ends = first.not_valid_after_utc
        for authority in trust.certificates:
            if is_signed_by(first, authority):
                ends = min(ends, authority.not_valid_after_utc)
        return TlsMaterial(chain, private, trusted, first, ends, identity, number, trust)


@cache
def watched_files(cert: Path | None, key: Path | None, authorities: Path | None) -> WatchedFiles:
    """Returns the one watch of these files in this process."""
    return WatchedFiles(cert, key, authorities)


def _trust_in(pem: bytes | None, number: int) -> TrustedAuthorities:
    """Returns the authorities in a file's text, with what they have revoked.

    Raises:
        InvalidInput: It holds none, or something that cannot be read.
    """
    if pem is None:
        return TrustedAuthorities(number=number)
    from catenary_services.security.x509 import certificates_in

    found = tuple(certificates_in("tls_ca_file", pem))
    return TrustedAuthorities(found, revoked_by(found, revocation_lists(pem)), number)


def _nothing() -> None:
    """Takes off a connection that was never noted."""


def _context_of(material: TlsMaterial, *, server: bool) -> ssl.SSLContext:
    """Returns a context of material that was read; the files may have changed since.

    Raises:
        InvalidInput: OpenSSL does not accept the material.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if material.authorities is not None:
        context.load_verify_locations(cadata=material.authorities.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_REQUIRED
    elif not server:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if server and material.authorities is not None:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # No session may be resumed that was verified under authorities which are no longer trusted.
        context.num_tickets = 0
    if material.chain is not None and material.key is not None:
        _load_chain(context, material.key + b"\n" + material.chain)
    return context


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """Loads key and chain from a file in memory, because OpenSSL reads files only."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except ssl.SSLError as error:
        raise InvalidInput("tls_cert_file", f"cannot be used: {error}") from error
    finally:
        os.close(descriptor)


_HOUR = dt.timedelta(hours=1)


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        status = file.stat()
    except OSError:
        return (0, 0, 0)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(field: str, file: Path | None) -> bytes:
    if file is None:
        raise InvalidInput(field, "not set")
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidInput(field, f"cannot be read: {error}") from error


def _check_pair(certificate: x509.Certificate, private: bytes) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_private_key(private, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInput("tls_key_file", f"holds no key: {error}") from error
    if key.public_key() != certificate.public_key():
        raise InvalidInput("tls_cert_file", "does not fit tls_key_file")


def _check_change(first: x509.Certificate, was: Identity | None, now: Identity | None) -> None:
    """Checks that a new certificate can take the place of one that was good."""
    from catenary_services.security.x509 import CLOCK_SKEW

    if was != now:
        raise InvalidInput("tls_cert_file", f"names {now} now, and {was} before")
    time_now = dt.datetime.now(dt.UTC)
    if not first.not_valid_before_utc <= time_now + CLOCK_SKEW:
        raise InvalidInput("tls_cert_file", f"is good from {first.not_valid_before_utc} on")
    if first.not_valid_after_utc <= time_now:
        raise InvalidInput("tls_cert_file", f"ended on {first.not_valid_after_utc}")
