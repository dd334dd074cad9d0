"""What the authority believes of a request for a certificate: that its sender has the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from hypothesis import example, given
from hypothesis import strategies as st

from catenary_services.errors import InvalidInput
from catenary_services.security.authority import CertificateAuthority
from catenary_services.security.certificate_requests import key_of_request, make_request
from catenary_services.security.identity import Identity, Role
from catenary_services.security.x509 import identity_of, names_of, new_key


def request_with(key: ec.EllipticCurvePrivateKey, name: str = "pi4", **extensions: str) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject)
    for dns in extensions.values():
        names = x509.SubjectAlternativeName([x509.DNSName(dns)])
        made = made.add_extension(names, critical=False)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def test_the_key_of_a_request_is_the_one_that_signed_it() -> None:
    key = new_key()
    assert key_of_request("pi4", make_request("pi4", key)) == key.public_key()


def test_a_request_for_another_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'pi5'"):
        key_of_request("pi5", make_request("pi4", new_key()))


def test_a_request_that_asks_for_names_of_its_own_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the authority decides"):
        key_of_request("pi4", request_with(new_key(), dns="gateway.main.catenary.internal"))


def test_a_request_whose_key_did_not_sign_it_is_refused() -> None:
    request = bytearray(make_request("pi4", new_key()))
    theirs = new_key().public_key()
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    key = theirs.public_bytes(encoding, form)
    at = bytes(request).index(key[:26])  # every key of the curve begins alike
    request[at : at + len(key)] = key
    with pytest.raises(InvalidInput, match="not signed by the key"):
        key_of_request("pi4", bytes(request))


def test_keys_of_other_kinds_are_refused() -> None:
    with pytest.raises(InvalidInput, match="P-256"):
        key_of_request("pi4", request_with(ec.generate_private_key(ec.SECP384R1())))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pi4")])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject)
    signed = made.sign(rsa.generate_private_key(65537, 2048), hashes.SHA256())
    with pytest.raises(InvalidInput, match="P-256"):
        key_of_request("pi4", signed.public_bytes(serialization.Encoding.DER))


def test_a_request_longer_than_its_bound_is_not_parsed() -> None:
    with pytest.raises(InvalidInput, match="more than 4096 bytes"):
        key_of_request("pi4", make_request("pi4", new_key()) + bytes(4096))


@given(st.binary(max_size=600))
def test_any_bytes_are_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        key_of_request("pi4", data)


@given(st.integers(0, 250), st.integers(1, 255))
@example(7, 1)  # another version of PKCS #10
def test_a_request_with_any_byte_changed_is_refused(at: int, by: int) -> None:
    request = bytearray(REQUEST)
    request[at % len(request)] ^= by
    try:
        key = key_of_request("pi4", bytes(request))
    except InvalidInput:
        return
    # ECDSA is malleable: another encoding of the same signature is still the key's.
    assert key == KEY.public_key()


KEY = new_key()
REQUEST = make_request("pi4", KEY)


def test_a_certificate_by_request_has_no_name_that_its_holder_chose(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path, "main")
    authority.ensure()
    identity = Identity.of("main", Role.AGENT, "localhost")
    certificate = authority.sign(identity, KEY.public_key())
    assert identity_of(certificate) == identity
    dns = {each.value for each in names_of(certificate) if isinstance(each, x509.DNSName)}
    assert dns == {"agent.main.catenary.internal", "localhost.peer.main.catenary.internal"}


def test_no_certificate_is_signed_for_another_cluster(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path, "main")
    authority.ensure()
    with pytest.raises(InvalidInput, match="cluster main"):
        authority.sign(Identity.of("other", Role.AGENT, "pi4"), KEY.public_key())
