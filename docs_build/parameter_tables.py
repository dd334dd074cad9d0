"""The tables of parameters on docs/openai.md, from the table in the program.

`python -m docs_build.parameter_tables` writes them into the page.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from catenary_gateway.openai_http.description.route_table import HttpRoute, ReadBody
from catenary_gateway.openai_http.parameters import PARAMETERS
from catenary_gateway.openai_http.parameters.parameter import Parameter, ParameterKind
from catenary_gateway.openai_http.paths import ROUTES
from docs_build.reference.markdown import code, replace_between, table

PAGE = Path(__file__).parent.parent / "docs/openai.md"
BEGIN = "<!-- parameters: written by docs_build/parameter_tables.py -->"
END = "<!-- end of parameters -->"
_TAKEN = "**Taken** by chats and completions"
_FIELDS = (
    "**Taken** by the other paths; `/docs` of a gateway says of what form each of these is, the "
    "chapters below what they mean"
)
_REFUSED = (
    "**Refused** with status 400 and the name in `param`, since the answer would not be what was "
    "asked for; values that ask for nothing (null, false, empty, the default) pass"
)
_IGNORED = "**Ignored**, as is every parameter that is in none of these tables"


def tables() -> str:
    """Returns the part of the page between its marks."""
    chats = [each for each in PARAMETERS if each.kind is ParameterKind.TAKEN]
    fields = [(code(path), ", ".join(map(code, names))) for path, names in _fields()]
    parts = [
        f"{_TAKEN}:\n\n{_rows(chats)}",
        f"{_FIELDS}:\n\n{table(('path', 'parameters'), fields).strip()}",
        f"{_REFUSED}:\n\n{_rows(_of_kind(ParameterKind.REFUSED))}",
        f"{_IGNORED}:\n\n{_rows(_of_kind(ParameterKind.IGNORED))}",
    ]
    return "\n\n".join([BEGIN, *parts, END])


def _fields() -> list[tuple[str, list[str]]]:
    """Returns the paths whose bodies are types, and their fields; of equal ones the first path."""
    first: dict[object, HttpRoute] = {}
    for route in ROUTES:
        if route.body is not None and not isinstance(route.body, ReadBody):
            first.setdefault(route.body, route)
    return [(route.path, route.names) for route in first.values()]


def _of_kind(kind: ParameterKind) -> list[Parameter]:
    return [each for each in PARAMETERS if each.kind is kind]


def _rows(parameters: list[Parameter]) -> str:
    rows = [
        (", ".join(code(each.name) for each in same), paths, text)
        for (paths, text), group in groupby(parameters, lambda each: (_paths(each), each.text))
        if (same := list(group))
    ]
    return table(("parameter", "of", ""), rows).strip()


def _paths(parameter: Parameter) -> str:
    return ", ".join(sorted(parameter.paths))


if __name__ == "__main__":
    replace_between(PAGE, BEGIN, END, tables())
