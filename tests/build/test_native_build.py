"""The compiled modules, if there are any, are those of the sources."""

from __future__ import annotations

import os
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
    brain = "scheduler/catenary_scheduler"
    for package in (
        f"{brain}/book",
        f"{brain}/dispatch",
        f"{brain}/packing",
        "services/catenary_services",
    ):
        shutil.copytree(
            ROOT / package,
            tmp_path / build_native.installed(package),
            ignore=shutil.ignore_patterns("*.so", "*.pyc"),
        )
    package = tmp_path / "catenary_scheduler"
    (package / "__init__.py").touch()
    code = (
        "import catenary_scheduler.dispatch, catenary_scheduler.book as b\n"
        "print(b.COMPILED, b.__file__)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", str(package / "book/__init__.py")]
