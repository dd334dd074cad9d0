"""The HTTP server, which serves the routes of every protocol on one port."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from aiohttp import web

from catenary_gateway import openai_http
from catenary_gateway.admission.request_pipeline import RequestPipeline
from catenary_gateway.dashboard.api import Dashboard
from catenary_gateway.endpoints.connections.connection_watcher import FIRST_REQUEST_S
from catenary_gateway.endpoints.connections.http_connections import HttpConnections
from catenary_gateway.endpoints.cross_origin import CrossOrigin
from catenary_gateway.endpoints.http_bodies import OFF_LOOP, BoundedThreadPool
from catenary_gateway.endpoints.http_calls import PIPELINE, errors_as_json
from catenary_gateway.oip import oip_http
from catenary_gateway.oip.extension_routes import EXTENSIONS
from catenary_gateway.oip.extensions import ProtocolExtensions
from catenary_gateway.oip.inference_handler import InferenceHandler
from catenary_gateway.oip.route_schemas import described
from catenary_gateway.openai_http.responses.response_calls import RESPONSES
from catenary_gateway.openai_http.responses.response_store import ResponseStore
from catenary_gateway.settings import GatewaySettings
from catenary_services.tcp_listener import ListenerLimits, TcpListener

_SHUTDOWN_S = 1.0
_LISTENER_LIMITS = ListenerLimits(most_waiting=2048, most_opening=128, wait_s=FIRST_REQUEST_S)


class HttpServer:
    """The HTTP listener of a gateway, open from `start` until `stop`."""

    def __init__(
        self,
        settings: GatewaySettings,
        pipeline: RequestPipeline,
        extensions: ProtocolExtensions,
        dashboard: Dashboard | None = None,
    ) -> None:
        self._off_loop = BoundedThreadPool()
        inferences = InferenceHandler(pipeline, extensions, self._off_loop)
        self._connections = HttpConnections(pipeline, inferences.answer)
        origins = CrossOrigin(settings.cors_origins)
        note = self._connections.note_request
        app = web.Application(middlewares=[errors_as_json(pipeline, note)])
        origins.add_to(app)
        app[PIPELINE] = pipeline
        app[RESPONSES] = ResponseStore(settings.kept_response_bytes, settings.kept_response_s)
        app[OFF_LOOP] = self._off_loop
        app[EXTENSIONS] = extensions
        app[oip_http.INFERENCES] = inferences
        others = oip_http.routes()
        app.add_routes([*others, *openai_http.routes(described(others))])
        if dashboard is not None:
            dashboard.add_to(app)
        self._listener: TcpListener | None = None
        self._runner = web.AppRunner(
            app,
            # The handler is cancelled when its client disconnects.
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_S,
        )

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Starts to listen, and returns the port; a free port is chosen for 0.

        Raises:
            Unavailable: The address is in use, or belongs to another machine.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections.start(self._runner.server)

        def connected(settled: Callable[[], None]) -> asyncio.BaseProtocol:
            settled()  # HTTP clients authenticate in each request, not in the connection
            return self._connections.connection()

        self._listener = TcpListener(connected, tls, limits=_LISTENER_LIMITS)
        return await self._listener.start(host, port)

    async def stop(self) -> None:
        """Stops listening and closes every connection."""
        if self._listener is not None:
            self._listener.close()
        await asyncio.gather(self._connections.close(_SHUTDOWN_S), self._runner.cleanup())
        self._off_loop.close()
