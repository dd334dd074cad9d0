"""The page and its assets: complete, from here, without anything inline."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import catenary_gateway.dashboard
from catenary_gateway.dashboard import files

FOLDER = Path(catenary_gateway.dashboard.__file__).parent / "assets"
FILES = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
MOST_BYTES = 150_000
NAMESPACES = {"http://www.w3.org/2000/svg"}
"""Names, which nobody fetches."""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.inline: list[str] = []
        self.ids: list[str] = []
        self.labelled: set[str] = set()
        self.controls: set[str] = set()
        self._in_label = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.references += [given[name] or "" for name in ("src", "href") if name in given]
        self.inline += [
            f"{tag} {name}" for name in given if name.startswith("on") or name == "style"
        ]
        if tag in ("script", "style") and "src" not in given:
            self.inline.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self._in_label = self._in_label or tag == "label"
        if tag == "label" and given.get("for"):
            self.labelled.add(given["for"] or "")
        if tag in ("select", "input", "textarea"):
            self.controls.add(given.get("id") or "")
            if self._in_label:
                self.labelled.add(given.get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        self._in_label = self._in_label and tag != "label"


def page() -> _Page:
    read = _Page()
    read.feed(FILES["index.html"])
    return read


def test_everything_that_is_referred_to_exists() -> None:
    for reference in page().references:
        if reference.startswith("#"):
            assert reference[1:] in page().ids, reference
        else:
            assert reference.removeprefix("dashboard/assets/") in files.load(), reference


def test_every_import_exists_and_every_module_is_reached() -> None:
    reached, waiting = {"index.html"}, ["app.js"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += re.findall(r'from "\./([\w.]+)"', FILES[name])
    assert reached | {"style.css", "icon.svg"} == set(FILES)


def test_every_element_that_scripts_ask_for_exists_once() -> None:
    ids = page().ids
    assert len(ids) == len(set(ids))
    for name, text in FILES.items():
        for wanted in re.findall(r'byId\("([\w-]+)"\)', text):
            assert wanted in ids, f"{name} asks for {wanted}"


def test_nothing_is_fetched_from_elsewhere() -> None:
    for name, text in FILES.items():
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= NAMESPACES, name
        assert not re.search(r"""["'(]//""", text), name
        assert "@import" not in text


def test_nothing_is_inline_and_text_never_becomes_markup() -> None:
    assert page().inline == []
    for name, text in FILES.items():
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "new Function",
            "javascript:",
        ):
            assert forbidden not in text, f"{forbidden} in {name}"
        assert "localStorage" not in text, "keys stay in their tab"


def test_every_control_has_a_label() -> None:
    assert page().controls <= page().labelled


def test_the_page_is_small() -> None:
    assert sum(len(text.encode()) for text in FILES.values()) < MOST_BYTES


def test_each_asset_has_a_tag_of_its_content_and_a_type_browsers_take() -> None:
    loaded = files.load()
    assert set(loaded) == set(FILES)
    assert len({asset.etag for asset in loaded.values()}) == len(loaded)
    assert loaded["app.js"].content_type == "text/javascript"
    assert loaded["style.css"].content_type == "text/css"


def _luminance(colour: str) -> float:
    def part(at: int) -> float:
        value = int(colour[at : at + 2], 16) / 255
        return value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4

    return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5)


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_their_ground_in_both_schemes() -> None:
    light, dark = FILES["style.css"].split("prefers-color-scheme: dark", 1)
    for scheme in (light, dark.split("}", 1)[0]):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        assert len(colours) >= 20
        for ground in ("panel", "ground", "stripe"):
            for text in ("ink", "soft", "accent", "good", "warn", "bad"):
                assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for model in (f"m{at}" for at in range(8)):
            assert _contrast(colours[model], colours["panel"]) >= 3, model
