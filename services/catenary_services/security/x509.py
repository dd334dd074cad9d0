"""X.509 certificates and their files, for the authority that makes them and their readers."""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from catenary_services.errors import InvalidInput
from catenary_services.security.identity import TRUST_DOMAIN, Identity, Role, is_reserved

UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""Exceptions of `cryptography` for bytes that are no certificate, or one with contents unknown to
it. It reads the inside of a certificate only when somebody asks for it."""
CLOCK_SKEW = dt.timedelta(minutes=5)
"""Certificates are valid from this long before they are made, because clocks of machines differ."""
_DNS_NAME = re.compile(
    r"(?!.{254})(?:\*\.)?(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*"
    r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
)
_LONGEST_COMMON_NAME = 64
_AUTHORITY_URI = f"spiffe://{TRUST_DOMAIN}/"


def new_key() -> ec.EllipticCurvePrivateKey:
    """Returns a new ECDSA P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def self_signed(
    cluster: str, key: ec.EllipticCurvePrivateKey, life: dt.timedelta
) -> x509.Certificate:
    """Returns the certificate of an authority that may sign processes, and no other authority."""
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    # Two authorities of one cluster must not be confused by name.
    name = _name(f"Catenary {identifier.digest.hex()[:12]} {cluster}")
    uri = x509.UniformResourceIdentifier(_AUTHORITY_URI + cluster)
    return (
        _builder(name, key.public_key(), life)
        .issuer_name(name)
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(is_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def signed(
    identity: Identity,
    names: Sequence[x509.GeneralName],
    key: ec.EllipticCurvePublicKey,
    authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    life: dt.timedelta,
) -> x509.Certificate:
    """Returns the certificate of a process, which ends no later than that of the authority."""
    issuer, issuer_key = authority
    life = min(life, issuer.not_valid_after_utc - dt.datetime.now(dt.UTC))
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.role is not Role.OPERATOR:  # a person serves nothing
        purposes.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        _builder(_name(identity.name), key, life)
        .issuer_name(issuer.subject)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(signer, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def identity_names(identity: Identity) -> list[x509.GeneralName]:
    """Returns the names in a certificate that say who it is for, and none that anybody chose."""
    uri = x509.UniformResourceIdentifier(identity.uri)
    return [uri, *(x509.DNSName(name) for name in identity.server_names)]


def subject_names(identity: Identity, others: Iterable[str]) -> list[x509.GeneralName]:
    """Returns the names in a certificate: identity, role, name, and `others` (DNS names or IPs).

    Raises:
        InvalidInput: One of the others is neither a DNS name nor an IP address.
    """
    found = identity_names(identity)
    if _DNS_NAME.fullmatch(identity.name):
        found.append(x509.DNSName(identity.name))
    return list(dict.fromkeys([*found, *chosen_names(others)]))


def chosen_names(others: Iterable[str]) -> list[x509.GeneralName]:
    """Returns DNS names, then IP addresses, as they stand in a certificate.

    Raises:
        InvalidInput: One is neither, or stands for a role.
    """
    dns: list[x509.GeneralName] = []
    addresses: list[x509.GeneralName] = []
    for other in others:
        try:
            addresses.append(x509.IPAddress(ipaddress.ip_address(other)))
        except ValueError:
            if _DNS_NAME.fullmatch(other) is None:
                raise InvalidInput("names", f"{other!r} is no DNS name or IP address") from None
            if is_reserved(other):
                # A process with such a name would be taken for one of that role.
                raise InvalidInput("names", f"{other!r} stands for a role") from None
            dns.append(x509.DNSName(other))
    return [*dns, *addresses]


def names_of(certificate: x509.Certificate) -> set[x509.GeneralName]:
    """Returns the alternative names in a certificate; none if they cannot be read."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, *UNREADABLE):
        return set()
    return set(found.value)


def other_names(certificate: x509.Certificate, identity: Identity) -> tuple[str, ...]:
    """Returns the names besides those that follow from the identity; see `subject_names`."""
    rest = names_of(certificate) - set(subject_names(identity, ()))
    return tuple(sorted(str(name.value) for name in rest))


def identity_of(certificate: x509.Certificate) -> Identity | None:
    """Returns the identity in a certificate; None if it names no process of this system."""
    uris = [
        name.value
        for name in names_of(certificate)
        if isinstance(name, x509.UniformResourceIdentifier)
    ]
    try:
        return Identity.parse(uris[0]) if len(uris) == 1 else None
    except InvalidInput:
        return None


def cluster_of(authority: x509.Certificate) -> str | None:
    """Returns the cluster of an authority; None if it is not one of this system."""
    for name in names_of(authority):
        if isinstance(name, x509.UniformResourceIdentifier):
            return name.value.removeprefix(_AUTHORITY_URI)
    return None


def key_digest(key: PublicKeyTypes) -> bytes:
    """Returns the SHA-256 of a public key's SubjectPublicKeyInfo, by which a key is pinned."""
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).digest()


def certificates_in(field: str, pem: bytes) -> list[x509.Certificate]:
    """Returns the certificates in PEM text, at least one.

    Args:
        field: The name of the input, for the error.
        pem: The text.

    Raises:
        InvalidInput: It holds none, or one that cannot be read.
    """
    try:
        return x509.load_pem_x509_certificates(pem)
    except UNREADABLE as error:
        raise InvalidInput(field, f"no certificate can be read: {error}") from error


def is_for_key(certificate: x509.Certificate, digest: bytes) -> bool:
    """Returns whether a certificate is for the public key with this digest; see `key_digest`."""
    try:
        return key_digest(certificate.public_key()) == digest
    except UNREADABLE:
        return False


def pem_of(certificates: Iterable[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


# ---- files ----


def read_certificates(file: Path) -> list[x509.Certificate]:
    """Returns the certificates in a PEM file, at least one.

    Raises:
        InvalidInput: The file cannot be read or holds none.
    """
    try:
        return certificates_in(file.name, file.read_bytes())
    except OSError as error:
        raise InvalidInput(file.name, f"no certificate can be read: {error}") from error


def read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Returns the private key in a PEM file.

    Raises:
        InvalidInput: The file cannot be read, or the key is not ECDSA.
    """
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(file.name, f"no key can be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidInput(file.name, "is no ECDSA key")
    return key


def write_certificates(file: Path, certificates: Iterable[x509.Certificate]) -> None:
    """Replaces a PEM file of certificates, readable by all."""
    _replace(file, pem_of(certificates), 0o644)


def write_trusted(
    file: Path,
    authorities: Iterable[x509.Certificate],
    lists: Iterable[x509.CertificateRevocationList],
) -> None:
    """Replaces the file of the authorities and their lists of revoked ones, readable by all."""
    pem = [each.public_bytes(serialization.Encoding.PEM) for each in lists]
    _replace(file, pem_of(authorities) + b"".join(pem), 0o644)


def write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Replaces a PEM file of a private key, readable by its owner only."""
    data = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _replace(file, data, 0o600)


def _replace(file: Path, data: bytes, mode: int) -> None:
    scratch = file.with_name(f".{file.name}.new")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as output:
        os.fchmod(descriptor, mode)  # regardless of the umask
        output.write(data)
    scratch.replace(file)


# ---- private ----


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_LONGEST_COMMON_NAME])])


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, life: dt.timedelta
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
