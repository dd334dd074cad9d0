"""The page of settings: every setting of every process with type, default and variable."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from catenary_agent.settings import AgentSettings
from catenary_gateway.settings import GatewaySettings
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.settings import ProcessSettings
from docs_build.reference.markdown import code, page, plain, table

PROCESSES: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "agent": AgentSettings,
}
"""Settings classes by their sections of `catenary.yaml`."""

_INTRO = """\
Every setting is a line in the section of its process in `catenary.yaml`, an environment variable,
and a flag of the process' command (`grpc_port` is `--grpc-port`). Flags win over variables,
variables over the file. What several processes have is listed first. [Operating
Catenary](../operations.md#settings) says how they are read."""


def settings_page() -> str:
    common = ProcessSettings.model_fields
    sections = [f"## Every process\n\n{_table(common)}"]
    for section, cls in PROCESSES.items():
        own = {name: field for name, field in cls.model_fields.items() if name not in common}
        sections.append(f"## {section.capitalize()}\n\nSection `{section}:`.\n\n{_table(own)}")
    return page("Settings", _INTRO, *sections)


def _table(fields: dict[str, FieldInfo]) -> str:
    return table(("setting", "type", "default", "variable", ""), _rows(fields))


def _rows(fields: dict[str, FieldInfo]) -> Iterator[tuple[str, ...]]:
    for name, field in sorted(fields.items()):
        yield (
            code(name),
            _type_of(field.annotation) + _bounds(field),
            _default_of(field),
            code(f"CATENARY_{name.upper()}"),
            plain(field.description or ""),
        )


def _type_of(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(code(str(each)) for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_of(each) for each in arguments if each is not type(None))
    if origin in (list, tuple):
        return f"list of {_type_of(arguments[0])}"
    names = {str: "text", int: "whole number", float: "number", bool: "yes or no", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    said = [
        f"{words[name]} {getattr(rule, name):g}"
        for rule in field.metadata
        for name in words
        if getattr(rule, name, None) is not None
    ]
    return f", {', '.join(said)}" if said else ""


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.default
    if value is PydanticUndefined:
        made = field.default_factory
        value = made() if made is not None else None  # type: ignore[call-arg]
        if isinstance(value, Path):
            return "a folder of the system's for temporary files"
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(code(str(each)) for each in value) or "empty"
    return code(str(value)) if str(value) else "empty"
