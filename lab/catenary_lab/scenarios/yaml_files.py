"""Scenario files as mappings, not yet validated."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from catenary_services.errors import InvalidInput


def read_mapping(path: Path) -> Mapping[Any, Any]:
    """Returns the mapping of a YAML file; `-` is the standard input.

    Raises:
        InvalidInput: If the file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
        document = yaml.safe_load(text)
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = str(error).replace("\n", " ")
        raise InvalidInput(path.name, f"is not YAML: {text}") from None
    if not isinstance(document, Mapping):
        raise InvalidInput(path.name, "must be a mapping of a scenario's keys")
    return document
