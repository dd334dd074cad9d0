"""All routes as an OpenAPI document, made of the table of routes and of the types of bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from catenary_gateway.endpoints.error_forms import error_form
from catenary_gateway.endpoints.json_schemas import (
    ANY_OBJECT,
    FLAG,
    INTEGER,
    TEXT,
    Schema,
    list_of,
    nullable,
    one,
    record,
)
from catenary_gateway.endpoints.route_descriptions import RouteDescription, summary_of
from catenary_gateway.openai_http.calls.bodies import SamplingBody
from catenary_gateway.openai_http.description.answer_schemas import ANSWERS, ERRORS
from catenary_gateway.openai_http.description.route_table import HttpRoute, ReadBody
from catenary_gateway.openai_http.messages import ROLES
from catenary_gateway.openai_http.parameters import PARAMETERS
from catenary_services.version import software_version

Document = dict[str, Any]
_JSON = "application/json"
_SCHEMAS = "#/components/schemas/"
_PARAMETER = re.compile(r"\{(\w+)\}")
_PARTS = list_of(record(type=one("text"), text=TEXT))
_MESSAGE = record({"content": nullable({"anyOf": [TEXT, _PARTS]})}, role=one(*ROLES))
_KNOWN_FORMS: Mapping[str, Schema] = {
    "model": {**TEXT, "minLength": 1},
    "messages": {**list_of(_MESSAGE), "minItems": 1},
    "tools": list_of(ANY_OBJECT),
    "max_tokens": {**INTEGER, "minimum": 1},
    "max_completion_tokens": {**INTEGER, "minimum": 1},
    "n": {**INTEGER, "minimum": 1},
    "stream": FLAG,
    "stream_options": ANY_OBJECT,
    "response_format": ANY_OBJECT,
}
"""Forms of fields that functions read, beside those of sampling; others have any form."""


def openapi_document(
    routes: Iterable[HttpRoute], others: Iterable[RouteDescription]
) -> dict[str, Any]:
    """Returns the OpenAPI document of the HTTP endpoints.

    Args:
        routes: The routes of this folder.
        others: The routes of other protocols.
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
            schemas[_name_of(route)] = _read_schema(route, {**sampling, **_KNOWN_FORMS})
        place = paths.setdefault(route.path, {})
        place[route.method.lower()] = _operation(route)
    for body in {_name_of(route) for route in routes if route.body is not None}:
        schemas[body] = _with_nulls(schemas[body])
    for other in others:
        route_of = other.definition
        summary = summary_of(route_of.handler)
        operation = _described(route_of.path, summary, other.answer, other.body)
        operation["tags"] = ["Open Inference Protocol and probes"]
        operation["responses"]["200"]["content"] |= {kind: {} for kind in other.other_types}
        paths.setdefault(route_of.path, {})[route_of.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Catenary", "version": software_version()},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: HttpRoute) -> Document:
    body = None if route.body is None else {"$ref": _SCHEMAS + _name_of(route)}
    operation = _described(route.path, route.summary, ANSWERS[route.method, route.path], body)
    if route.streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return operation


def _described(path: str, summary: str, answer: Schema, body: Schema | None) -> Document:
    error = {"$ref": _SCHEMAS + error_form(path).name}
    operation: Document = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": {_JSON: {"schema": answer}}},
            "default": {
                "description": "An error, in the form of the path's protocol.",
                "content": {_JSON: {"schema": error}},
            },
        },
    }
    names = _PARAMETER.findall(path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": TEXT} for name in names
        ]
    if body is not None:
        needed = "$ref" in body or bool(body.get("required"))
        operation["requestBody"] = {"required": needed, "content": {_JSON: {"schema": body}}}
    return operation


def _name_of(route: HttpRoute) -> str:
    if isinstance(route.body, ReadBody):
        return "".join(part.capitalize() for part in route.path.split("/")[2:]) + "Body"
    assert route.body is not None
    return route.body.__name__


def _read_schema(route: HttpRoute, forms: Mapping[str, Schema]) -> Document:
    assert isinstance(route.body, ReadBody)
    said = {each.name: each.text for each in PARAMETERS if route.parameters in each.paths}
    properties = {
        name: {**forms.get(name, {}), "description": said.get(name, "")} for name in route.names
    }
    return {"type": "object", "properties": properties, "required": list(route.body.sample)}


def _with_nulls(schema: Document) -> Document:
    """Returns the schema of a body whose fields may be null, as good as absent, if they may be."""
    required = schema.get("required", ())
    properties = {
        name: facts if name in required else nullable(facts)
        for name, facts in schema["properties"].items()
    }
    return {**schema, "properties": properties}
