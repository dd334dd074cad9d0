"""Calls from pages of other origins (CORS), which browsers make only where a server allows it.

Keys travel in headers that a page has to know, never in cookies, so no page acts with the rights of
whoever looks at it. Where there are no keys, a page acts with all rights, and so the server itself
is changed only by pages of origins that are named. The dashboard is for its own page only.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from catenary_gateway.endpoints.http_calls import PIPELINE, Handler, enter
from catenary_services.errors import PermissionDenied
from catenary_services.security.keys import Principal

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
        app[CROSS_ORIGIN] = self
        if self._origins:
            app.middlewares.append(self._middleware())
            app.on_response_prepare.append(self._allow)

    def require_named(self, origin: str) -> None:
        """Checks that an origin is named; that all may call does not name any.

        Raises:
            PermissionDenied: It is not.
        """
        if origin == _EVERYONE or origin not in self._origins:
            raise PermissionDenied(
                "web pages change nothing at a gateway without API keys, unless `cors_origins` "
                "names their origin"
            )

    def _middleware(self) -> Middleware:
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


CROSS_ORIGIN: web.AppKey[CrossOrigin] = web.AppKey("cross_origin", CrossOrigin)


def enter_to_change(request: web.Request) -> Principal:
    """Lets a caller in who changes the server itself, not only what belongs to a request.

    Browsers say the origin of a page with every such request, and a page can have one sent by
    whoever looks at it, also under the gateway's own name. Where a key is needed, it knows one.

    Raises:
        PermissionDenied: There are no keys, and the request is that of a page whose origin is not
            named.
        CatenaryError: The caller is refused.
    """
    principal = enter(request)
    origin = request.headers.get("Origin")
    if origin is not None and not request.app[PIPELINE].keys.enabled:
        request.app[CROSS_ORIGIN].require_named(origin)
    return principal
