"""The names of models from elsewhere, as a user writes them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import unquote, urlsplit

from catenary_services.errors import InvalidInput

FIELD = "source"
_LONGEST = 2048
_MODEL_FILES = (".gguf", ".onnx", ".pt2", ".safetensors")
_OWNER = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"({_OWNER}/{_OWNER})(?:/([^@]+))?(?:@(.+))?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


class SourceKind(StrEnum):
    """The kinds of places a model may come from."""

    HUB = "hf"
    S3 = "s3"
    GCS = "gs"
    HTTP = "http"
    HTTPS = "https"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A place that a model comes from."""

    kind: SourceKind
    place: str
    """The repository of a hub, a URL, or an absolute path."""
    revision: str = ""
    """The branch, tag or commit of a hub; empty for its main branch."""
    file: str = ""
    """The one file of the place that is wanted; empty if the rules choose."""

    @property
    def text(self) -> str:
        """The source without revision, and without what a URL has behind a question mark."""
        if self.kind is SourceKind.HUB:
            return f"hf:{self.place}"
        if self.kind is SourceKind.FILE:
            return f"file://{self.place}"
        return self.place.partition("?")[0]

    @property
    def model_name(self) -> str:
        """The name a model from here gets if nobody gives it one; empty if none can be made."""
        last = Path(unquote(self.text.rstrip("/"))).name
        for ending in _MODEL_FILES:
            last = last.removesuffix(ending)
        return _UNFIT.sub("-", last).strip("-._")[:128]


def source_of(text: str, file: str = "") -> ModelSource:
    """Returns the source that a text names; `file` is one of its files.

    Raises:
        InvalidInput: It is none.
    """
    if not text or len(text) > _LONGEST or not text.isprintable():
        raise InvalidInput(FIELD, f"is empty, longer than {_LONGEST} characters, or not printable")
    kind, colon, rest = text.partition(":")
    if colon and kind == SourceKind.HUB:
        return _of_hub(rest.removeprefix("//"), file)
    if colon and kind in (SourceKind.S3, SourceKind.GCS, SourceKind.HTTP, SourceKind.HTTPS):
        return _of_url(SourceKind(kind), text, file)
    if colon and kind == SourceKind.FILE:
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidInput(FIELD, f"{text!r} is not file:// and an absolute path")
        return ModelSource(SourceKind.FILE, os.path.normpath(unquote(parts.path)), file=file)
    if colon and "/" not in kind and rest.startswith("//"):
        known = ", ".join(each.value for each in SourceKind)
        raise InvalidInput(FIELD, f"{text!r} begins with none of {known}")
    return ModelSource(SourceKind.FILE, os.path.abspath(Path(text).expanduser()), file=file)


def _of_hub(rest: str, file: str) -> ModelSource:
    found = _HUB.fullmatch(rest)
    if found is None:
        raise InvalidInput(FIELD, f"{'hf:' + rest!r} is not hf:organisation/name[/file][@revision]")
    place, inside, revision = found.groups()
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise InvalidInput(FIELD, f"{revision!r} is no branch, tag or commit")
    if inside and file:
        raise InvalidInput("file", "is named in the source already")
    return ModelSource(SourceKind.HUB, place, revision or "", inside or file)


def _of_url(kind: SourceKind, text: str, file: str) -> ModelSource:
    try:
        parts = urlsplit(text)
        known = bool(parts.hostname)
    except ValueError:
        known = False
    if not known or not parts.path.strip("/"):
        raise InvalidInput(FIELD, f"{text.partition('?')[0]!r} names no file or folder of a host")
    if "@" in parts.netloc:
        raise InvalidInput(FIELD, "has a password in its URL: leave it to the environment")
    return ModelSource(kind, text, file=file)
