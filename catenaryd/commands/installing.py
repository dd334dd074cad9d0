"""The flags `--install`, `--system` and `--dry-run`: a unit for systemd instead of a run."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from catenaryd.machines.systemd_unit import unit_for

_FLAGS = ("--install", "--system", "--dry-run")


@dataclass(frozen=True, slots=True)
class InstallChoice:
    """The choice that the flags make."""

    wanted: bool
    system: bool
    dry_run: bool


def install_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a click command with the flags, given to it as one argument `install`."""

    @click.option(
        "--install",
        "wanted",
        is_flag=True,
        help="Write a unit for systemd that runs this with the machine, and do not run it now.",
    )
    @click.option(
        "--system",
        is_flag=True,
        help="With --install: a unit of the system.  [default for root; else of this user]",
    )
    @click.option("--dry-run", is_flag=True, help="With --install: print the unit, change nothing.")
    @functools.wraps(function)
    def with_choice(*args: Any, wanted: bool, system: bool, dry_run: bool, **flags: Any) -> Any:
        if (system or dry_run) and not wanted:
            raise click.UsageError("--system and --dry-run go with --install")
        choice = InstallChoice(wanted, system or os.geteuid() == 0, dry_run)
        return function(*args, install=choice, **flags)

    return with_choice


def install_command(
    name: str, description: str, choice: InstallChoice, arguments: Sequence[str] | None = None
) -> None:
    """Writes or prints the unit of a command.

    Args:
        name: Name of the unit.
        description: One line for people.
        choice: The flags.
        arguments: Arguments of `catenaryd`; None for those of this process without the flags.

    Raises:
        InvalidInput: The unit cannot be written.
    """
    if arguments is None:
        arguments = [each for each in sys.argv[1:] if each not in _FLAGS]
    unit = unit_for(name, description, arguments, system=choice.system)
    if choice.dry_run:
        click.echo(unit.text, nl=False)
        return
    unit.write()
    click.echo(f"wrote {unit.file}; start it with: {unit.enable}")
    if not choice.system:
        click.echo("units of a user end when they log out, unless: loginctl enable-linger")
