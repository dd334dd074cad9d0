"""Bodies and answers of the routes of the Open Inference Protocol, as OpenAPI describes them.

Bodies are checked field by field in this folder, against the model that the path names. So these
schemas say what holds of every model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiohttp import web

from catenary_gateway.endpoints.json_schemas import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    INTEGER,
    TEXT,
    Schema,
    list_of,
    nullable,
    record,
)
from catenary_gateway.endpoints.route_descriptions import RouteDescription
from catenary_gateway.oip.process_settings import TRACE_NAMES, LogSettings
from catenary_gateway.tensors.validation import DATATYPES, LONGEST_ID

BINARY = "application/octet-stream"
"""The content type of answers with tensors as bytes behind their JSON."""
_SHAPE = list_of(INTEGER)
_TEXTS = list_of(TEXT)
_PARAMETERS = nullable(ANY_OBJECT)
_INPUT = record(
    {
        "parameters": _PARAMETERS,
        "data": {"description": "Numbers, booleans or texts, flat or nested as the shape says."},
    },
    name=TEXT,
    datatype={**TEXT, "description": ", ".join(sorted(DATATYPES))},
    shape=_SHAPE,
)
_INFER = record(
    {
        "id": {**TEXT, "maxLength": LONGEST_ID},
        "parameters": _PARAMETERS,
        "outputs": nullable(list_of(record({"parameters": _PARAMETERS}, name=TEXT))),
    },
    inputs=list_of(_INPUT),
)
_TENSOR = record(name=TEXT, datatype=TEXT, shape=_SHAPE)
_METADATA = record(
    name=TEXT, versions=_TEXTS, platform=TEXT, inputs=list_of(_TENSOR), outputs=list_of(_TENSOR)
)
_KINDS: Mapping[type, Schema] = {bool: FLAG, int: COUNT, str: TEXT}
_LOG = {name: _KINDS[type(value)] for name, value in LogSettings().values().items()}
_TRACE = dict.fromkeys(TRACE_NAMES, nullable({"anyOf": [TEXT, _TEXTS]}))
_TRACED = dict.fromkeys(_TRACE, TEXT) | {"trace_level": _TEXTS}
_REGION = record(name=TEXT, key=TEXT, offset=COUNT, byte_size=COUNT)
_ORDER = record({"parameters": ANY_OBJECT})
_ALIVE, _READY = record(live=FLAG), record(ready=FLAG)
_SERVER = record(name=TEXT, version=TEXT, extensions=_TEXTS)

BODIES: Mapping[str, Schema] = {
    "/infer": _INFER,
    "/v2/repository/index": record({"ready": FLAG}),
    "/load": _ORDER,
    "/unload": _ORDER,
    "/trace/setting": record(_TRACE),
    "/v2/logging": record(_LOG),
    "/v2/systemsharedmemory/region/{region}/register": record(
        {"offset": COUNT}, key=TEXT, byte_size={**COUNT, "minimum": 1}
    ),
}
"""The bodies of POST requests, by how their paths end; others are not read."""
ANSWERS: Mapping[str, Schema] = {
    "/infer": record(model_name=TEXT, model_version=TEXT, id=TEXT, outputs=list_of(_TENSOR)),
    "/stats": record(model_stats=list_of(record(name=TEXT, version=TEXT))),
    "/config": record(name=TEXT, platform=TEXT),
    "/v2/repository/index": list_of(record(name=TEXT, version=TEXT, state=TEXT, reason=TEXT)),
    "/trace/setting": record(**_TRACED),
    "/v2/logging": record(**_LOG),
    "/v2/systemsharedmemory/status": list_of(_REGION),
    "/v2/systemsharedmemory/region/{region}/status": list_of(_REGION),
    "/v2/cudasharedmemory/status": list_of(_REGION),
    "/v2/cudasharedmemory/region/{region}/status": list_of(_REGION),
    "/healthz": _ALIVE,
    "/health": _ALIVE,
    "/v2/health/live": _ALIVE,
    "/readyz": _READY,
    "/v2/health/ready": _READY,
    "/ready": record(name=TEXT, ready=FLAG),
    "/v2": _SERVER,
    "/v2/": _SERVER,
    "/v2/models/{model}": _METADATA,
    "/versions/{version}": _METADATA,
}
"""Answers with status 200, by how paths end; all others are empty objects."""


def described(routes: Iterable[web.RouteDef]) -> list[RouteDescription]:
    """Returns the routes of this folder with what is said about them."""
    return [
        RouteDescription(
            route,
            _of(ANSWERS, route.path) or ANY_OBJECT,
            _of(BODIES, route.path) if route.method == "POST" else None,
            (BINARY,) if route.path.endswith("/infer") else (),
        )
        for route in routes
    ]


def _of(schemas: Mapping[str, Schema], path: str) -> Schema | None:
    whole = schemas.get(path)
    if whole is not None:
        return whole
    return next((schema for end, schema in schemas.items() if path.endswith(end)), None)
