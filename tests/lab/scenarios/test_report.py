"""Tables and plots."""

from __future__ import annotations

from pathlib import Path

from catenary_lab.scenarios.plots import draw
from catenary_lab.scenarios.report import Bars, Figure, Lines, Report, Table, mean, percent

TABLE = Table("What", ("", "a", "b"), (("row", 0.12345, None), ("text", "x", 2.0)))


def test_a_table_is_markdown() -> None:
    assert TABLE.markdown().splitlines() == [
        "**What**",
        "",
        "|  | a | b |",
        "|---|---:|---:|",
        "| row | 0.123 | - |",
        "| text | x | 2.000 |",
    ]


def test_a_report_shows_tables_pictures_and_notes() -> None:
    figure = Figure("file", (Bars("t", "y", ("g",), {"s": (1.0,)}),), "caption")
    text = Report("n", "title", (TABLE,), (figure,), ("a note",)).markdown()
    assert text.index("**What**") < text.index("![caption](file.png)") < text.index("- a note")


def test_means_and_gains() -> None:
    assert mean([]) is None
    assert mean([1.0, 2.0]) == 1.5
    assert percent(1.5, 1.0) == "+50 %"
    assert percent(0.9, 1.0) == "-10 %"
    assert percent(None, 1.0) is None
    assert percent(1.0, 0.0) is None


def test_plots_are_pictures_and_do_not_change(tmp_path: Path) -> None:
    bars = Bars("bars", "y", ("a", "b"), {"one": (0.5, None), "two": (1.0, 0.2)})
    lines = Lines("lines", "x", "y", {"one": ((1.0, 2.0), (10.0, 3.0))}, log_x=True, log_y=True)
    figure = Figure("picture", (bars, lines, lines))
    path = draw(figure, tmp_path / "out")
    content = path.read_bytes()
    assert path.name == "picture.png"
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert draw(figure, tmp_path / "out").read_bytes() == content
