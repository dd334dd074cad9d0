"""A certificate authority in a folder, which issues, renews and replaces certificates.

Keys are ECDSA P-256. The authority signs processes directly and nothing else (path length 0), and
every certificate names one identity (`catenary_services.security.identity`). Files are replaced by
rename, the key first: whoever watches them sees a pair that does not match for a moment at most,
and waits.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from catenary_services.errors import InvalidInput
from catenary_services.security.identity import Identity, Role
from catenary_services.security.x509 import (
    cluster_of,
    identity_names,
    identity_of,
    is_signed_by,
    key_digest,
    names_of,
    new_key,
    other_names,
    pem_of,
    read_certificates,
    read_key,
    self_signed,
    signed,
    subject_names,
    write_certificates,
    write_key,
)

AUTHORITY_FILE = "ca.pem"
AUTHORITY_KEY_FILE = "ca-key.pem"
NEXT_KEY_FILE = "ca-next-key.pem"
"""File with the key of an authority that is already trusted and does not sign yet."""
DAYS = 30
AUTHORITY_DAYS = 365


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    """A certificate to be issued."""

    identity: Identity
    names: tuple[str, ...] = ()
    """DNS names and IP addresses, besides those that follow from the identity."""


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """An issued certificate, with its key beside it."""

    identity: Identity
    cert_file: Path
    key_file: Path
    ends: dt.datetime
    made: bool
    """True if it was made just now, False if it existed and is kept."""


def pair_files(folder: Path, identity: Identity) -> tuple[Path, Path]:
    """Returns the paths of a process's certificate and key."""
    stem = f"{identity.role}-{identity.name}"
    return folder / f"{stem}.pem", folder / f"{stem}-key.pem"


