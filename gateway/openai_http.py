"""The OpenAI paths: there, so that its clients get errors they can parse.

No model that generates text is served yet, so there is nothing to list and nothing to complete.
"""

from __future__ import annotations

from aiohttp import web

from gateway.http_calls import DESK, bearer, json_response
from services.errors import ModelNotFound, NotSupported

_SHOWN = 100


def routes() -> list[web.RouteDef]:
    """Returns the routes below `/v1`."""
    return [
        web.get("/v1/models", _models),
        web.get("/v1/models/{model}", _model),
        web.post("/v1/chat/completions", _completions),
        web.post("/v1/completions", _completions),
    ]


async def _models(request: web.Request) -> web.Response:
    request.app[DESK].identify(bearer(request))
    return json_response({"object": "list", "data": []})


async def _model(request: web.Request) -> web.Response:
    request.app[DESK].identify(bearer(request))
    name = request.match_info["model"][:_SHOWN]
    raise ModelNotFound(f"no model {name!r} that generates text", details={"model": name})


async def _completions(request: web.Request) -> web.Response:
    request.app[DESK].identify(bearer(request))
    raise NotSupported("this cluster serves no model that generates text")
