"""All HTTP connections of a gateway, and what they share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from catenary_gateway.admission.request_pipeline import RequestPipeline
from catenary_gateway.endpoints.connections.connection_watcher import ConnectionWatcher
from catenary_gateway.endpoints.connections.http_call import (
    AnswerEncoder,
    Body,
    HttpAnswer,
    HttpCall,
    error_answer,
)
from catenary_gateway.endpoints.connections.http_connection import KEEPALIVE_S, HttpConnection
from catenary_gateway.endpoints.connections.library_handler import LibraryHandler
from catenary_gateway.endpoints.connections.request_headers import (
    LONGEST_BYTES,
    MOST_HEADERS,
    InferenceTarget,
)
from catenary_services.errors import forget_frames
from catenary_services.grpc.error_tables import error_of_exception

Infer = Callable[[HttpCall, str, str], Awaitable[HttpAnswer]]
"""Answers a request to infer a model, and a version of it."""
_INFER_PATH = "/v2/models"
_SCRATCH_BYTES = 64 * 1024


class HttpConnections:
    """The connections of an HTTP endpoint; implements `ConnectionOwner`."""

    def __init__(self, pipeline: RequestPipeline, infer: Infer) -> None:
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.watcher = ConnectionWatcher()
        self._pipeline = pipeline
        self._infer = infer
        self._encoder = AnswerEncoder()
        self._open: set[HttpConnection] = set()
        self._server: web.Server | None = None

    def start(self, server: web.Server) -> None:
        """Begins to watch connections; `server` is aiohttp's, which gets what is left to it."""
        self._server = server
        self.watcher.start(lambda: tuple(self._open))

    async def close(self, grace_s: float) -> None:
        """Closes all connections, those with a request after their answer or `grace_s` seconds."""
        await self.watcher.stop()
        for connection in tuple(self._open):
            connection.close_soon()
        answering = [each.task for each in self._open if each.task is not None]
        if not answering:
            return
        _, late = await asyncio.wait(answering, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def connection(self) -> HttpConnection:
        """Returns the protocol of a new connection."""
        return HttpConnection(self)

    def opened(self, connection: HttpConnection) -> None:
        self._open.add(connection)

    def closed(self, connection: HttpConnection) -> None:
        self._open.discard(connection)

    def spoke(self, connection: HttpConnection) -> None:
        self.watcher.note_request(connection)

    def note_request(self, request: web.Request) -> None:
        """Notes a request that aiohttp has read, on a connection that it has for good."""
        handler = request.protocol
        if isinstance(handler, LibraryHandler) and isinstance(handler.lender, HttpConnection):
            self.watcher.note_request(handler.lender)

    def library_handler(self, connection: HttpConnection) -> LibraryHandler:
        assert self._server is not None
        return LibraryHandler(
            connection,
            self._server,
            asyncio.get_running_loop(),
            access_log=None,
            # Bodies are inflated by `http_bodies`, within bounds and off the event loop.
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            max_line_size=LONGEST_BYTES,
            max_field_size=LONGEST_BYTES,
            max_headers=MOST_HEADERS,
        )

    async def answer(self, call: HttpCall, target: InferenceTarget, address: str) -> list[Body]:
        sender = self._pipeline.arrived(address, call.headers)
        try:
            answer = await self._infer(call, target.model, target.version)
        except Exception as exc:
            error = error_of_exception(exc)
            forget_frames(exc)
            sender.charge(error)
            answer = error_answer(_INFER_PATH, error)
        return self._encoder.encoded(answer)
