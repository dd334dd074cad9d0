"""Certificates that others made: whatever their bytes are, reading them ends in a sentence."""

from __future__ import annotations

import base64
import datetime as dt
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import example, given
from hypothesis import strategies as st

from catenary_services.errors import InvalidInput
from catenary_services.security.x509 import (
    certificates_in,
    cluster_of,
    identity_of,
    is_for_key,
    key_digest,
    names_of,
    new_key,
    read_certificates,
    self_signed,
)

KEY = new_key()
CERTIFICATE = self_signed("main", KEY, dt.timedelta(hours=1))
DER = CERTIFICATE.public_bytes(serialization.Encoding.DER)


def pem_with(der: bytes) -> bytes:
    text = base64.encodebytes(der)
    return b"-----BEGIN CERTIFICATE-----\n" + text + b"-----END CERTIFICATE-----\n"


@given(st.integers(0, len(DER) - 1), st.integers(1, 255))
@example(DER.index(b"\xa0\x03\x02\x01") + 4, 7)  # another version of X.509
def test_a_certificate_with_any_byte_changed_is_read_or_refused(at: int, by: int) -> None:
    changed = bytearray(DER)
    changed[at] ^= by
    try:
        (found,) = certificates_in("authorities", pem_with(bytes(changed)))
    except InvalidInput:
        return
    identity_of(found), cluster_of(found), names_of(found)
    is_for_key(found, key_digest(KEY.public_key()))


@given(st.binary(max_size=400))
def test_any_bytes_in_pem_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        certificates_in("authorities", pem_with(data))


def test_a_certificate_is_for_its_own_key_only() -> None:
    assert is_for_key(CERTIFICATE, key_digest(KEY.public_key()))
    assert not is_for_key(CERTIFICATE, key_digest(new_key().public_key()))


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"ca\.pem"):
        read_certificates(file)
