"""The content record of a model version: the form of `content.json`, its digest and its checks."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from typing import Annotated

import msgspec

from catenary_services.errors import ContentMismatch

RECORD_FILE = "content.json"
SOURCE_FILE = "source.json"
"""The file that says where a version came from: recorded, but no part of its content."""
FETCHED_FOLDER = ".fetched"
"""A version's folder that has this one holds what was fetched of it from peers, often not all."""
FORMAT = 1
CHUNK_BYTES = 16 << 20
"""A file larger than this has a digest for each chunk of this size, so that ranges can be checked
alone."""
LARGEST_RECORD_BYTES = 64 << 20
SHOWN_DIGITS = 12
"""The number of digits of a digest that error messages show."""

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_PATH = re.compile(r"[^/\\\x00]+(/[^/\\\x00]+)*")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The entry of one file in a content record."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Sha256
    """The digest of the bytes, as `sha256sum` prints it."""
    meaning: Sha256 | None = None
    """Digest of what the file says about the content. It is set for files that also hold what may
    differ between equal versions: objectives in model.yaml, measured times in blocks.json. The
    version's digest counts it in place of `sha256`."""
    chunks: tuple[Sha256, ...] = ()
    """Digests of consecutive chunks of `CHUNK_BYTES`; empty unless the file is larger than one."""
    derived: bool = False
    """True if the file was made from the other files on this machine. It is checked like them, but
    the digest of the version leaves it out."""


class ContentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of a version that a process may load, by their paths in the version's folder."""

    format: int
    files: dict[str, FileRecord]

    @property
    def digest(self) -> str:
        """The digest of the whole version: SHA-256, in hexadecimal."""
        counted = [
            [path, file.meaning or file.sha256]
            for path, file in sorted(self.files.items())
            if not file.derived
        ]
        return hashlib.sha256(json.dumps([self.format, counted]).encode()).hexdigest()


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON document in `content.json`."""

    format: int
    digest: Sha256
    """The digest of the version, for people and for `jq`."""
    checksum: Sha256
    """SHA-256 of the encoded entries, by which a change of the record itself is noticed."""
    files: dict[str, FileRecord]


def encode(record: ContentRecord) -> bytes:
    """Returns the bytes of `content.json`; equal records give equal bytes."""
    files = dict(sorted(record.files.items()))
    stored = _Stored(record.format, record.digest, _checksum(files), files)
    return msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n"


def decode(content: bytes, where: str) -> ContentRecord:
    """Returns the content record in the bytes of a `content.json`.

    Raises:
        ContentMismatch: The bytes are no record, or are not as they were written.
    """
    advice = f"copy it again, or make it anew with catenaryd verify-model --record ({machine()})"
    try:
        if len(content) > LARGEST_RECORD_BYTES:
            raise ValueError("too large")
        stored = msgspec.json.decode(content, type=_Stored)
        record = ContentRecord(stored.format, stored.files)
        if stored.format != FORMAT:
            raise ValueError(f"format {stored.format}, this program reads {FORMAT}")
        _check(record)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        text = f"{where} is no content record: {error}; {advice}"
        raise ContentMismatch(text, details={"file": where, "machine": machine()}) from None
    if encode(record) != content:
        text = f"{where} was changed: its own checksum does not fit; {advice}"
        raise ContentMismatch(text, details={"file": where, "machine": machine()})
    return record


def mismatch(where: str, expected: str, found: str, what: str = "sha256") -> ContentMismatch:
    """Returns the error of a file that differs from its record.

    Args:
        where: Model and file.
        expected: The digest in the record.
        found: The digest of the file; empty if the file is missing or cannot be hashed.
        what: What was compared: a digest, or a size.
    """
    said = found[:SHOWN_DIGITS] or "nothing"
    return ContentMismatch(
        f"{where} on {machine()} is not what was recorded: {what} {said} instead of"
        f" {expected[:SHOWN_DIGITS] or 'nothing'}",
        details={"file": where, "expected": expected, "found": found, "machine": machine()},
    )


def changed(where: str) -> ContentMismatch:
    """Returns the error of a file that was changed while it was read."""
    text = f"{where} on {machine()} was changed while it was read"
    return ContentMismatch(text, details={"file": where, "machine": machine()})


def unlisted(where: str) -> ContentMismatch:
    """Returns the error of a file that its version's record does not list."""
    text = f"{where} on {machine()} is not in {RECORD_FILE}: it was added later"
    return ContentMismatch(text, details={"file": where, "machine": machine()})


def machine() -> str:
    """Returns the name of this machine in messages."""
    return socket.gethostname()


def chunk_count(size: int) -> int:
    """Returns the number of chunks of a file of `size` bytes; 0 if it is checked as a whole."""
    return -(-size // CHUNK_BYTES) if size > CHUNK_BYTES else 0


def _checksum(files: dict[str, FileRecord]) -> str:
    return hashlib.sha256(msgspec.json.encode(files)).hexdigest()


def _check(record: ContentRecord) -> None:
    for path, file in record.files.items():
        parts = path.split("/")
        if not _PATH.fullmatch(path) or ".." in parts or "." in parts:
            raise ValueError(f"{path!r} is not a path inside the folder")
        if len(file.chunks) != chunk_count(file.size):
            raise ValueError(f"{path} has {len(file.chunks)} chunks for {file.size} bytes")
