"""All routes as an OpenAPI document, made of the table of routes and of the types of bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from catenary_gateway.endpoints.repository import server_version
from catenary_gateway.openai_http.calls.bodies import SamplingBody
from catenary_gateway.openai_http.description.route_table import HttpRoute, ReadBody, summary_of
from catenary_gateway.openai_http.parameters import PARAMETERS

Document = dict[str, Any]
_SCHEMAS = "#/components/schemas/"
_PARAMETER = re.compile(r"\{(\w+)\}")
_TEXT, _FLAG, _NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
_KNOWN_FORMS: dict[str, Document] = {
    "model": _TEXT,
    "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
    "tools": {"type": "array", "items": {"type": "object"}},
    "max_tokens": {**_NUMBER, "minimum": 1},
    "max_completion_tokens": {**_NUMBER, "minimum": 1},
    "n": {**_NUMBER, "minimum": 1},
    "stream": _FLAG,
    "stream_options": {"type": "object"},
    "response_format": {"type": "object"},
}
"""Forms of fields that functions read, beside those of sampling; others have any form."""


def openapi_document(routes: Iterable[HttpRoute], others: Iterable[web.RouteDef]) -> dict[str, Any]:
    """Returns the OpenAPI document of the HTTP endpoints.

    Args:
        routes: The routes that this document describes with their bodies.
        others: Further routes, of which only that they are there is told.
    """
    routes = list(routes)
    bodies = [each.body for each in routes if isinstance(each.body, type)]
    _, schemas = msgspec.json.schema_components(
        [SamplingBody, *bodies], ref_template=_SCHEMAS + "{name}"
    )
    sampling = schemas.pop(SamplingBody.__name__)["properties"]
    paths: dict[str, Document] = {}
    for route in routes:
        if isinstance(route.body, ReadBody):
            schemas[_name_of(route)] = _read_schema(route.body, {**sampling, **_KNOWN_FORMS})
        place = paths.setdefault(route.path, {})
        place[route.method.lower()] = _operation(route)
    for other in others:
        place = paths.setdefault(other.path, {})
        operation = _bare_operation(other.path, summary_of(other.handler))
        operation["tags"] = ["Open Inference Protocol and probes"]
        place[other.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Catenary", "version": server_version()},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: HttpRoute) -> Document:
    operation = _bare_operation(route.path, route.summary)
    if route.streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {}
    if route.body is not None:
        schema = {"$ref": _SCHEMAS + _name_of(route)}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _bare_operation(path: str, summary: str) -> Document:
    operation: Document = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {}}},
            "default": {"description": "An error, in the form of the path's protocol."},
        },
    }
    names = _PARAMETER.findall(path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]
    return operation


def _name_of(route: HttpRoute) -> str:
    if isinstance(route.body, ReadBody):
        return "".join(part.capitalize() for part in route.path.split("/")[2:]) + "Body"
    assert route.body is not None
    return route.body.__name__


def _read_schema(body: ReadBody, forms: dict[str, Document]) -> Document:
    said = {each.name: each.text for each in PARAMETERS if body.path in each.paths}
    properties = {
        name: {**forms.get(name, {}), "description": said.get(name, "")} for name in body.names()
    }
    return {"type": "object", "properties": properties, "required": list(body.sample)}
