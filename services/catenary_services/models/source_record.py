"""The source of a model version: `source.json`, beside the files that were made of it.

`content.json` lists the file, but it is no part of the version's content: equal weights from two
places are equal, and peers that fetch a version do not get it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from catenary_services.content.record import Sha256

SOURCE_FORMAT = 1
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class SourceFileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of one file that was downloaded."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Sha256
    """The digest of the bytes as they came."""


class SourceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The source of a version, with what was downloaded of it."""

    format: int
    source: _Text
    """The source as it is named on the command line, without a revision and without secrets."""
    revision: _Text
    """The commit that a hub gave out; else a digest of the names, sizes and times of the files."""
    asked: _Text = ""
    """The branch or tag that was asked for."""
    files: dict[_Text, SourceFileRecord] = msgspec.field(default_factory=dict)
    """The downloaded files by their paths in the source; empty for files of this machine."""


def encode_source(record: SourceRecord) -> str:
    """Returns the text of a `source.json`."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1).decode() + "\n"


def decode_source(content: bytes) -> SourceRecord | None:
    """Returns the record in a `source.json`; None if it is none that this version can read."""
    try:
        record = msgspec.json.decode(content, type=SourceRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if record.format == SOURCE_FORMAT else None
