"""The page of the Python SDK: names, which mkdocstrings replaces by their docstrings."""

from __future__ import annotations

import inspect

import catenary
from docs_build.reference.markdown import page

_INTRO = """\
Everything `import catenary` offers. [How to use it](sdk-guide.md) is a page with examples."""


def sdk_page() -> str:
    groups: dict[str, list[str]] = {"Clients": [], "Results and options": [], "Errors": []}
    for name in catenary.__all__:
        groups[_group_of(name)].append(name)
    sections = []
    for title, names in groups.items():
        entries = [f"::: catenary.{name}" for name in names]
        sections.append("\n\n".join([f"## {title}", *entries]))
    return page("Python SDK", _INTRO, *sections)


def _group_of(name: str) -> str:
    thing = getattr(catenary, name)
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return "Errors"
    return "Clients" if name in ("AsyncClient", "Client") else "Results and options"
