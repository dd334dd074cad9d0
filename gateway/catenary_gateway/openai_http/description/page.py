"""The OpenAPI document as a page: plain HTML, in which nothing is executed or fetched."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "h2{font:bold 1em monospace;margin:2em 0 .2em}p{margin:.2em 0}"
    "table{border-collapse:collapse;margin:.5em 0}td{border-top:1px solid #ddd;"
    "padding:.2em 1em .2em 0;vertical-align:top}code{font-family:monospace}"
)
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The headers of the page, by which browsers refuse whatever it does not need."""
_SHOWN = 60


def page_of(document: dict[str, Any]) -> str:
    """Returns the page of an OpenAPI document."""
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{_STYLE}</style><h1>{title}</h1>",
        "<p>The same for programs: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    schemas = document["components"]["schemas"]
    for path, place in document["paths"].items():
        for method, operation in place.items():
            parts.append(f"<h2>{escape(method.upper())} {escape(path)}</h2>")
            parts.append(f"<p>{escape(operation['summary'])}</p>")
            parts.append(_fields(operation, schemas))
    return "".join(parts) + "</html>"


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    body = operation.get("requestBody")
    if body is None:
        return ""
    schema = body["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(_form(facts))}"
        f"<td>{'required' if name in required else ''}"
        f"<td>{escape(facts.get('description', ''))}"
        for name, facts in schema["properties"].items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _form(facts: dict[str, Any]) -> str:
    """Returns the form of a field in a few words."""
    if "anyOf" in facts:
        # Nearly all may be null, which is as good as absent.
        return " or ".join(_form(e) for e in facts["anyOf"] if e != {"type": "null"})[:_SHOWN]
    if "enum" in facts:
        return " or ".join(map(str, facts["enum"]))[:_SHOWN]
    if "$ref" in facts:
        return str(facts["$ref"].rpartition("/")[2])
    kind = str(facts.get("type", "any"))
    return f"{kind} of {_form(facts['items'])}" if facts.get("items") else kind
