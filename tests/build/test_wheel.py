"""What a wheel puts beside the packages of others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import build_native

ROOT = Path(__file__).parents[2]
RECORD = ROOT / build_native.RECORD
# Seconds on a quiet machine; a busy one gives a build and pip far less.
pytestmark = pytest.mark.timeout(600)
FOLDERS = [
    ROOT / folder
    for folder in (
        "catenaryd",
        "client/catenary",
        "gateway/catenary_gateway",
        "gpu_agent/catenary_agent",
        "lab/catenary_lab",
        "protos/catenary_protos",
        "scheduler/catenary_scheduler",
        "services/catenary_services",
        "simulator/catenary_simulator",
    )
]
PACKAGES = {folder.name for folder in FOLDERS}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that held nothing before the wheel of this checkout was installed into it."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    # The hook compiles for minutes, unless everything was compiled already.
    hooks = "false" if build_native.is_fresh(ROOT) else "true"
    environment = {**os.environ, "HATCH_BUILD_NO_HOOKS": hooks}
    _run(["-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)], environment)
    [wheel] = wheels.glob("*.whl")
    _run(
        [
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--target",
            str(site),
            str(wheel),
        ],
        environment,
    )
    return site


def _run(arguments: Iterable[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_packages_called_catenary_are_at_the_top(installed: Path) -> None:
    found = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} - {"bin"}
    native = {name for name in found if name.startswith(f"{build_native.GROUP}__mypyc")}
    assert found - native == PACKAGES
    assert {path.name for path in (installed / "bin").iterdir()} == {"catenary", "catenaryd"}


def test_every_module_and_its_data_are_there(installed: Path) -> None:
    wanted = {
        str(path.relative_to(folder.parent))
        for folder in FOLDERS
        for path in folder.rglob("*.*")
        if path.is_file() and path.suffix not in (".pyc", ".so") and path != RECORD
    }
    if build_native.is_fresh(ROOT):
        wanted |= {build_native.installed(name) for name in build_native.outputs(ROOT)}
    assert "catenary_gateway/dashboard/assets/index.html" in wanted
    assert [name for name in sorted(wanted) if not (installed / name).is_file()] == []


def test_packages_are_imported_from_where_they_were_installed(installed: Path) -> None:
    code = (
        "import importlib, pathlib, sys\n"
        "site = pathlib.Path(sys.argv[1])\n"
        "sys.path.insert(0, str(site))\n"
        "for name in sys.argv[2:]:\n"
        "    assert pathlib.Path(importlib.import_module(name).__file__).is_relative_to(site), name\n"
        "import catenary_gateway.process, catenary_scheduler.process, catenary_agent.process\n"
        "import catenary_simulator.placement.engine, catenaryd.command_line, catenary_lab.commands\n"
        "old = {'gateway', 'gpu_agent', 'scheduler', 'services', 'simulator'} & set(sys.modules)\n"
        "assert not old, old\n"
        "print('imported')\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(installed), *sorted(PACKAGES)],
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert (done.stdout, done.returncode) == ("imported\n", 0), done.stderr
