"""A group of commands that are imported when they are used, not to be listed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from textwrap import shorten
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

_COMPLETION_WIDTH = 60


class LazyCommand(NamedTuple):
    """A command that is not imported yet."""

    place: str
    """The module, and the name in it, as entry points give them: "catenaryd.commands.up:up"."""
    short_help: str
    """The first sentence of its help, as lists of commands show it."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used, and which corrects mistyped names.

    Args:
        *arguments: Passed on to click's group.
        lazy: The commands, by name.
        **settings: Passed on to click's group.
    """

    def __init__(self, *arguments: Any, lazy: Mapping[str, LazyCommand], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands, imported or not."""
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command, importing it if need be; None if there is none of this name."""
        if cmd_name not in self.commands and (entry := self._lazy.get(cmd_name)) is not None:
            module, _, name = entry.place.partition(":")
            self.add_command(getattr(import_module(module), name), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that the arguments name.

        Raises:
            UsageError: There is none of this name; the text says which is nearly called so.
        """
        known = self.list_commands(ctx)
        if args[0] not in known and not ctx.resilient_parsing and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], known, n=1, cutoff=0.5)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands, of which none is imported for it."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._short_help(name, limit)) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns the commands whose names begin so; none is imported for it."""
        return [
            CompletionItem(name, help=self._short_help(name, _COMPLETION_WIDTH))
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]

    def _short_help(self, name: str, limit: int) -> str:
        if name in self._lazy:
            return shorten(self._lazy[name].short_help, limit, placeholder="...")
        return self.commands[name].get_short_help_str(limit)
