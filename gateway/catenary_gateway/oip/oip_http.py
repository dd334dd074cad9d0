"""The HTTP routes of the Open Inference Protocol, with Triton's binary tensor extension."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from catenary_gateway.admission.concurrency_limiter import ConcurrencyPermit
from catenary_gateway.endpoints.http_bodies import body_of
from catenary_gateway.endpoints.http_calls import PIPELINE, enter, json_response
from catenary_gateway.oip import extension_routes, oip_json
from catenary_gateway.oip.extension_routes import EXTENSIONS
from catenary_gateway.oip.inference_handler import InferenceHandler
from catenary_services.version import software_version

INFERENCES: web.AppKey[InferenceHandler] = web.AppKey("inferences", InferenceHandler)


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
    answer = await request.app[INFERENCES].answer(_AiohttpCall(request), *_named(request))
    return web.Response(body=b"".join(answer.pieces), status=answer.status, headers=answer.headers)


class _AiohttpCall:
    """A request to infer that aiohttp has read; implements `HttpCall`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.headers: Mapping[str, str] = request.headers
        self.announced_bytes = request.content_length or 0

    async def body(self, most_bytes: int, permit: ConcurrencyPermit) -> bytes:
        return await body_of(self._request, most_bytes, permit)


def _named(request: web.Request) -> tuple[str, str]:
    return request.match_info["model"], request.match_info.get("version", "")
