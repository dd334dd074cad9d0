"""What packages add to the commands: found by name, listed with our own, missed in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from catenary_services.errors import InvalidInput
from catenaryd import plug_ins
from catenaryd.command_line import cli
from reference_data import reference

PACKAGE = """\
import click

@click.command()
@click.argument("word")
def told(word):
    click.echo(f"told {word}")

def planner(dataset, instance, problem, clock):
    raise RuntimeError(f"asked for {instance}")
"""
ENTRY_POINTS = """\
[catenary.simulations]
told = other_lab:told
gone = package_that_is_not_there:command

[catenary.planners]
other = other_lab:planner
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package beside ours that adds a simulation and a planner."""
    (tmp_path / "other_lab.py").write_text(PACKAGE)
    metadata = tmp_path / "other_lab-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-lab\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.usefixtures("installed")
def test_a_package_adds_a_command_and_a_planner() -> None:
    assert invoke("simulate", "told", "all").stdout == "told all\n"
    listed = invoke("simulate", "--help").stdout
    assert "told" in listed
    assert "pools" in listed
    assert "other" in invoke("plan", "pools", "--help").stdout
    planned = invoke(
        "plan",
        "pools",
        "--dataset",
        str(reference("ppipe")),
        "--planner",
        "other",
        "--instance",
        "maf19/0.3-0.33-0.37/G1/HC1-L",
    )
    assert str(planned.exception) == "asked for maf19/0.3-0.33-0.37/G1/HC1-L"


@pytest.mark.usefixtures("installed")
def test_a_package_that_is_not_there_is_named_in_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="no package that is installed adds 'gone'"):
        plug_ins.plug_in(plug_ins.SIMULATIONS, "gone")


def test_names_that_nobody_adds_are_refused() -> None:
    refused = invoke("plan", "pools", "--dataset", "d", "--instance", "i", "--planner", "guess")
    assert refused.exit_code == 2
    assert "'guess' is not one of catenary" in refused.stderr
    assert invoke("simulate", "guesses").exit_code == 2


def test_commands_that_need_no_plug_in_import_none() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\n"
        "from catenaryd.command_line import cli\n"
        "for words in (['--help'], ['simulate', 'pools', '--help'], ['plan', 'pools', '--help']):\n"
        "    assert CliRunner().invoke(cli, words).exit_code == 0\n"
        "assert not [name for name in sys.modules if name.startswith('catenary_lab')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
