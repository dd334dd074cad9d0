"""Readers for files that others wrote, which refuse a file larger than a given bound."""

from __future__ import annotations

from pathlib import Path

from catenary_services.errors import InvalidInput

LARGEST_YAML_BYTES = 64 * 1024
MOST_YAML_LEVELS = 512
"""The most lists and objects in a YAML file. The parser's time grows with the square of the nesting
depth: a thousand levels take seconds."""
LARGEST_CONFIG_BYTES = 1024 * 1024
LARGEST_JSON_BYTES = 64 * 1024 * 1024
LARGEST_TEMPLATE_BYTES = 1024 * 1024


def read_yaml_text(path: Path, what: str = "") -> str:
    """Returns the text of a YAML file of at most 64 KiB and 512 lists and objects.

    `what` is how errors call the file; its name if empty.

    Raises:
        InvalidInput: The file is larger, or has more lists and objects.
        UnicodeDecodeError: The file is not UTF-8 text.
        OSError: The file cannot be read.
    """
    text = read_bounded(path, LARGEST_YAML_BYTES, what).decode()
    if sum(map(text.count, ("[", "{", "- "))) > MOST_YAML_LEVELS:
        raise InvalidInput(what or path.name, f"has more than {MOST_YAML_LEVELS} lists and objects")
    return text


def read_bounded(path: Path, most_bytes: int, what: str = "") -> bytes:
    """Returns the bytes of a file.

    Args:
        path: The file.
        most_bytes: A larger file is refused and not read to its end.
        what: How errors call the file; its name if empty.

    Raises:
        InvalidInput: The file is larger.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise InvalidInput(what or path.name, f"is larger than {most_bytes} bytes")
    return content
