"""`catenaryd` as a user meets it: help with examples, one sentence per error, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from catenaryd.command_line import cli
from cluster_harness import ROOT, environment


def commands(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    """Yields the words of every command below one, groups and their commands alike."""
    if path:
        yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, *path, name)


def catenaryd(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "catenaryd", *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("words", [*commands(cli)], ids=" ".join)
def test_every_command_has_help_with_an_example(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*words, "--help"])
    assert done.exit_code == 0
    assert f"Example: catenaryd {' '.join(words)}" in done.stdout


def test_a_process_says_the_same_as_its_help() -> None:
    done = catenaryd("gateway", "--help")
    assert done.returncode == 0
    here = CliRunner().invoke(cli, ["gateway", "--help"])
    # Each breaks its lines for the terminal it has, and calls itself as it was called.
    _, said = done.stdout.split("gateway [OPTIONS]")
    assert said.split() == here.stdout.split("gateway [OPTIONS]")[1].split()


def test_an_unknown_option_is_bad_usage() -> None:
    done = catenaryd("up", "--no-such-thing")
    assert done.returncode == 2
    assert "--no-such-thing" in done.stderr


def test_a_wrong_setting_is_one_sentence_that_names_it() -> None:
    done = catenaryd("gateway", "--grpc-port", "70000", "--insecure")
    assert done.returncode == 1
    assert "gateway.grpc_port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_unknown_key_of_the_settings_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "catenary.yaml"
    file.write_text("gateway:\n  grcp_port: 1\n")
    done = catenaryd("--config", str(file), "gateway", "--insecure")
    assert done.returncode == 1
    assert "gateway.grcp_port" in done.stderr


def test_without_tls_or_insecure_a_process_refuses_to_start() -> None:
    done = catenaryd("gateway", "--gateway-id", "g", "--grpc-port", "0", "--http-port", "0")
    assert done.returncode == 1
    assert "insecure" in done.stdout + done.stderr


def test_up_with_an_unknown_model_says_what_there_is(tmp_path: Path) -> None:
    done = catenaryd("up", "--model", "nothing-like-it", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert "nothing-like-it" in done.stderr
    assert "efficientnet-lite0" in done.stderr


def test_up_with_a_hopeless_setting_fails_soon_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "catenary.yaml"
    file.write_text("gateway:\n  max_stream_requests: 0\n")
    done = catenaryd(
        "--config",
        str(file),
        "up",
        "--agents",
        "1",
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--data-dir",
        str(tmp_path / "data"),
    )
    assert done.returncode == 1
    assert "gateway.max_stream_requests" in done.stderr


def test_a_created_key_is_printed_once_and_stored_as_a_hash(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    done = catenaryd("create-key", "alice", "--keys-file", str(keys))
    assert done.returncode == 0
    key = done.stdout.strip()
    stored = json.loads(keys.read_text())["keys"]
    assert [entry["name"] for entry in stored] == ["alice"]
    assert key not in keys.read_text()
