"""Targets: what was stored: records in Redis, files of keys, certificates."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path

from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import UnreadableRecord
from catenary_scheduler.storage.values.tables import SHAPES, book_shape, read_clock, read_table
from catenary_services.domain.ids import ResourceId
from catenary_services.errors import InvalidInput
from catenary_services.security.certificate_requests import key_of_request, make_request
from catenary_services.security.identity import Identity
from catenary_services.security.key_file import add_key, read_keys
from catenary_services.security.rotation import _trust_in
from catenary_services.security.x509 import (
    cluster_of,
    identity_of,
    new_key,
    other_names,
    pem_of,
    self_signed,
    signed,
    subject_names,
)
from parser_fuzzing.scratch import scratch_file, scratch_folder
from parser_fuzzing.target import FuzzTarget

_WRITTEN = Path(__file__).resolve().parents[2] / "scheduler/storage/written_by_64dbb8b.json"
_TABLES = sorted(SHAPES)
_BOOKS = ("gpu/agent-0", "cache/agent-0/llm:1[0,3)", "uplink/server-0")
_KINDS = len(_TABLES) + len(_BOOKS) + 1


# ---- Redis ----


def _read_record(data: bytes) -> object:
    """Reads one field of one table; what cannot be read must be told as damage."""
    kind = data[0] % _KINDS if data else 0
    name, _, value = data[1:].partition(b"\0")
    if kind < len(_TABLES):
        return read_table(_TABLES[kind], SHAPES[_TABLES[kind]], {name: value})
    kind -= len(_TABLES)
    if kind < len(_BOOKS):
        return read_table("book", book_shape(ResourceId(_BOOKS[kind])), {name: value})
    return read_clock({b"scheduler_ns": name, b"redis_us": value})


def _records() -> Iterator[bytes]:
    for key, fields in json.loads(_WRITTEN.read_text()).items():
        table = key.partition("}:")[2]
        at = _KINDS - 1
        if table in {str(each) for each in RedisTable}:
            at = _TABLES.index(RedisTable(table)) if table in map(str, _TABLES) else at
        if table.startswith("book:"):
            at = len(_TABLES) + _BOOKS.index("cache/agent-0/llm:1[0,3)")
        for name, value in fields.items():
            yield bytes((at,)) + name.encode() + b"\0" + value.encode()
    measured = bytes((_TABLES.index(RedisTable.MEASURED),))
    link = {"round_trip_ns": 5, "bytes_per_second": 6, "measured_unix_s": 7}
    yield measured + b"servers|a|b\0" + json.dumps(link).encode()
    yield measured + b"a|m:1[0,2)\x005 6 by now 7 8"
    yield measured + b"a|m:1[0,2)\0generation 1 2 3 4 by now v1 1 2 3 4"
    lengths = {"everywhere": [1, 2], "buckets": {"0": [3]}}
    yield bytes((_TABLES.index(RedisTable.LENGTHS),)) + b"m:1\0" + json.dumps(lengths).encode()


# ---- keys ----


def _read_keys(data: bytes) -> object:
    return read_keys(scratch_file("keys.json", data))


def _keys() -> Iterator[bytes]:
    path = scratch_folder() / "made.json"
    path.unlink(missing_ok=True)
    add_key(path, "ci", ["infer:resnet", "view"])
    add_key(
        path,
        "all",
        ["admin"],
        {
            "max_priority": 1,
            "requests_per_s": 2.5,
            "burst": 4,
            "tokens_per_s": 100,
            "token_burst": 200,
            "share": 2.0,
            "expires": "2030-01-31T12:00:00Z",
        },
    )
    yield path.read_bytes()
    yield b'{"keys": []}'


# ---- certificates ----


def _read_certificates(data: bytes) -> None:
    """Reads the file of authorities, as it is read again whenever it changes."""
    trusted = _trust_in(data, 1)
    for certificate in trusted.certificates:
        found = identity_of(certificate)
        cluster_of(certificate)
        other_names(certificate, found or Identity.parse("spiffe://catenary/c/agent/a"))


def _certificates() -> Iterator[bytes]:
    life = dt.timedelta(days=3650)
    key = new_key()
    authority = self_signed("c", key, life)
    identity = Identity.parse("spiffe://catenary/c/agent/agent-0")
    names = subject_names(identity, ["localhost", "127.0.0.1"])
    leaf = signed(identity, names, new_key().public_key(), (authority, key), life)
    yield pem_of([authority])
    yield pem_of([authority, leaf])
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    now = dt.datetime.now(dt.UTC)
    revoked = x509.RevokedCertificateBuilder().serial_number(5).revocation_date(now).build()
    crl = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now)
        .next_update(now + life)
        .add_revoked_certificate(revoked)
        .sign(key, hashes.SHA256())
    )
    yield pem_of([authority]) + crl.public_bytes(serialization.Encoding.PEM)


def _read_request(data: bytes) -> object:
    return key_of_request("agent-0", data)


def _requests() -> Iterator[bytes]:
    yield make_request("agent-0", new_key())
    yield make_request("agent-1", new_key())


TARGETS = (
    FuzzTarget("stored/records", _read_record, (UnreadableRecord,), _records),
    FuzzTarget("stored/keys", _read_keys, (InvalidInput,), _keys),
    FuzzTarget("stored/certificates", _read_certificates, (InvalidInput,), _certificates),
    FuzzTarget("stored/requests", _read_request, (InvalidInput,), _requests, 1024),
)
