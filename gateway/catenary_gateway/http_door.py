"""The HTTP server: every route of every protocol on one port."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from aiohttp import web

from catenary_gateway import openai_http
from catenary_gateway.admission.front_desk import FrontDesk
from catenary_gateway.dashboard.api import Dashboard
from catenary_gateway.doors.http_bodies import OFF_LOOP, OffLoop
from catenary_gateway.doors.http_calls import DESK, errors_as_json
from catenary_gateway.doors.http_connections import FIRST_REQUEST_S, Connections
from catenary_gateway.doors.repository import Repository
from catenary_gateway.oip import oip_http
from catenary_services.transport.tcp.tcp_listener import ListenerLimits, TcpListener

_KEEPALIVE_S = 75.0
_SHUTDOWN_S = 1.0
_LONGEST_HEADER_BYTES = 8190
_MOST_HEADERS = 100
_LISTENER_LIMITS = ListenerLimits(most_waiting=2048, most_opening=128, wait_s=FIRST_REQUEST_S)


class HttpDoor:
    """Listens from `start` to `stop`."""

    def __init__(
        self, desk: FrontDesk, repository: Repository, dashboard: Dashboard | None = None
    ) -> None:
        self._connections = Connections()
        app = web.Application(
            middlewares=[self._connections.middleware, errors_as_json],
        )
        app[DESK] = desk
        self._off_loop = app[OFF_LOOP] = OffLoop()
        app[oip_http.REPOSITORY] = repository
        app.add_routes([*oip_http.routes(), *openai_http.routes()])
        if dashboard is not None:
            dashboard.add_to(app)
        self._listener: TcpListener | None = None
        self._runner = web.AppRunner(
            app,
            # A client that goes away cancels its work.
            handler_cancellation=True,
            access_log=None,
            # Bodies are inflated by `http_bodies`, within bounds and off the event loop.
            auto_decompress=False,
            keepalive_timeout=_KEEPALIVE_S,
            shutdown_timeout=_SHUTDOWN_S,
            max_line_size=_LONGEST_HEADER_BYTES,
            max_field_size=_LONGEST_HEADER_BYTES,
            max_headers=_MOST_HEADERS,
        )

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listens, and returns the port (a free one is chosen for 0).

        Raises:
            Unavailable: the address is taken or not ours.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections.start(self._runner.server)
        server = self._runner.server

        def connected(settled: Callable[[], None]) -> asyncio.BaseProtocol:
            settled()  # who it is, its requests say
            return server()

        self._listener = TcpListener(connected, tls, limits=_LISTENER_LIMITS)
        return await self._listener.start(host, port)

    async def stop(self) -> None:
        """Closes every connection."""
        if self._listener is not None:
            self._listener.close()
        await self._connections.stop()
        await self._runner.cleanup()
        self._off_loop.close()
