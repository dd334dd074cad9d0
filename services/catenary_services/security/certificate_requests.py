"""Requests for certificates (PKCS #10), by which a key is certified that never travels.

The authority believes one thing of a request: its sender has the private key. Whom the certificate
names, and for what it is good, the authority decides; a request that asks for more is refused.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from catenary_services.errors import InvalidInput
from catenary_services.security.x509 import UNREADABLE

LARGEST_REQUEST_BYTES = 4096
_FIELD = "csr"


def make_request(name: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Returns a request for a certificate of `key`, DER."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def key_of_request(name: str, request: bytes) -> ec.EllipticCurvePublicKey:
    """Returns the public key in a request, whose sender has the private one.

    Args:
        name: The name that the certificate shall have.
        request: The request, DER.

    Raises:
        InvalidInput: It is no request, is not signed by its key, asks for another name or for
            extensions, or its key is not ECDSA P-256.
    """
    if len(request) > LARGEST_REQUEST_BYTES:
        raise InvalidInput(_FIELD, f"has more than {LARGEST_REQUEST_BYTES} bytes")
    try:
        parsed = x509.load_der_x509_csr(request)
        key = parsed.public_key()
        is_signed = parsed.is_signature_valid
        subject = [(each.oid, each.value) for each in parsed.subject]
        asks_for_more = bool(len(parsed.attributes))
    except UNREADABLE as error:
        raise InvalidInput(_FIELD, "is no certificate request that can be read") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidInput(_FIELD, "has a key of another kind than ECDSA P-256")
    if not is_signed:
        raise InvalidInput(_FIELD, "is not signed by the key that it is for")
    if subject != [(NameOID.COMMON_NAME, name[:64])]:
        raise InvalidInput(_FIELD, f"is not for {name!r} alone")
    if asks_for_more:
        raise InvalidInput(_FIELD, "asks for attributes; the authority decides what stands in it")
    return key
