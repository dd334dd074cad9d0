"""Reading files that others wrote: never more than was bargained for."""

from __future__ import annotations

from pathlib import Path

from catenary_services.errors import InvalidInput

LARGEST_YAML_BYTES = 64 * 1024
MOST_YAML_LEVELS = 512
"""Reading YAML takes the square of how deep it is nested: seconds for a thousand levels."""
LARGEST_CONFIG_BYTES = 1024 * 1024
LARGEST_JSON_BYTES = 64 * 1024 * 1024
LARGEST_TEMPLATE_BYTES = 1024 * 1024


def read_yaml_text(path: Path, what: str = "") -> str:
    """Returns a YAML file whose size, and how deep it can be nested at most, are bounded.

    Raises:
        InvalidInput: it is larger, or could be deeper.
        UnicodeDecodeError: it is no text.
        OSError: it cannot be read.
    """
    text = read_bounded(path, LARGEST_YAML_BYTES, what).decode()
    if sum(map(text.count, ("[", "{", "- "))) > MOST_YAML_LEVELS:
        raise InvalidInput(what or path.name, f"has more than {MOST_YAML_LEVELS} lists and objects")
    return text


def read_bounded(path: Path, most_bytes: int, what: str = "") -> bytes:
    """Returns the bytes of a file.

    Args:
        path: The file.
        most_bytes: More is refused, and not read.
        what: How the file is called in errors; its name if empty.

    Raises:
        InvalidInput: it is larger.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise InvalidInput(what or path.name, f"is larger than {most_bytes} bytes")
    return content
