"""Grammars in the one form that agents know, made of all that clients describe answers by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import llguidance

from catenary_services.errors import InvalidInput

ANY_OBJECT: Mapping[str, object] = {"type": "object"}
"""The schema of any JSON object."""
SOME_WHITESPACE = r"[ \t\r\n]{1,24}"
"""Whitespace between the parts of a JSON answer: enough to be indented, too little for a model that
says nothing else to fill its answer with it."""


def grammar_of_schema(
    schema: Mapping[str, object], field: str, whitespace: str | None = SOME_WHITESPACE
) -> str:
    """Returns the grammar of JSON values that a schema describes.

    Args:
        schema: A JSON schema of draft 2020-12.
        field: The field that it came in.
        whitespace: A regular expression for whitespace between parts; None for no whitespace.

    Raises:
        InvalidInput: It has a keyword that would not be held to.
    """
    options = {
        "whitespace_flexible": whitespace is not None,
        "whitespace_pattern": whitespace,
        "lenient": False,
        "coerce_one_of": False,
    }
    # Options of the engine must not come from the client.
    document = {"json_schema": {**schema, "x-guidance": options}}
    try:
        return json.dumps({"grammars": [document]}, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidInput(field, "is nested too deeply") from None


def grammar_of_regex(pattern: str) -> str:
    """Returns the grammar of texts that a regular expression matches as a whole."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def grammar_of_choice(texts: Sequence[str]) -> str:
    """Returns the grammar of exactly one of some texts."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
