"""A certificate authority in a folder, which issues, renews and replaces certificates.

Keys are ECDSA P-256. The authority signs processes directly and nothing else (path length 0), and
every certificate names one identity (`catenary_services.security.identity`). Files are replaced by
rename, the key first: whoever watches them sees a pair that does not match for a moment at most,
and waits.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from catenary_services.errors import InvalidInput
from catenary_services.security.identity import Identity, Role
from catenary_services.security.living_connections import revocation_lists
from catenary_services.security.x509 import (
    chosen_names,
    cluster_of,
    identity_names,
    identity_of,
    is_signed_by,
    key_digest,
    names_of,
    new_key,
    other_names,
    read_certificates,
    read_key,
    self_signed,
    signed,
    subject_names,
    write_certificates,
    write_key,
    write_trusted,
)

AUTHORITY_FILE = "ca.pem"
AUTHORITY_KEY_FILE = "ca-key.pem"
NEXT_KEY_FILE = "ca-next-key.pem"
"""File with the key of an authority that is already trusted and does not sign yet."""
DAYS = 30
AUTHORITY_DAYS = 365
MOST_REVOKED = 500
"""The most certificates revoked at a time, for the list goes wherever the authority goes."""
MOST_REMEMBERED = 64
"""The most certificates of one identity that can be revoked later."""


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

    def sign(
        self, identity: Identity, key: ec.EllipticCurvePublicKey, names: Sequence[str] = ()
    ) -> x509.Certificate:
        """Returns a new certificate for a key that lies elsewhere.

        It has no name that its holder chose: one called "localhost" would be one for every client
        that trusts the authority. `names` come from whoever runs the authority.

        Raises:
            InvalidInput: The identity is of another cluster, a name cannot be one, or there is no
                usable authority.
        """
        if identity.cluster != self._cluster:
            raise InvalidInput("cluster", f"this is the authority of cluster {self._cluster}")
        alternatives = [*identity_names(identity), *chosen_names(names)]
        made = signed(identity, alternatives, key, self._signer(), self._life)
        self._remember(identity, made)
        return made

    @property
    def cluster(self) -> str:
        return self._cluster

    @property
    def file(self) -> Path:
        """The file of the authorities that are trusted."""
        return self._file

    @property
    def signer_digest(self) -> bytes:
        """SHA-256 of the public key that signs."""
        return key_digest(self._signer()[0].public_key())

    def trusted(self) -> bytes:
        """Returns the authorities that are trusted and their lists of revoked ones, PEM."""
        return self._file.read_bytes()

    def revoke(self, identity: Identity) -> int:
        """Revokes every certificate of an identity that is still good; returns how many.

        Its files in the folder are removed, so that nothing renews them.

        Raises:
            InvalidInput: There is no usable authority, it has signed nothing for the identity, or
                as many are revoked as fit into a list.
        """
        authority, key = self._signer()
        pair, issued = pair_files(self._folder, identity), self._issued_file(identity)
        known = [
            each for file in (pair[0], issued) if file.exists() for each in read_certificates(file)
        ]
        good = {each.serial_number: each for each in known if is_signed_by(each, authority)}
        if not good:
            raise InvalidInput("revoke", f"{identity} has no certificate of this authority")
        lists = revocation_lists(self.trusted())
        now = dt.datetime.now(dt.UTC)
        entries = [
            each
            for found in lists
            if found.issuer == authority.subject
            for each in found
            if each.serial_number not in good
        ]
        if len(entries) + len(good) > MOST_REVOKED:
            raise InvalidInput("revoke", f"over {MOST_REVOKED} are revoked: change the authority")
        builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
        builder = builder.last_update(now).next_update(authority.not_valid_after_utc)
        for entry in entries:
            builder = builder.add_revoked_certificate(entry)
        for serial in good:
            entry = (
                x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            )
            builder = builder.add_revoked_certificate(entry)
        others = [each for each in lists if each.issuer != authority.subject]
        self._write_trusted(
            read_certificates(self._file), [*others, builder.sign(key, hashes.SHA256())]
        )
        for file in (*pair, issued):
            file.unlink(missing_ok=True)
        return len(good)

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
        lists = revocation_lists(self.trusted())
        self._write_trusted([*read_certificates(self._file), following], lists)

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
        signer = self._signer()[0]
        lists = revocation_lists(self.trusted())
        self._write_trusted([signer], [each for each in lists if each.issuer == signer.subject])

    # ---- private ----

    def _write_trusted(
        self,
        authorities: Sequence[x509.Certificate],
        lists: Sequence[x509.CertificateRevocationList],
    ) -> None:
        write_trusted(self._file, authorities, lists)

    def _issued_file(self, identity: Identity) -> Path:
        """Returns the file of the newest certificates whose keys lie elsewhere."""
        return self._folder / "issued" / pair_files(self._folder, identity)[0].name

    def _remember(self, identity: Identity, made: x509.Certificate) -> None:
        file = self._issued_file(identity)
        file.parent.mkdir(exist_ok=True)
        now = dt.datetime.now(dt.UTC)
        before = read_certificates(file) if file.exists() else []
        kept = [each for each in before if each.not_valid_after_utc > now]
        write_certificates(file, [made, *kept[: MOST_REMEMBERED - 1]])

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
