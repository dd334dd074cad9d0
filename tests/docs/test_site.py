"""The built site: complete in itself, nothing fetched from elsewhere. `make docs` builds it."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

_SITE = os.environ.get("CATENARY_SITE", "")
pytestmark = pytest.mark.skipif(not _SITE, reason="needs the built site: `make docs` builds it")


class _Page(HTMLParser):
    """What a page refers to, and what one can refer to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        """What a browser fetches by itself."""
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.classes |= set(given.get("class", "").split())
        if "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given.get("href", ""))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site() -> dict[Path, _Page]:
    root = Path(_SITE).resolve()
    found = {path: _Page(path) for path in root.rglob("*.html")}
    assert len(found) > 40
    return found


def test_nothing_is_fetched_from_another_host(site: dict[Path, _Page]) -> None:
    for path, page in site.items():
        outside = [load for load in page.loads if urlsplit(load).netloc]
        assert not outside, f"{path.name}: {outside}"
        # Material fetches a library for these from elsewhere.
        assert "mermaid" not in page.classes


def test_style_sheets_fetch_nothing_either(site: dict[Path, _Page]) -> None:
    root = Path(_SITE).resolve()
    sheets = list(root.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text())


def test_every_link_within_the_site_leads_somewhere(site: dict[Path, _Page]) -> None:
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            assert target.exists(), f"{path.name}: {link}"
            if parts.fragment and target in site:
                assert unquote(parts.fragment) in site[target].anchors, f"{path.name}: {link}"


def test_the_reference_is_in_it_with_comments_of_protos_and_docstrings(
    site: dict[Path, _Page],
) -> None:
    text = {path.name: path.read_text(encoding="utf-8") for path in site}
    assert "Moves a running session to another chain" in text["grpc-catenary-v1-admin.html"]
    assert "catenary.Client.infer" in text["sdk.html"]
    assert "CATENARY_REDIS_URL" in text["settings.html"]
