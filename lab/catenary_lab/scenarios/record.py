"""The record of a run as it is committed beside a result page: the findings and their origin.

The facts of the report stand at the top. `page` holds what a page shows of them (title, tables,
pictures, notes), `settings` the scenario, and `made` the commit of the code, the date, the machine
and a digest of all the rest, so that a digit that nobody measured does not pass (`make truth`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from catenary_lab.scenarios.report import Figure, Report, Table
from catenary_lab.scenarios.schema import read_mapping

_LINE = 160
_CODE = Path(__file__).resolve().parent


def made_now() -> dict[str, str]:
    """Returns commit of the code (`unknown`: no checkout), UTC date, machine and load."""
    return {
        "commit": _commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}",
        "from": "the run",
    }


def settings_of(path: Path, *, quick: bool = False) -> dict[str, Any]:
    """Returns one form of a scenario file as JSON values; empty for standard input.

    What the file expects of the run is left out, because nothing of the run depends on it.
    """
    if str(path) == "-":
        return {}
    document: dict[str, Any] = json.loads(json.dumps(read_mapping(path)))
    short = document.pop("quick", {})
    settings = {**document, **short} if quick else document
    settings.pop("expect", None)
    return settings


def record_of(
    report: Report, settings: Mapping[str, Any], made: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """Returns the record of a report.

    Args:
        report: The report.
        settings: The settings that `settings_of` returns.
        made: The origin that `made_now` returns.
        folder: Folder with the report's pictures.
    """
    page = {
        "title": report.title,
        "tables": [
            {"caption": each.caption, "header": each.header, "rows": each.rows}
            for each in report.tables
        ],
        "pictures": [
            {
                "name": each.name,
                "caption": each.caption or report.title,
                "sha256": picture_digest(folder, each.name),
            }
            for each in report.figures
        ],
        "notes": report.notes,
    }
    return sealed({**report.facts, "page": page, "settings": settings, "made": made})


def report_of(name: str, record: Mapping[str, Any]) -> Report:
    """Returns the report that a record was made of; its pictures lack their curves."""
    page = record["page"]
    tables = tuple(
        Table(each["caption"], tuple(each["header"]), tuple(tuple(row) for row in each["rows"]))
        for each in page["tables"]
    )
    figures = tuple(Figure(each["name"], (), each["caption"]) for each in page["pictures"])
    return Report(name, page["title"], tables, figures, tuple(page["notes"]))


def picture_digest(folder: Path, name: str) -> str:
    """Returns the SHA-256 of a picture's file, in hex."""
    return hashlib.sha256((folder / f"{name}.png").read_bytes()).hexdigest()


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with the digest of everything else in it."""
    made = {key: value for key, value in record["made"].items() if key != "digest"}
    bare = {**record, "made": made}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    return {**bare, "made": {**made, "digest": hashlib.sha256(text.encode()).hexdigest()}}


def text_of(record: Mapping[str, Any]) -> str:
    """Returns a record as its file holds it: JSON, with everything on one line that fits."""
    return _json(record, "") + "\n"


def _json(value: Any, indent: str) -> str:
    text = json.dumps(value)
    if len(indent) + len(text) <= _LINE or not isinstance(value, Mapping | list | tuple):
        return text
    deeper = indent + " "
    if isinstance(value, Mapping):
        parts = [f"{deeper}{json.dumps(key)}: {_json(each, deeper)}" for key, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    parts = [deeper + _json(each, deeper) for each in value]
    return "[\n" + ",\n".join(parts) + f"\n{indent}]"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", _CODE, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":/*.pyx")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