class CertificateAuthority:
    """The certificate authority of one cluster, in a folder."""

    def __init__(self, folder: Path, cluster: str, days: int = DAYS) -> None:
        """Creates the object; reads no file yet.

        Args:
            folder: Folder of the authority, its certificates and keys.
            cluster: Name of the cluster.
            days: Validity of certificates of processes.

        Raises:
            InvalidInput: No certificate can carry the name, or `days` is less than one.
        """
        Identity.of(cluster, Role.OPERATOR, "any")
        if days < 1:
            raise InvalidInput("days", "at least one")
        self._folder = folder
        self._cluster = cluster
        self._life = dt.timedelta(days=days)
        self._file = folder / AUTHORITY_FILE
        self._key_file = folder / AUTHORITY_KEY_FILE

    def ensure(self, days: int = AUTHORITY_DAYS) -> bool:
        """Makes the authority unless it exists; returns True if it was made.

        Raises:
            InvalidInput: Half of its files are missing, it is another cluster's, or it has expired.
        """
        if self._file.exists() or self._key_file.exists():
            self._signer()
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        key = new_key()
        write_key(self._key_file, key)
        write_certificates(self._file, [self_signed(self._cluster, key, dt.timedelta(days=days))])
        return True

    @property
    def ends(self) -> dt.datetime:
        """The end of validity of the authority that signs."""
        return self._signer()[0].not_valid_after_utc

    def issue(self, request: CertificateRequest, *, renew: bool = False) -> IssuedCertificate:
        """Returns a certificate for a process, and makes it unless there is a usable one.

        A certificate is kept if this authority signed it, it has the wanted names and it has not
        expired.

        Args:
            request: Identity and names of the certificate.
            renew: Whether to replace it, too, if less than a third of its validity is left.

        Raises:
            InvalidInput: A name cannot be one, or there is no usable authority.
        """
        identity = request.identity
        if identity.cluster != self._cluster:
            raise InvalidInput("cluster", f"this is the authority of cluster {self._cluster}")
        signer = self._signer()
        names = subject_names(identity, request.names)
        cert_file, key_file = pair_files(self._folder, identity)
        known = _usable(cert_file, key_file)
        if (
            known is not None
            and is_signed_by(known, signer[0])
            and names_of(known) == set(names)
            and _share_left(known) > (1 / 3 if renew else 0)
        ):
            return IssuedCertificate(
                identity, cert_file, key_file, known.not_valid_after_utc, made=False
            )
        key = new_key()
        certificate = signed(identity, names, key.public_key(), signer, self._life)
        write_key(key_file, key)
        write_certificates(cert_file, [certificate])
        return IssuedCertificate(
            identity, cert_file, key_file, certificate.not_valid_after_utc, made=True
        )

    def sign(self, identity: Identity, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """Returns a new certificate for a key that lies elsewhere.

        It has no name that its holder chose: one called "localhost" would be one for every client
        that trusts the authority.

        Raises:
            InvalidInput: The identity is of another cluster, or there is no usable authority.
        """
        if identity.cluster != self._cluster:
            raise InvalidInput("cluster", f"this is the authority of cluster {self._cluster}")
        return signed(identity, identity_names(identity), key, self._signer(), self._life)

    @property
    def cluster(self) -> str:
        return self._cluster

    @property
    def signer_digest(self) -> bytes:
        """SHA-256 of the public key that signs."""
        return key_digest(self._signer()[0].public_key())

    def trusted(self) -> bytes:
        """Returns the certificates of all authorities that are trusted, PEM."""
        return pem_of(read_certificates(self._file))

    def requests(self) -> list[CertificateRequest]:
        """Returns the requests of all certificates in the folder, to issue them again."""
        found: list[CertificateRequest] = []
        for file in sorted(self._folder.glob("*-*.pem")):
            if file.name.endswith("-key.pem"):
                continue
            certificate = read_certificates(file)[0]
            identity = identity_of(certificate)
            if identity is not None and pair_files(self._folder, identity)[0] == file:
                found.append(CertificateRequest(identity, other_names(certificate, identity)))
        return found

    # ---- a new authority, by overlap: add, use, drop ----

    def add_next(self, days: int = AUTHORITY_DAYS) -> None:
        """Adds a new authority that everybody trusts beside the present one; it signs nothing yet.

        Raises:
            InvalidInput: One was added before and is not used yet.
        """
        next_key = self._folder / NEXT_KEY_FILE
        if next_key.exists():
            raise InvalidInput("authority", f"{next_key.name} is there: one was added already")
        self._signer()
        key = new_key()
        following = self_signed(self._cluster, key, dt.timedelta(days=days))
        write_key(next_key, key)
        write_certificates(self._file, [*read_certificates(self._file), following])

    def use_next(self) -> list[IssuedCertificate]:
        """Signs with the added authority from now on, and issues all certificates anew.

        Raises:
            InvalidInput: None was added.
        """
        next_key = self._folder / NEXT_KEY_FILE
        if not next_key.exists():
            raise InvalidInput("authority", "none was added; do that first and let it be read")
        wanted = self.requests()
        next_key.replace(self._key_file)
        return [self.issue(each) for each in wanted]

    def drop_others(self) -> None:
        """Trusts only the authority that signs; certificates of others are refused from now on.

        Raises:
            InvalidInput: An added authority does not sign yet, and would be lost.
        """
        if (self._folder / NEXT_KEY_FILE).exists():
            raise InvalidInput("authority", "the one that was added is not used yet")
        write_certificates(self._file, [self._signer()[0]])

    # ---- private ----

    def _signer(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """Returns the trusted authority that signs, by the key in the folder, and this key."""
        for file in (self._file, self._key_file):
            if not file.exists():
                raise InvalidInput("out", f"{self._folder} has no {file.name}: no authority")
        key = read_key(self._key_file)
        trusted = [
            each for each in read_certificates(self._file) if each.public_key() == key.public_key()
        ]
        if not trusted:
            raise InvalidInput("out", f"{self._file.name} does not fit {self._key_file.name}")
        authority = trusted[0]
        if cluster_of(authority) != self._cluster:
            raise InvalidInput(
                "cluster", f"{self._folder} holds the authority of cluster {cluster_of(authority)}"
            )
        if _share_left(authority) <= 0:
            raise InvalidInput("out", f"the authority ended on {authority.not_valid_after_utc}")
        return authority, key


def _usable(cert_file: Path, key_file: Path) -> x509.Certificate | None:
    """Returns the certificate of a matching pair; None if a file is missing or broken."""
    try:
        certificate = read_certificates(cert_file)[0]
        key = read_key(key_file)
    except InvalidInput:
        return None
    return certificate if certificate.public_key() == key.public_key() else None


def _share_left(certificate: x509.Certificate) -> float:
    """Returns the share of a certificate's validity that is left; negative once it has expired."""
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return (certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)) / life
