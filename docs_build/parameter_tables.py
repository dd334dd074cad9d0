"""The tables of parameters on docs/openai.md, from the table in the program.

`python -m docs_build.parameter_tables` writes them into the page.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from catenary_gateway.openai_http.parameters import (
    BOTH,
    CHATS,
    PARAMETERS,
    Parameter,
    ParameterKind,
)
from docs_build.reference.markdown import code, table

PAGE = Path(__file__).parent.parent / "docs/openai.md"
BEGIN = "<!-- parameters: written by docs_build/parameter_tables.py -->"
END = "<!-- end of parameters -->"
_HEADS = {
    ParameterKind.TAKEN: "**Taken**",
    ParameterKind.REFUSED: "**Refused** with status 400 and the name in `param`, since the answer "
    "would not be what was asked for; values that ask for nothing (null, false, empty) pass",
    ParameterKind.IGNORED: "**Ignored**, as is every parameter that is in none of these tables",
}


def tables() -> str:
    """Returns the part of the page between its marks."""
    parts = [BEGIN]
    for kind, head in _HEADS.items():
        treated = [each for each in PARAMETERS if each.kind is kind]
        rows = [
            (", ".join(code(each.name) for each in same), paths, text)
            for (paths, text), group in groupby(treated, lambda each: (_paths(each), each.text))
            if (same := list(group))
        ]
        parts += [f"{head}:", table(("parameter", "of", ""), rows).strip()]
    return "\n\n".join([*parts, END])


def _paths(parameter: Parameter) -> str:
    if parameter.paths == BOTH:
        return "both"
    return "chats" if parameter.paths == CHATS else "completions"


def write() -> None:
    """Replaces the part of the page between its marks."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + tables() + rest.partition(END)[2])


if __name__ == "__main__":
    write()
