"""Certificate files that may change while a process runs.

Files are looked at whenever a connection is made (three `stat` calls) and every few seconds. New
ones are taken up if they fit together, are good now and say the same identity; otherwise the
process goes on with what it has and says so once. A connection keeps what it was made with.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import ssl
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from catenary_services.errors import InvalidInput
from catenary_services.log import get_logger
from catenary_services.security.identity import Identity
from catenary_services.security.x509 import CLOCK_SKEW, identity_of, is_signed_by

POLL_S = 2.0
WARN_SHARE_LEFT = 0.2
"""With less of its life left a certificate should have been renewed."""
_WARN_EVERY_S = 3_600.0
_Stamp = tuple[tuple[int, int, int], ...]

_log = get_logger("catenary_services.security")


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files held when they were last good."""

    chain: bytes | None
    key: bytes | None
    authorities: bytes | None
    certificate: x509.Certificate | None
    """The first of `chain`."""
    ends: dt.datetime | None
    """When the certificate, or the authority that signed it, is no longer good."""
    identity: Identity | None
    number: int = 0
    """Grows whenever files are taken up."""


class WatchedFiles:
    """Certificate, key and authorities of one process. Thread-safe: gRPC asks from its threads."""

    def __init__(self, cert: Path | None, key: Path | None, authorities: Path | None) -> None:
        """Reads nothing before `current`."""
        self._files = (cert, key, authorities)
        self._lock = threading.Lock()
        self._material: TlsMaterial | None = None
        self._seen: _Stamp = ()
        self._warned_s = -_WARN_EVERY_S
        self._contexts: dict[tuple[bool, bool], tuple[int, ssl.SSLContext]] = {}
        """By whom they are for, with the number of the material they were made of."""

    def current(self) -> TlsMaterial:
        """Returns what is in force; files that changed are taken up first, if they are good.

        Raises:
            InvalidInput: they were never good.
        """
        with self._lock:
            return self._current()

    def context(self, *, server: bool, checks_name: bool = True) -> ssl.SSLContext:
        """Returns a context with what is in force; another one after each change.

        Args:
            server: For listening, or for connecting.
            checks_name: A server must have a certificate for the name it is called by.

        Raises:
            InvalidInput: the files were never good.
        """
        with self._lock:
            material = self._current()
            kind = (server, checks_name)
            made = self._contexts.get(kind)
            if made is None or made[0] != material.number:
                made = material.number, _context_of(material, server=server)
                made[1].check_hostname = checks_name and not server
                self._contexts[kind] = made
            return made[1]

    def listening_context(self) -> ssl.SSLContext:
        """Returns a context for a listening socket, which always shows and trusts what is in force.

        A server keeps the context it was started with, so this one hands every connection over to
        the newest while it begins; OpenSSL asks for that whether the client names a server or not.

        Raises:
            InvalidInput: the files are not good.
        """
        outer = _context_of(self.current(), server=True)

        def hand_over(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            connection.context = self.context(server=True)

        outer.sni_callback = hand_over
        return outer

    def seconds_left(self) -> float:
        """Returns for how long what is in force is good; logs a warning if that is not long."""
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

    async def watch(self) -> None:
        """Looks at the files every few seconds until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.seconds_left()

    # ---- inside; the lock is held ----

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
            self._seen = stamp  # said once for each change
            _log.warning("certificate_kept", error=error.message)
            return known
        self._seen = stamp
        self._material = fresh
        if known is not None:
            ends = fresh.ends.isoformat() if fresh.ends else ""
            _log.info("certificate_taken_up", file=str(self._files[0] or ""), ends=ends)
        return fresh

    def _read(self, known: TlsMaterial | None) -> TlsMaterial:
        cert, key, authorities = self._files
        trusted = _read("tls_ca_file", authorities) if authorities is not None else None
        if trusted is not None and authorities is not None:
            _certificates("tls_ca_file", trusted)
        number = known.number + 1 if known is not None else 1
        if cert is None:
            return TlsMaterial(None, None, trusted, None, None, None, number)
        chain, private = _read("tls_cert_file", cert), _read("tls_key_file", key)
        first = _certificates("tls_cert_file", chain)[0]
        _check_pair(first, private)
        identity = identity_of(first)
        if known is not None:
            _check_change(first, known.identity, identity)
        ends = first.not_valid_after_utc
        for authority in _certificates("tls_ca_file", trusted) if trusted else ():
            if is_signed_by(first, authority):
                ends = min(ends, authority.not_valid_after_utc)
        return TlsMaterial(chain, private, trusted, first, ends, identity, number)


@cache
def watched_files(cert: Path | None, key: Path | None, authorities: Path | None) -> WatchedFiles:
    """Returns the one watch of these files in this process."""
    return WatchedFiles(cert, key, authorities)


def _context_of(material: TlsMaterial, *, server: bool) -> ssl.SSLContext:
    """Returns a context with material that was read: the files may be others by now.

    Raises:
        InvalidInput: OpenSSL does not take it.
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
        # Nobody goes on with what was checked under authorities that are no longer trusted.
        context.num_tickets = 0
    if material.chain is not None and material.key is not None:
        _load_chain(context, material.key + b"\n" + material.chain)
    return context


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """Loads key and chain; OpenSSL reads files only, so this is one that never reaches a disk."""
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


def _certificates(field: str, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise InvalidInput(field, f"holds no certificate: {error}") from error


def _check_pair(certificate: x509.Certificate, private: bytes) -> None:
    try:
        key = serialization.load_pem_private_key(private, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInput("tls_key_file", f"holds no key: {error}") from error
    if key.public_key() != certificate.public_key():
        raise InvalidInput("tls_cert_file", "does not fit tls_key_file")


def _check_change(first: x509.Certificate, was: Identity | None, now: Identity | None) -> None:
    """Checks that a new certificate can take the place of one that was good."""
    if was != now:
        raise InvalidInput("tls_cert_file", f"names {now} now, and {was} before")
    time_now = dt.datetime.now(dt.UTC)
    if not first.not_valid_before_utc <= time_now + CLOCK_SKEW:
        raise InvalidInput("tls_cert_file", f"is good from {first.not_valid_before_utc} on")
    if first.not_valid_after_utc <= time_now:
        raise InvalidInput("tls_cert_file", f"ended on {first.not_valid_after_utc}")
