"""Calls from pages of other origins (CORS), which browsers make only where a server allows it.

Keys travel in headers that a page has to know, never in cookies, so no page acts with the rights of
whoever looks at it. The dashboard is for its own page only.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from catenary_gateway.endpoints.http_calls import Handler

_EVERYONE = "*"
_KEPT_S = 600
_METHODS = "GET, POST, DELETE"
_EXPOSED = (
    "X-Request-Id, Request-Id, Retry-After, X-Predicted-Ttft-Ms, X-Predicted-Tpot-Ms, "
    "Inference-Header-Content-Length"
)
_OWN_PAGES = "/dashboard"


class CrossOrigin:
    """The origins whose pages may call this gateway."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def add_to(self, app: web.Application) -> None:
        """Has the responses of an application say what pages may do."""
        if self._origins:
            app.on_response_prepare.append(self._allow)

    def middleware(self) -> Middleware:
        """Returns a middleware that answers the questions that browsers ask before a call."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not self._asks(request):
                return await handler(request)
            wanted = request.headers.get("Access-Control-Request-Headers", "")
            headers = {
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Max-Age": str(_KEPT_S),
            }
            if wanted:
                headers["Access-Control-Allow-Headers"] = wanted
            return web.Response(status=204, headers=headers)

        return answer

    def _asks(self, request: web.Request) -> bool:
        return (
            request.method == "OPTIONS"
            and "Access-Control-Request-Method" in request.headers
            and self._allowed(request) is not None
        )

    async def _allow(self, request: web.Request, response: web.StreamResponse) -> None:
        allowed = self._allowed(request)
        if allowed is None:
            return
        response.headers["Access-Control-Allow-Origin"] = allowed
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        if allowed != _EVERYONE:
            response.headers.add("Vary", "Origin")

    def _allowed(self, request: web.Request) -> str | None:
        """Returns the origin that a response allows; None if it allows none."""
        origin = request.headers.get("Origin")
        if origin is None or request.path.startswith(_OWN_PAGES) or request.path == "/":
            return None
        if _EVERYONE in self._origins:
            return _EVERYONE
        return origin if origin in self._origins else None
