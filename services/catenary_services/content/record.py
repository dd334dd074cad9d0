"""The content record of a model version: what `content.json` says."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from typing import Annotated

import msgspec

from catenary_services.errors import ContentMismatch

RECORD_FILE = "content.json"
FORMAT = 1
CHUNK_BYTES = 16 << 20
"""Files above this have a digest per so many bytes, so that ranges can be checked alone."""
LARGEST_RECORD_BYTES = 64 << 20
SHOWN_DIGITS = 12
"""Of a digest, in messages."""

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_PATH = re.compile(r"[^/\\\x00]+(/[^/\\\x00]+)*")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of a version."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Sha256
    """As `sha256sum` says it."""
    meaning: Sha256 | None = None
    """Of what the file says about the content, where it also says what may differ: objectives in
    model.yaml, measured times in blocks.json. Counts for the version's digest in place of
    `sha256`."""
    chunks: tuple[Sha256, ...] = ()
    """Of every `CHUNK_BYTES`, of a file that is larger."""
    derived: bool = False
    """Made from the other files, here: it is checked like them, but is not what makes two versions
    the same."""


class ContentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every file of a version that anybody loads, by its path in the version's folder."""

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
    """A record as it lies on disk."""

    format: int
    digest: Sha256
    """Of the version, for people and for `jq`."""
    checksum: Sha256
    """Of the files' entries as they are encoded: a change of the record itself is noticed."""
    files: dict[str, FileRecord]


def encode(record: ContentRecord) -> bytes:
    """Returns the bytes of `content.json`; the same for the same record."""
    files = dict(sorted(record.files.items()))
    stored = _Stored(record.format, record.digest, _checksum(files), files)
    return msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n"


def decode(content: bytes, where: str) -> ContentRecord:
    """Returns the record in the bytes of a `content.json`.

    Raises:
        ContentMismatch: they are none, or not what was written once.
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
    """Returns the error of a file that is not what its record says.

    Args:
        where: Model and file.
        expected: The digest in the record.
        found: The digest of the file; empty if it is not there or cannot be one.
        what: What the digests are of.
    """
    said = found[:SHOWN_DIGITS] or "nothing"
    return ContentMismatch(
        f"{where} on {machine()} is not what was recorded: {what} {said} instead of"
        f" {expected[:SHOWN_DIGITS] or 'nothing'}",
        details={"file": where, "expected": expected, "found": found, "machine": machine()},
    )


def changed(where: str) -> ContentMismatch:
    """Returns the error of a file that was changed while somebody read it."""
    text = f"{where} on {machine()} was changed while it was read"
    return ContentMismatch(text, details={"file": where, "machine": machine()})


def unlisted(where: str) -> ContentMismatch:
    """Returns the error of a file that is not in the record of its version."""
    text = f"{where} on {machine()} is not in {RECORD_FILE}: it was added later"
    return ContentMismatch(text, details={"file": where, "machine": machine()})


def machine() -> str:
    """Returns how this machine is called in messages."""
    return socket.gethostname()


def chunk_count(size: int) -> int:
    """Returns how many chunks a file of a size has; 0 if it is checked whole."""
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
