"""All generated pages, by their places in the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from docs_build.reference.access import access_page
from docs_build.reference.commands import client_page, platform_page
from docs_build.reference.errors import errors_page
from docs_build.reference.http import http_page
from docs_build.reference.metrics import metrics_page
from docs_build.reference.protos import service_pages
from docs_build.reference.sdk import sdk_page
from docs_build.reference.settings import settings_page

ROOT = Path(__file__).resolve().parents[1]

COPIED = {"client/README.md": "reference/sdk-guide.md", "CHANGELOG.md": "changelog.md"}
"""Documents outside `docs/` that are pages of the site as well, with their places there."""

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]+)\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
"""A link to a file, which is neither an image nor an address in the web."""


def generated_pages() -> dict[str, str]:
    """Returns the Markdown of generated pages by path below the site's root."""
    pages = {
        "access.md": access_page(),
        "catenary.md": client_page(),
        "catenaryd.md": platform_page(),
        "errors.md": errors_page(),
        "http.md": http_page(),
        "metrics.md": metrics_page(),
        "sdk.md": sdk_page(),
        "settings.md": settings_page(),
        **service_pages(),
    }
    return {f"reference/{name}": text for name, text in sorted(pages.items())}


def copied_pages() -> dict[str, str]:
    """Returns the Markdown of copied pages by path below the site's root, with links adapted."""
    return {
        place: turned((ROOT / source).read_text(encoding="utf-8"), source, place)
        for source, place in COPIED.items()
    }


def turned(markdown: str, source: str, place: str) -> str:
    """Returns a document with its links as they are on the site.

    Args:
        markdown: The document.
        source: Path of the document in the repository.
        place: Path of the document on the site.

    Links within `docs/` stay links, and so do those to copied documents. A link to any other file
    of the repository becomes the path of that file.
    """

    def turn(found: re.Match[str]) -> str:
        text, target, anchor = (
            found.group("text"),
            found.group("target"),
            found.group("anchor") or "",
        )
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        known = COPIED.get(wanted)
        if known is None and wanted.startswith("docs/"):
            known = wanted.removeprefix("docs/")
        if known is not None:
            where = posixpath.relpath(known, posixpath.dirname(place) or ".")
            return f"[{text}]({where}{anchor})"
        if wanted.startswith("../") or not (ROOT / wanted).exists():
            return found.group(0)  # a mistake, which the build reports
        return text if wanted in text else f"{text} (`{wanted}`)"

    return _LINK.sub(turn, markdown)
