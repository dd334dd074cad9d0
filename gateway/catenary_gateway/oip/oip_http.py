"""The HTTP routes of the Open Inference Protocol, with Triton's binary tensor extension."""

from __future__ import annotations

from aiohttp import web

from catenary_gateway.admission.request_pipeline import caller
from catenary_gateway.endpoints.http_bodies import OFF_LOOP, body_of
from catenary_gateway.endpoints.http_calls import (
    PIPELINE,
    REQUEST_ID,
    bearer,
    enter,
    json_response,
)
from catenary_gateway.oip import extension_routes, oip_json
from catenary_gateway.oip.extension_routes import EXTENSIONS
from catenary_gateway.oip.route_schemas import BINARY
from catenary_services.errors import InvalidInput
from catenary_services.version import software_version

JSON_SIZE = "Inference-Header-Content-Length"
_INFER_ROUTE = "/v2/models/{model}/infer"


def routes() -> list[web.RouteDef]:
    """Returns all routes below `/v2`, and the routes of the probes."""
    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    return [
        # Routes are tried in this order, and most requests are inferences.
        web.post(f"{model}/infer", _infer),
        web.post(f"{version}/infer", _infer),
        *extension_routes.routes(),
        web.get("/healthz", _live),
        web.get("/health", _live),  # load tools and vLLM use this name
        web.get("/readyz", _ready),
        web.get("/v2", _server_metadata),
        web.get("/v2/", _server_metadata),
        web.get("/v2/health/live", _live),
        web.get("/v2/health/ready", _ready),
        web.get(model, _model_metadata),
        web.get(version, _model_metadata),
        web.get(f"{model}/ready", _model_ready),
        web.get(f"{version}/ready", _model_ready),
    ]


async def _live(request: web.Request) -> web.Response:
    """Answers while the process lives."""
    return json_response({"live": True})


async def _ready(request: web.Request) -> web.Response:
    """Answers 200 if every deployed model can be served, else 503 with the reason."""
    why_not = request.app[PIPELINE].readiness.why_not
    if not why_not:
        return json_response({"ready": True})
    return json_response({"ready": False, "error": why_not}, status=503)


async def _server_metadata(request: web.Request) -> web.Response:
    """Answers name, version and extensions of the server."""
    enter(request)
    names = request.app[EXTENSIONS].names
    return json_response({"name": "catenary", "version": software_version(), "extensions": names})


async def _model_metadata(request: web.Request) -> web.Response:
    """Answers the inputs and outputs of a model, and all its versions."""
    pipeline = request.app[PIPELINE]
    enter(request)
    name, version = _named(request)
    model = pipeline.catalog.find(name, version)
    return json_response(oip_json.metadata_of(model, pipeline.catalog.versions(name)))


async def _model_ready(request: web.Request) -> web.Response:
    """Answers 200 if the model can be served now, else 503."""
    pipeline = request.app[PIPELINE]
    enter(request)
    model = pipeline.catalog.find(*_named(request))
    if model.ready:
        return json_response({"name": model.key.name, "ready": True})
    document = {"name": model.key.name, "ready": False, "error": model.not_ready_reason}
    return json_response(document, status=503)


async def _infer(request: web.Request) -> web.Response:
    """Infers from JSON, or from Triton's binary tensors behind the JSON."""
    app = request.app
    pipeline = app[PIPELINE]
    arrival = pipeline.arrivals.arrive(_INFER_ROUTE, request.headers.get("traceparent"))
    # Checked before the body is read: a refused request need not be received.
    principal = pipeline.enter(bearer(request))
    name, version = _named(request)
    largest = pipeline.capacity.max_request_bytes
    with pipeline.admit(principal, name, version, request.content_length or 0) as admitted:
        # The announced size was only checked; bytes are held as they arrive.
        admitted.hold(0)
        with admitted.arriving(caller().subject):
            body = await body_of(request, largest, admitted)
            memory = app[EXTENSIONS].memory_of(caller())
            conversion = pipeline.arrivals.conversion(memory, request.headers.get(REQUEST_ID))
            json_size = _json_size(request, body)
            wanted, form = await app[OFF_LOOP].run(
                len(body) if json_size is None else json_size,
                lambda: oip_json.request_of(body, json_size, admitted.model, conversion),
            )
        if memory.read_bytes:
            admitted.hold_more(memory.read_bytes)
        response = await admitted.infer(wanted, arrival)
        if form.class_counts:
            response = await app[EXTENSIONS].with_classes(response, form.class_counts)
        document, json_size = oip_json.response_of(response, form, wanted.outputs, memory)
    headers = {REQUEST_ID: response.id} if response.id.isprintable() else {}
    if json_size is None:
        return web.Response(body=document, content_type="application/json", headers=headers)
    headers[JSON_SIZE] = str(json_size)
    return web.Response(body=document, content_type=BINARY, headers=headers)


def _json_size(request: web.Request, body: bytes) -> int | None:
    text = request.headers.get(JSON_SIZE)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 20) or int(text) > len(body):
        raise InvalidInput(JSON_SIZE, f"must be a number of bytes, at most {len(body)}")
    return int(text)


def _named(request: web.Request) -> tuple[str, str]:
    return request.match_info["model"], request.match_info.get("version", "")
