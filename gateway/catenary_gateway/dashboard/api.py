"""The HTTP routes of the dashboard, on the port of the inference routes."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import ETag, web

from catenary_gateway.admission.request_pipeline import RequestPipeline
from catenary_gateway.class_names import ClassNames
from catenary_gateway.dashboard import actions, files
from catenary_gateway.dashboard.answers import DocumentCache, JsonDocument, Make
from catenary_gateway.dashboard.sources import (
    DashboardSources,
    SchedulerCaller,
    session_of,
    window_of,
)
from catenary_gateway.endpoints.http_bodies import body_of
from catenary_gateway.endpoints.http_calls import bearer, enter, json_response
from catenary_gateway.tensors.json_documents import document_of
from catenary_services.errors import InvalidInput, PermissionDenied
from catenary_services.security.keys import SCOPE_ADMIN, SCOPE_VIEW, Principal

AGE_HEADER = "Catenary-Age-Ms"
"""Header with the age of an answer's data, in milliseconds."""
_PREFIX = "/dashboard"
_LONGEST_ID = 256
_SECURITY = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Dashboard:
    """The dashboard: a public page, its data for callers with the scope `view`, orders for `admin`.

    Args:
        pipeline: The pipeline with keys and load of this gateway.
        scheduler: The source of the cluster's data.
        class_names: The names of models' classes.
        is_open: Whether everyone may look if no keys are configured.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        scheduler: SchedulerCaller,
        class_names: ClassNames,
        *,
        is_open: bool,
    ) -> None:
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._is_open = is_open
        self._class_names = class_names
        self._sources = DashboardSources(pipeline, scheduler)
        self._answers = DocumentCache()
        self._assets = files.load()

    def add_to(self, app: web.Application) -> None:
        """Adds the routes, their security headers and their clean-up to an application."""
        app.add_routes(self._routes())
        app.on_response_prepare.append(_secure)
        app.on_cleanup.append(self._close)

    def _routes(self) -> Iterable[web.RouteDef]:
        api = f"{_PREFIX}/v1"
        return (
            web.get("/", self._page),
            web.get(f"{_PREFIX}/assets/{{name}}", self._asset),
            web.get(f"{api}/status", self._status),
            web.get(f"{api}/plan", self._plan),
            web.get(f"{api}/timelines", self._timelines),
            web.get(f"{api}/requests", self._requests),
            web.get(f"{api}/sessions", self._sessions),
            web.get(f"{api}/trace", self._trace),
            web.get(f"{api}/story", self._story),
            web.get(f"{api}/history", self._history),
            web.get(f"{api}/models", self._models),
            web.get(f"{api}/classes", self._classes),
            web.get(f"{api}/actions", self._actions),
            web.post(f"{api}/actions/{{action}}", self._act),
        )

    async def _page(self, request: web.Request) -> web.Response:
        return _sent(request, self._assets[files.PAGE])

    async def _asset(self, request: web.Request) -> web.Response:
        asset = self._assets.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        return _sent(request, asset)

    async def _status(self, request: web.Request) -> web.Response:
        return await self._answer(request, "status", self._sources.status)

    async def _plan(self, request: web.Request) -> web.Response:
        return await self._answer(request, "plan", self._sources.plan)

    async def _timelines(self, request: web.Request) -> web.Response:
        self._authorize(request)
        seconds = window_of(request.query.get("seconds"))
        kind = f"timelines-{seconds}"
        return await self._answer(request, kind, lambda: self._sources.timelines(seconds))

    async def _requests(self, request: web.Request) -> web.Response:
        return await self._answer(request, "requests", self._sources.requests)

    async def _sessions(self, request: web.Request) -> web.Response:
        return await self._answer(request, "sessions", self._sources.sessions)

    async def _trace(self, request: web.Request) -> web.Response:
        self._authorize(request)
        trace = self._sources.trace(_request_id(request))
        return json_response(trace, headers=_NEVER_KEPT)

    async def _story(self, request: web.Request) -> web.Response:
        self._authorize(request)
        session_id = session_of(request.query.get("session_id"))
        story = await self._sources.story(session_id, _request_id(request))
        return json_response(story, headers=_NEVER_KEPT)

    async def _history(self, request: web.Request) -> web.Response:
        return await self._answer(request, "history", self._sources.history)

    async def _models(self, request: web.Request) -> web.Response:
        return await self._answer(request, "models", self._sources.models)

    async def _classes(self, request: web.Request) -> web.Response:
        self._authorize(request)
        query = request.query
        names = await self._class_names.of(query.get("model", ""), query.get("version", ""))
        return json_response({"names": names}, headers=_NEVER_KEPT)

    async def _actions(self, request: web.Request) -> web.Response:
        self._operator(request)
        return json_response(actions.described(), headers=_NEVER_KEPT)

    async def _act(self, request: web.Request) -> web.Response:
        operator = self._operator(request)
        given = document_of(await body_of(request, actions.MOST_BODY_BYTES))
        name, presented = request.match_info["action"], bearer(request)
        answer = await actions.act(self._scheduler, name, given, operator, presented)
        return json_response(answer, headers=_NEVER_KEPT)

    async def _answer(self, request: web.Request, kind: str, make: Make) -> web.Response:
        self._authorize(request)
        answer = await self._answers.get(kind, make)
        return self._sent_json(request, answer)

    def _sent_json(self, request: web.Request, answer: JsonDocument) -> web.Response:
        age_ms = (self._answers.clock() - answer.made_ns) // 1_000_000
        headers = {**_NEVER_KEPT, AGE_HEADER: str(age_ms)}
        body = _body_for(request, answer.body, answer.packed, headers)
        return web.Response(body=body, headers=headers, content_type="application/json")

    def _authorize(self, request: web.Request) -> None:
        """Lets a caller in that may look.

        Raises:
            Unauthenticated: Keys are configured, and the caller presents none of them.
            PermissionDenied: The key lacks the scope `view`, or no keys are configured although
                they are needed.
        """
        enter(request).require(SCOPE_VIEW)
        if not (self._pipeline.keys.enabled or self._is_open):
            # As on the admin port, callers behind TLS must be identified.
            raise PermissionDenied(
                "the dashboard shows nothing without API keys; set api_keys_file, and give a key "
                f"the scope '{SCOPE_VIEW}'"
            )

    def _operator(self, request: web.Request) -> Principal:
        """Returns the holder of the caller's key, who may give orders.

        Raises:
            Unauthenticated: Keys are configured, and the caller presents none of them.
            PermissionDenied: The key lacks the scope `admin`, or no keys are configured.
        """
        operator = enter(request)
        operator.require(SCOPE_ADMIN)
        if not self._pipeline.keys.enabled:
            raise PermissionDenied(
                "the page gives no orders without API keys; set api_keys_file, and give a key the "
                f"scope '{SCOPE_ADMIN}', or use the command line"
            )
        return operator

    async def _close(self, app: web.Application) -> None:
        await self._answers.close()


_NEVER_KEPT = {"Cache-Control": "no-store"}


def _request_id(request: web.Request) -> str:
    """Returns the id of the request that a caller asks for; empty if the caller names none."""
    request_id = request.query.get("request_id", "")
    if len(request_id) > _LONGEST_ID:
        raise InvalidInput("request_id", "is too long")
    return request_id


def _sent(request: web.Request, asset: files.Asset) -> web.Response:
    # The browser asks for each file again and mostly gets 304 without a body, so that files of
    # two versions never mix. The tag is a weak one: packed and plain files have the same.
    headers = {"Cache-Control": "no-cache", "ETag": f'W/"{asset.etag}"'}
    known = request.if_none_match or ()
    if any(each.value in (asset.etag, "*") for each in known if isinstance(each, ETag)):
        return web.Response(status=304, headers=headers)
    body = _body_for(request, asset.body, asset.packed, headers)
    return web.Response(
        body=body, headers=headers, content_type=asset.content_type, charset="utf-8"
    )


def _body_for(request: web.Request, body: bytes, packed: bytes, headers: dict[str, str]) -> bytes:
    """Returns the form of a body that the caller takes, and adds the headers that name it."""
    headers["Vary"] = "Accept-Encoding"
    if not packed or "gzip" not in request.headers.get("Accept-Encoding", ""):
        return body
    headers["Content-Encoding"] = "gzip"
    return packed


async def _secure(request: web.Request, response: web.StreamResponse) -> None:
    if request.path == "/" or request.path.startswith(_PREFIX):
        response.headers.update(_SECURITY)
