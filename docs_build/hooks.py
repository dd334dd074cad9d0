"""Hooks of MkDocs, which add the generated pages and read documents as GitHub does."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[1]
# MkDocs runs in an environment of its own; the project is imported from this checkout.
sys.path.insert(0, str(ROOT))

from source_roots import SOURCE_ROOTS  # noqa: E402

sys.path[:0] = SOURCE_ROOTS

from docs_build.pages import copied_pages, generated_pages, turned  # noqa: E402
from docs_build.truth import aged  # noqa: E402

_FENCE = re.compile(r"^\s*(```|~~~)")
_THREE_SPACES = re.compile(r"^   (?=\S)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that no file holds."""
    for path, text in {**generated_pages(), **copied_pages()}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_others: Any) -> str:
    """Returns a document in the form that Python-Markdown understands.

    GitHub takes three spaces for a paragraph of a list entry, Python-Markdown needs four. Links to
    files outside `docs/` get their place in the site, and results get their age.
    """
    text = aged("\n".join(_indented(markdown.splitlines())))
    place = page.file.src_uri
    committed = page.file.generated_by is None
    return turned(text, f"docs/{place}", place) if committed else text


def _indented(lines: list[str]) -> list[str]:
    inside, made = False, []
    for line in lines:
        if _FENCE.match(line):
            inside = not inside
        made.append(line if inside else _THREE_SPACES.sub("    ", line))
    return made
