"""Pieces of JSON Schemas, of which the descriptions of bodies and answers are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
ANY_OBJECT: Schema = {"type": "object"}


def one(*values: object) -> Schema:
    """Returns the schema of a value that is one of these."""
    return {"enum": list(values)}


def list_of(items: Schema) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> dict[str, Any]:
    """Returns the schema of a value that may be null, with the same description."""
    inner = dict(schema)
    outer: dict[str, Any] = {
        name: inner.pop(name) for name in ("description", "default") if name in inner
    }
    if not inner or {"type": "null"} in inner.get("anyOf", ()):
        return {**inner, **outer}
    options = inner["anyOf"] if inner.keys() == {"anyOf"} else [inner]
    return {"anyOf": [*options, {"type": "null"}], **outer}


def record(optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    """Returns the schema of an object that has these fields, and may have others."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)}
