"""Records of runs: what was found, what it was made by, and that nobody changed it since."""

from __future__ import annotations

import json
from pathlib import Path

from catenary_lab.scenarios.record import (
    made_now,
    record_of,
    report_of,
    sealed,
    settings_of,
    text_of,
)
from catenary_lab.scenarios.report import Bars, Figure, Report, Table

REPORT = Report(
    "n",
    "title",
    (Table("What", ("", "a"), (("row", 0.12345), ("none", None))),),
    (Figure("picture", (Bars("t", "y", ("g",), {"s": (1.0,)}),), "caption"),),
    ("a note",),
    {"rows": [{"a": 0.12345, "long": "x" * 200}]},
)


def record(folder: Path) -> dict[str, object]:
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return record_of(REPORT, {"kind": "attainment"}, made_now(), folder)


def test_a_record_read_back_shows_what_the_report_showed(tmp_path: Path) -> None:
    read = json.loads(text_of(record(tmp_path)))
    assert report_of("n", read).markdown() == REPORT.markdown()
    assert read["rows"] == REPORT.facts["rows"]


def test_a_record_says_what_it_was_made_by(tmp_path: Path) -> None:
    made = json.loads(text_of(record(tmp_path)))["made"]
    assert made.keys() == {"commit", "date", "machine", "from", "digest"}
    assert made["from"] == "the run"


def test_whatever_is_changed_no_longer_fits_the_digest(tmp_path: Path) -> None:
    read = json.loads(text_of(record(tmp_path)))
    assert sealed(read) == read
    for key, value in {"rows": [], "settings": {}, "made": {**read["made"], "date": ""}}.items():
        assert sealed({**read, key: value}) != {**read, key: value}


def test_settings_are_those_of_the_form_that_was_run(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        "kind: attainment\nseeds: [1, 2]\nexpect: [1]\nquick: {seeds: [1], expect: []}\n"
    )
    assert settings_of(path) == {"kind": "attainment", "seeds": [1, 2]}
    assert settings_of(path, quick=True) == {"kind": "attainment", "seeds": [1]}
    assert settings_of(Path("-")) == {}
