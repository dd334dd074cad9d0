"""The pages of the commands `catenaryd` and `catenary`, from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer.main

from catenary.command_line import application
from catenaryd.command_line import cli
from docs_build.reference.markdown import code, page, plain, table

_PLATFORM = """\
`catenaryd` runs the platform: single processes, a whole local cluster, planning and simulation
without a cluster, profiles, keys. An error is one sentence on stderr and exit code 1, bad usage
exit code 2. `--json` prints one JSON object."""

_CLIENT = """\
`catenary` uses and operates a cluster. Every command has the options of
[connecting](#options-of-every-command); they can be set by variables as well. An error is one
sentence on stderr and exit code 1, bad usage exit code 2. `--json` prints one JSON object."""

_CONNECTION = {
    "target",
    "admin",
    "api_key",
    "tls",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "insecure",
    "as_json",
}
"""Parameters that every command of the client has; see
`catenary.command_line.kit.CommandOptions`."""


_KINDS = {int: "INTEGER", float: "FLOAT", Path: "PATH", str: "TEXT"}


def platform_page() -> str:
    """Returns the page of `catenaryd`."""
    sections = [_section(path, command, ()) for path, command in leaves(cli, "catenaryd")]
    return page("catenaryd", _PLATFORM, *sections)


def client_page() -> str:
    """Returns the page of `catenary`."""
    found = list(leaves(client_command(), "catenary"))
    shared = [p for p in found[0][1].params if p.name in _CONNECTION]
    sections = [_section(path, command, tuple(_CONNECTION)) for path, command in found]
    options = "## Options of every command\n\n" + _options(shared)
    return page("catenary", _CLIENT, *sections, options)


def client_command() -> Any:
    """Returns the client's root command in click's form."""
    return typer.main.get_command(application.app)


def leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields every command that does something, with the words by which it is called."""
    children = subcommands(command)
    if not children or command.invoke_without_command:
        yield path, command
    for name, child in children.items():
        if not child.hidden:
            yield from leaves(child, f"{path} {name}")


def subcommands(command: Any) -> dict[str, Any]:
    """Returns the commands of a group by their names, sorted; empty for other commands."""
    if not hasattr(command, "list_commands"):
        return {}
    context = click.Context(command)
    return {
        name: command.get_command(context, name) for name in sorted(command.list_commands(context))
    }


def _section(path: str, command: Any, shared: tuple[str, ...]) -> str:
    arguments = [_argument(p) for p in command.params if not _is_option(p)]
    explained = [p for p in command.params if not _is_option(p) and getattr(p, "help", None)]
    options = [p for p in command.params if _is_option(p) and p.name not in shared]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *arguments])
    parts = [f"## {path}", f"    {usage}", *_help(command.help or "")]
    if explained:
        rows = [(code(_argument(p)), plain(p.help)) for p in explained]
        parts.append(table(("argument", ""), rows))
    if options:
        parts.append(_options(options))
    return "\n\n".join(parts)


def _help(text: str) -> Iterator[str]:
    """Yields the paragraphs of a help text, with an example as code."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text).replace("\b", "")):
        lead, found, example = paragraph.partition("Example: ")
        if lead.strip():
            yield plain(lead)
        if found:
            yield f"    {' '.join(example.split())}"


def _is_option(parameter: Any) -> bool:
    return bool(parameter.opts) and str(parameter.opts[0]).startswith("-")


def _argument(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name).upper().replace("_", "-")
    shown = name if parameter.required else f"[{name}]"
    return f"{shown}..." if parameter.nargs == -1 else shown


def _options(options: list[Any]) -> str:
    rows = []
    for option in options:
        if getattr(option, "hidden", False):
            continue
        names = ", ".join(code(name) for name in (*option.opts, *option.secondary_opts))
        takes = "" if getattr(option, "is_flag", False) else _value(option)
        said = plain(option.help or "")
        variable = option.envvar if isinstance(option.envvar, str) else ""
        rows.append((names, code(takes), _default(option), code(variable), said))
    return table(("option", "value", "default", "variable", ""), rows)


def _value(option: Any) -> str:
    kind = getattr(option, "type", None)
    if kind is None:  # typer's parameters keep the annotation instead of a click type
        annotation = option.type_descriptor.annotation
        return str(option.metavar or _KINDS.get(annotation, "TEXT"))
    if getattr(kind, "choices", None):
        return "|".join(map(str, kind.choices))
    return str(option.metavar or kind.name.partition(" ")[0].upper())


def _default(option: Any) -> str:
    value = option.default
    # click marks "not given" with a sentinel of its own in newer releases.
    if value is None or value is False or value == () or "UNSET" in str(value) or callable(value):
        return ""
    if isinstance(value, tuple | list):
        return ", ".join(code(str(each)) for each in value)
    return code(str(value))
