"""A folder of the product or of tests holds about a dozen modules: whoever opens it sees them all."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

from cluster_harness import ROOT

LIMIT = 13
APART = {"lab/catenary_lab", "protos/catenary_protos"}
"""The research bench, which is put in order by itself, and generated code."""


def crowded(packages: list[Path], limit: int) -> dict[str, int]:
    """The folders with more modules than the limit; what makes a folder a package is none."""
    found = Counter(
        file.parent
        for package in packages
        for file in package.rglob("*.py")
        if file.name != "__init__.py"
    )
    return {str(folder): count for folder, count in found.items() if count > limit}


def product_packages() -> list[Path]:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packages = set(build["targets"]["wheel"]["packages"]) - APART
    return [ROOT / name for name in (*sorted(packages), "docs_build")]


def test_no_folder_of_the_product_holds_more_than_about_a_dozen_modules() -> None:
    packages = product_packages()
    assert all((package / "__init__.py").exists() for package in packages)
    assert crowded(packages, LIMIT) == {}


def test_no_folder_of_tests_holds_more_than_about_a_dozen_modules() -> None:
    assert crowded([ROOT / "tests"], LIMIT) == {}


def test_modules_are_counted_folder_by_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("__init__.py", "one.py", "two.py", "notes.md", "inner/three.py"):
        (tmp_path / name).touch()
    assert crowded([tmp_path], 1) == {str(tmp_path): 2}
    assert crowded([tmp_path], 2) == {}
