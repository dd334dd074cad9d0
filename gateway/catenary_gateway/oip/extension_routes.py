"""The HTTP routes of Triton's extensions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from catenary_gateway.admission.request_pipeline import caller
from catenary_gateway.endpoints.cross_origin import enter_to_change
from catenary_gateway.endpoints.http_bodies import body_of
from catenary_gateway.endpoints.http_calls import bearer, enter, json_response
from catenary_gateway.oip.extensions import ProtocolExtensions
from catenary_gateway.oip.model_descriptions import document_of
from catenary_gateway.tensors.json_documents import Document
from catenary_gateway.tensors.json_documents import document_of as document_in
from catenary_services.errors import InvalidInput

EXTENSIONS: web.AppKey[ProtocolExtensions] = web.AppKey("extensions", ProtocolExtensions)
MOST_BODY_BYTES = 64 * 1024


def routes() -> list[web.RouteDef]:
    """Returns the routes; those of all models come before those of one."""
    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    memory, cuda = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
    return [
        web.get("/v2/models/stats", _statistics),
        web.get(f"{model}/stats", _statistics),
        web.get(f"{version}/stats", _statistics),
        web.get(f"{model}/config", _config),
        web.get(f"{version}/config", _config),
        web.post("/v2/repository/index", _index),
        web.post("/v2/repository/models/{model}/load", _load),
        web.post("/v2/repository/models/{model}/unload", _unload),
        web.get("/v2/trace/setting", _trace_settings),
        web.post("/v2/trace/setting", _trace_settings),
        web.get(f"{model}/trace/setting", _trace_settings),
        web.post(f"{model}/trace/setting", _trace_settings),
        web.get("/v2/logging", _log_settings),
        web.post("/v2/logging", _log_settings),
        web.get(f"{memory}/status", _regions),
        web.get(f"{memory}/region/{{region}}/status", _regions),
        web.post(f"{memory}/region/{{region}}/register", _register),
        web.post(f"{memory}/unregister", _unregister),
        web.post(f"{memory}/region/{{region}}/unregister", _unregister),
        web.get(f"{cuda}/status", _cuda_regions),
        web.get(f"{cuda}/region/{{region}}/status", _cuda_regions),
        web.post(f"{cuda}/region/{{region}}/register", _register_cuda),
        web.post(f"{cuda}/unregister", _unregister_cuda),
        web.post(f"{cuda}/region/{{region}}/unregister", _unregister_cuda),
    ]


async def _statistics(request: web.Request) -> web.Response:
    """Answers sums over the requests to one model, or to each of them."""
    asker, found = enter(request), request.match_info
    name, version = found.get("model", ""), found.get("version", "")
    return json_response(document_of(_of(request).statistics(asker, name, version)))


async def _config(request: web.Request) -> web.Response:
    """Answers the configuration of a model, as Triton describes one."""
    enter(request)
    found = request.match_info
    return json_response(document_of(_of(request).config(found["model"], found.get("version", ""))))


async def _index(request: web.Request) -> web.Response:
    """Answers the models of the repository, and which are ready."""
    enter(request)
    ready_only = (await _body(request)).get("ready", False)
    if not isinstance(ready_only, bool):
        raise InvalidInput("ready", "must be true or false")
    index = _of(request).repository.index(ready_only=ready_only)
    return json_response(
        [{"name": n, "version": v, "state": s, "reason": r} for n, v, s, r in index]
    )


async def _load(request: web.Request) -> web.Response:
    """Orders the scheduler to deploy a model."""
    return await _order(request, _of(request).repository.load)


async def _unload(request: web.Request) -> web.Response:
    """Orders the scheduler to undeploy a model."""
    return await _order(request, _of(request).repository.unload)


async def _order(request: web.Request, order: Callable[..., Awaitable[None]]) -> web.Response:
    operator = enter_to_change(request)
    parameters = _parameters(await _body(request))
    await order(operator, bearer(request), request.match_info["model"], parameters)
    return json_response({})


async def _trace_settings(request: web.Request) -> web.Response:
    """Answers which requests are traced, after the changes in the body."""
    changes: Document = {}
    if request.method == "POST":
        asker = enter_to_change(request)
        changes = await _body(request)
    else:
        asker = enter(request)
    settings = _of(request).trace_settings(
        asker,
        request.match_info.get("model", ""),
        {name: _texts(value, name) for name, value in changes.items()},
    )
    # As Triton does: the level is a list, all others are single texts.
    return json_response(
        {name: v if name == "trace_level" else v[0] for name, v in settings.items()}
    )


async def _log_settings(request: web.Request) -> web.Response:
    """Answers the level of the gateway's log, after the changes in the body."""
    if request.method == "POST":
        asker = enter_to_change(request)
        return json_response(_of(request).log_settings(asker, await _body(request)))
    return json_response(_of(request).log_settings(enter(request), {}))


async def _regions(request: web.Request) -> web.Response:
    """Answers the regions of shared memory that the caller has registered."""
    enter(request)
    status = _of(request).region_status(caller(), request.match_info.get("region", ""))
    return json_response([document_of(region) for region in status.regions.values()])


async def _register(request: web.Request) -> web.Response:
    """Registers a region of shared memory."""
    enter_to_change(request)
    given = await _body(request)
    key = given.get("key")
    if not isinstance(key, str):
        raise InvalidInput("key", "must be a text")
    _of(request).register(
        caller(),
        request.match_info["region"],
        key,
        _bytes(given.get("offset", 0), "offset"),
        _bytes(given.get("byte_size"), "byte_size"),
    )
    return json_response({})


async def _unregister(request: web.Request) -> web.Response:
    """Forgets one region of the caller's, or all of them."""
    enter_to_change(request)
    _of(request).unregister(caller(), request.match_info.get("region", ""))
    return json_response({})


async def _cuda_regions(request: web.Request) -> web.Response:
    """Answers no regions: memory of GPUs is not shared."""
    enter(request)
    _of(request).cuda_region_status(request.match_info.get("region", ""))
    return json_response([])


async def _register_cuda(request: web.Request) -> web.Response:
    """Refuses to register memory of a GPU."""
    enter_to_change(request)
    _of(request).refuse_cuda_region()
    return json_response({})


async def _unregister_cuda(request: web.Request) -> web.Response:
    """Does nothing, as no memory of GPUs is registered."""
    enter_to_change(request)
    return json_response({})


def _of(request: web.Request) -> ProtocolExtensions:
    return request.app[EXTENSIONS]


async def _body(request: web.Request) -> Document:
    body = await body_of(request, MOST_BODY_BYTES)
    return document_in(body) if body else {}


def _parameters(document: Document) -> Mapping[str, object]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidInput("parameters", "must be an object")
    return parameters


def _texts(value: object, name: str) -> list[str]:
    """Returns the value of a trace setting: a text, some texts, or none to have the first again."""
    values: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) for each in values):
        raise InvalidInput(name[:100], "must be a text, or a list of texts")
    return values


def _bytes(value: object, name: str) -> int:
    if type(value) is not int:
        raise InvalidInput(name, "must be a number of bytes")
    return value
