"""The files of the dashboard's page, read once when the gateway starts."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
PAGE = "index.html"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page, in the forms in which it is sent."""

    body: bytes
    packed: bytes
    """The body compressed by gzip, which is a third of it."""
    content_type: str
    etag: str
    """The entity tag without quotes, a digest of the content."""


def load() -> Mapping[str, Asset]:
    """Returns the assets by file name.

    Only these are served, by a look-up: no path of a request reaches the file system.
    """
    folder = resources.files("catenary_gateway.dashboard") / "assets"
    found: dict[str, Asset] = {}
    for file in folder.iterdir():
        content_type = _TYPES.get("." + file.name.rpartition(".")[2])
        if content_type is not None and file.is_file():
            body = file.read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:32]
            found[file.name] = Asset(body, gzip.compress(body, mtime=0), content_type, etag)
    return found
