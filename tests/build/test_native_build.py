"""The compiled modules, if there are any, are those of the sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import build_native
from catenary_scheduler.book import COMPILED
from catenary_services.rules import walking

ROOT = Path(__file__).parents[2]
RECORD = ROOT / build_native.RECORD


@pytest.mark.skipif(not RECORD.exists(), reason="the compiled modules were not built (make native)")
def test_compiled_modules_are_of_these_sources() -> None:
    assert build_native.is_fresh(ROOT), "sources changed since; run `make native`"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_with_a_compiler_the_hot_path_is_compiled() -> None:
    if not RECORD.exists():
        pytest.skip("removed on purpose (build_native.py --remove)")
    assert COMPILED
    assert walking.COMPILED
    assert len(build_native.outputs(ROOT)) == len(build_native.CYTHON + build_native.MYPYC) + 1


def test_the_brain_works_uncompiled(tmp_path: Path) -> None:
    for package in (
        "scheduler/catenary_scheduler/book",
        "scheduler/catenary_scheduler/dispatch",
        "scheduler/catenary_scheduler/packing",
        "services",
    ):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so", "*.pyc")
        )
    (tmp_path / "scheduler/catenary_scheduler/__init__.py").touch()
    code = "import catenary_scheduler.dispatch, catenary_scheduler.book as b; print(b.COMPILED, b.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        "False",
        str(tmp_path / "scheduler/catenary_scheduler/book/__init__.py"),
    ]
