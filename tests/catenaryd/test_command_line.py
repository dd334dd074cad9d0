"""`catenaryd` as a user meets it: help with examples, one sentence per error, exit codes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from catenary_agent.settings import AgentSettings
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.settings import USUAL_REPOSITORY
from catenaryd.command_line import LAZY_COMMANDS, cli, main
from catenaryd.local.local_cluster import ClusterOptions
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


def catenaryd(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
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


def test_the_list_of_commands_says_what_their_own_help_says() -> None:
    context = click.Context(cli)
    for name, entry in LAZY_COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert entry.short_help == command.get_short_help_str(limit=200)


def test_ctrl_c_is_an_exit_code_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = click.Command(
        "interrupted", callback=lambda: signal.raise_signal(signal.SIGINT), params=[]
    )
    monkeypatch.setitem(cli.commands, "interrupted", interrupted)
    monkeypatch.setattr(sys, "argv", ["catenaryd", "interrupted"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_listing_the_commands_imports_none_of_them() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "catenaryd", "-h"],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert "verify-model" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "catenaryd.lazy_group" in imported
    servers = {"catenary_agent", "catenary_gateway", "catenary_scheduler"}
    assert not imported & {*servers, "numpy", "grpc", "pydantic", "structlog"}


def test_a_mistyped_command_is_corrected() -> None:
    done = catenaryd("profle")
    assert done.returncode == 2
    assert "Did you mean 'profile'?" in done.stderr
    assert "Did you mean" not in catenaryd("xyzzy").stderr


def test_commands_are_completed_by_the_shell() -> None:
    script = catenaryd("completion", "bash")
    assert script.returncode == 0
    assert "complete -o nosort -F _catenaryd_completion catenaryd" in script.stdout
    variables = {
        "_CATENARYD_COMPLETE": "bash_complete",
        "COMP_WORDS": "catenaryd verify",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "catenaryd"],
        capture_output=True,
        text=True,
        env={**environment(), **variables},
        check=True,
    )
    assert done.stdout.split() == ["plain,verify-model"]


def test_it_says_its_version() -> None:
    done = catenaryd("--version")
    assert (done.returncode, done.stdout.strip()) == (0, metadata.version("catenary"))


def test_a_port_in_use_is_found_before_the_minutes_that_models_take(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = catenaryd(
            *("up", "--model", "smollm2-135m", "--agents", "1", "--data-dir", str(tmp_path)),
            *("--http-port", str(port), "--grpc-port", "0"),
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--http-port chooses another" in done.stderr
    assert not (tmp_path / "models" / "smollm2-135m").exists()


def test_every_command_and_process_looks_for_models_in_the_same_folder() -> None:
    assert AgentSettings.model_fields["model_repository"].default == USUAL_REPOSITORY
    assert SchedulerSettings.model_fields["model_repository"].default == USUAL_REPOSITORY
    context = click.Context(cli)
    for words in commands(cli):
        command: Any = cli
        for word in words:
            command = command.get_command(context, word)
        for option in command.params:
            if option.name == "model_repository" and isinstance(option.default, Path):
                assert option.default == USUAL_REPOSITORY, words
    assert ClusterOptions().data_dir / "models" == USUAL_REPOSITORY


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
    ports = [word for port in ("grpc", "http", "metrics") for word in (f"--{port}-port", "0")]
    done = catenaryd("up", "--model", "nothing-like-it", "--data-dir", str(tmp_path), *ports)
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
