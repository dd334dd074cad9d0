"""Command-line options made from a settings class, so that flags never drift from settings."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

Function = Callable[..., Any]


def _option_type(annotation: Any) -> tuple[Any, bool]:
    """Returns the click type of a field's annotation, and whether the option may be repeated."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return _option_type(inner[0])
    if origin in (list, tuple):
        return _option_type(typing.get_args(annotation)[0])[0], True
    if annotation is Path:
        return click.Path(path_type=Path), False
    if annotation in (bool, int, float):
        return annotation, False
    return str, False


def _option(name: str, field: FieldInfo) -> Callable[[Function], Function]:
    kind, repeated = _option_type(field.annotation)
    flag = "--" + name.replace("_", "-")
    secret = field.annotation is SecretStr
    # Defaults stay in the settings class: an option that is not given must not hide the value of
    # the file or the environment.
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=field.description)
    return click.option(
        flag,
        name,
        type=kind,
        multiple=repeated,
        default=None,
        help=field.description,
        hide_input=secret,
    )


def settings_options(
    cls: type[BaseSettings], only: Collection[str] = ()
) -> Callable[[Function], Function]:
    """Decorates a click command with one option per field of `cls`, described by the field.

    If `only` is not empty, there are options for these fields alone.
    """

    def decorate(function: Function) -> Function:
        for name, field in reversed(list(cls.model_fields.items())):
            if only and name not in only:
                continue
            function = _option(name, field)(function)
        return function

    return decorate


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the user gave."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flags.items()
        if value is not None and value != ()
    }


def command_line_of(flags: Mapping[str, Any]) -> list[str]:
    """Returns arguments that set `flags`, for starting a process; None values are left out."""
    arguments: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            for item in value:
                arguments += [flag, str(item)]
        else:
            arguments += [flag, str(value)]
    return arguments
