"""The form an answer must have: OpenAI's `response_format` and vLLM's fields, as one grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from catenary_gateway.generation.grammar.forms import (
    ANY_OBJECT,
    SOME_WHITESPACE,
    grammar_of_choice,
    grammar_of_regex,
    grammar_of_schema,
)
from catenary_services.domain.sampling import MAX_GRAMMAR_BYTES
from catenary_services.errors import InvalidInput

Fields = Mapping[str, Any]
FORM_FIELDS = frozenset(
    {
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_whitespace_pattern",
    }
)
"""The fields of a body that `answer_form_of` reads."""
_MOST_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that an answer must have."""

    grammar: str = ""
    """The grammar that it must match; empty if any answer will do."""
    field: str = "grammar"
    """The field that describes it."""


ANY_FORM = AnswerForm()


def answer_form_of(fields: Fields) -> AnswerForm:
    """Returns the form that the fields of a completion or chat completion ask for.

    Raises:
        InvalidInput: A field is wrong, asks for what is not offered, or contradicts another one.
    """
    whitespace = _whitespace(fields, "guided_whitespace_pattern")
    readers: dict[str, Callable[[Any], str]] = {
        "response_format": _response_format,
        "structured_outputs": _structured_outputs,
        "guided_json": lambda value: _json(value, "guided_json", whitespace),
        "guided_regex": lambda value: _regex(value, "guided_regex", whitespace),
        "guided_choice": lambda value: _choice(value, "guided_choice", whitespace),
        "guided_grammar": lambda value: _rules(value, "guided_grammar", whitespace),
    }
    given = [name for name in readers if fields.get(name) is not None]
    forms = [
        AnswerForm(grammar, name) for name in given if (grammar := readers[name](fields[name]))
    ]
    if len(forms) > 1:
        raise InvalidInput(forms[1].field, f"contradicts {forms[0].field}: give one of them")
    for form in forms:
        try:
            size = len(form.grammar.encode())
        except UnicodeEncodeError:
            text = "has halves of characters (lone surrogates)"
            raise InvalidInput(form.field, text) from None
        if size > MAX_GRAMMAR_BYTES:
            text = f"has {size} bytes as a grammar, at most {MAX_GRAMMAR_BYTES} are allowed"
            raise InvalidInput(form.field, text)
    return forms[0] if forms else ANY_FORM


def _response_format(value: Any) -> str:
    name = "response_format"
    if not isinstance(value, dict):
        raise InvalidInput(name, "must be an object")
    kind = value.get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return grammar_of_schema(ANY_OBJECT, name)
    if kind != "json_schema":
        raise InvalidInput(f"{name}.type", "must be text, json_object or json_schema")
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise InvalidInput(f"{name}.json_schema", "must be an object")
    schema = described.get("schema")
    if not isinstance(schema, dict):
        raise InvalidInput(f"{name}.json_schema.schema", "must be an object")
    if not isinstance(described.get("strict"), bool | None):
        raise InvalidInput(f"{name}.json_schema.strict", "must be true or false")
    # Answers match a schema whether or not it is strict.
    return grammar_of_schema(schema, name)


def _structured_outputs(value: Any) -> str:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise InvalidInput(name, "must be an object")
    for other in ("structural_tag", "disable_additional_properties"):
        if value.get(other):
            raise InvalidInput(f"{name}.{other}", "is not offered")
    whitespace = _whitespace(value, "whitespace_pattern", f"{name}.")
    if value.get("disable_any_whitespace"):
        whitespace = None
    given = [kind for kind in _FORMS if value.get(kind) not in (None, False)]
    if len(given) != 1:
        raise InvalidInput(name, f"must have exactly one of {', '.join(_FORMS)}")
    field = f"{name}.{given[0]}"
    return _FORMS[given[0]](value[given[0]], field, whitespace)


def _whitespace(fields: Fields, name: str, prefix: str = "") -> str | None:
    value = fields.get(name)
    return SOME_WHITESPACE if value is None else _text(value, prefix + name)


def _json(value: Any, field: str, whitespace: str | None) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidInput(field, "is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidInput(field, "must be a JSON schema: an object")
    return grammar_of_schema(value, field, whitespace)


def _regex(value: Any, field: str, _: str | None) -> str:
    return grammar_of_regex(_text(value, field))


def _choice(value: Any, field: str, _: str | None) -> str:
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_CHOICES:
        raise InvalidInput(field, f"must be a list of 1 to {_MOST_CHOICES} texts")
    return grammar_of_choice([_text(each, field) for each in value])


def _rules(value: Any, field: str, _: str | None) -> str:
    # EBNF becomes Lark where grammars are tried out: it may take long.
    return _text(value, field)


def _object(value: Any, field: str, whitespace: str | None) -> str:
    if value is not True:
        raise InvalidInput(field, "must be true or false")
    return grammar_of_schema(ANY_OBJECT, field, whitespace)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(field, "must be a text and not empty")
    if len(value) > MAX_GRAMMAR_BYTES:
        raise InvalidInput(field, f"has more than {MAX_GRAMMAR_BYTES} characters")
    return value


_FORMS: dict[str, Callable[[Any, str, str | None], str]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _rules,
    "json_object": _object,
}
"""vLLM's words for the ways to describe a form."""
