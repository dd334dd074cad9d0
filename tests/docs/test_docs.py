"""The documents point at what exists: links and their anchors, commands, make targets, folders."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cluster_harness import ROOT

DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("client/*.md"))
    if ".venv" not in path.parts
)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)


@pytest.fixture(scope="module")
def reference(generated: dict[str, str]) -> dict[Path, str]:
    """Pages that only the built site has, by the path they would have beside the others."""
    return {ROOT / "docs" / place: text for place, text in generated.items()}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _anchors(markdown: str) -> set[str]:
    """Anchors as GitHub and the site make them, and those given by hand."""
    text = _FENCED.sub("", markdown)
    found: set[str] = set(re.findall(r'\bid="([^"]+)"', text))
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        copies = [slug, *(f"{slug}-{number}" for number in range(1, 20))]
        found.add(next(each for each in copies if each not in found))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_relative_link_leads_somewhere(document: Path, reference: dict[Path, str]) -> None:
    own = document.read_text()
    for link in _LINK.finditer(_FENCED.sub("", own)):
        target, anchor = link["target"], link["anchor"]
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (document.parent / target).resolve() if target else document
        assert path.exists() or path in reference, link[0]
        if anchor and (path.suffix == ".md"):
            text = reference.get(path) or path.read_text()
            assert anchor in _anchors(text), link[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = document.read_text()
    named = set(re.findall(r"^    make ([a-z-]+)|`make ([a-z-]+)", text, re.M))
    missing = {name for pair in named for name in pair if name} - targets
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_source_file_that_is_named_exists(document: Path) -> None:
    if document.name == "CHANGELOG.md":
        return
    named = re.findall(r"`((?:[a-z_]+/)+[\w.]+\.(?:py|pyx|proto|yaml))`", document.read_text())
    roots = (ROOT, ROOT / "client")
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []


def test_every_document_is_on_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    places = set(re.findall(r"[\w./-]+\.md", navigation))
    for path in ROOT.glob("docs/**/*.md"):
        assert str(path.relative_to(ROOT / "docs")) in places, path


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_metric_that_is_named_exists(document: Path, reference: dict[Path, str]) -> None:
    if document.name == "CHANGELOG.md":  # of earlier versions, too
        return
    page = reference[ROOT / "docs" / "reference" / "metrics.md"]
    known = set(re.findall(r"`((?:catenary|gen_ai)_\w+)`", page))
    known |= {f"{name}{part}" for name in known for part in ("_bucket", "_sum", "_count")}
    named = set(re.findall(r"\bcatenary_[a-z_]*[a-z]\b(?!/)", document.read_text()))
    packages = {path.parent.name for path in ROOT.glob("*/catenary_*/__init__.py")}
    named -= packages | {"catenary_models"}  # a volume
    assert not named - known


def test_the_guide_explains_every_alert_and_no_other() -> None:
    files = ("compose/obs/alerts.yaml", "deploy/helm/catenary/templates/monitoring.yaml")
    rules = "".join((ROOT / file).read_text() for file in files)
    guide = (ROOT / "docs" / "guide" / "monitoring.md").read_text()
    alerts = set(re.findall(r"alert: (\w+)", rules))
    assert alerts
    assert alerts == set(re.findall(r"^\| `(Catenary\w+)` \|", guide, re.M))


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    for page in ROOT.glob("docs/adr/0*.md"):
        assert page.name in index


def test_nothing_names_this_machine() -> None:
    done = subprocess.run(
        ["git", "grep", "-nE", r"/(work|farm)/|pypi\.or[g]|registry\.npmj[s]|/home/[a-z]"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("tests/docs/")]
    assert not lines, lines
