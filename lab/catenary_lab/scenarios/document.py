"""A document with generated sections: prose stays, the text between the marks is replaced.

<!-- begin generated: NAME -->
...
<!-- end generated: NAME -->
"""

from __future__ import annotations

import re
from pathlib import Path

from catenary_services.errors import InvalidInput


def sections(text: str) -> list[str]:
    """Returns the names of a document's generated sections, in order."""
    return re.findall(r"^<!-- begin generated: ([\w-]+) -->$", text, flags=re.MULTILINE)


def section(name: str, content: str) -> str:
    """Returns a generated section with its marks."""
    begin, end = f"<!-- begin generated: {name} -->\n", f"<!-- end generated: {name} -->"
    return f"{begin}\n{content.strip()}\n\n{end}"


def replaced(text: str, name: str, content: str) -> str:
    """Returns the document with another content of one section.

    Raises:
        InvalidInput: The document has no such section, or does not end it.
    """
    begin, end = f"<!-- begin generated: {name} -->\n", f"<!-- end generated: {name} -->"
    before, found, rest = text.partition(begin)
    if not found:
        raise InvalidInput("document", f"has no generated section {name!r}")
    _, found, after = rest.partition(end)
    if not found:
        raise InvalidInput("document", f"does not end its section {name!r}")
    return f"{before}{section(name, content)}{after}"


def update(path: Path, name: str, content: str) -> None:
    """Replaces a section of a file, or adds it at the end if the file does not have it."""
    text = path.read_text("utf-8") if path.exists() else ""
    if name not in sections(text):
        text += f"\n<!-- begin generated: {name} -->\n<!-- end generated: {name} -->\n"
    path.write_text(replaced(text, name, content), "utf-8")
