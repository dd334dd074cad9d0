"""`catenaryd simulate` for one kind of scenario files, as tests call it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from catenaryd.command_line import cli


@dataclass(frozen=True)
class ScenarioCommand:
    """Writes small scenarios and runs them."""

    name: str
    base: Mapping[str, Any]
    """What all scenarios have in common."""
    of_kind: Mapping[str, Mapping[str, Any]]
    """What each kind of them has besides."""

    def run(self, *arguments: str, text: str | None = None) -> Result:
        return CliRunner().invoke(cli, ["simulate", self.name, *arguments], input=text)

    def document(self, kind: str, /, **changes: Any) -> dict[str, Any]:
        return {"kind": kind, **self.base, **self.of_kind.get(kind, {}), **changes}

    def file(self, folder: Path, kind: str, /, **changes: Any) -> Path:
        path = folder / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(self.document(kind, **changes)))
        return path

    def text(self, path: Path) -> str:
        """Returns the tables that people get."""
        done = self.run(str(path), "--workers", "1")
        assert done.exit_code == 0, done.output
        return done.output

    def facts(self, path: Path, workers: int = 1) -> dict[str, Any]:
        done = self.run(str(path), "--workers", str(workers), "--json")
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.output)
        return found
