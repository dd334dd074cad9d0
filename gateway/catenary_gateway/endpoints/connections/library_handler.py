"""aiohttp's side of a connection that it does not read by itself."""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import web
from aiohttp.web_protocol import RequestHandler


class LentConnection(Protocol):
    """A connection that lends requests to aiohttp."""

    def library_answered(self, *, keeps_alive: bool) -> None:
        """Notes that aiohttp has written the answer to a request.

        `keeps_alive` is False if it closes the connection.
        """
        ...


class LibraryHandler(RequestHandler):
    """The handler of aiohttp's for one connection, which is fed with bytes and tells of answers."""

    __slots__ = ("lender",)

    def __init__(
        self,
        lender: LentConnection,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        **limits: object,
    ) -> None:
        super().__init__(server, loop=loop, **limits)  # type: ignore[arg-type]
        self.lender = lender

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Writes an answer; called by aiohttp."""
        resp, is_gone = await super().finish_response(request, resp, start_time)
        self.lender.library_answered(keeps_alive=not is_gone and bool(resp.keep_alive))
        return resp, is_gone

    def let_go(self) -> None:
        """Ends the handler, and leaves the connection open."""
        self.transport = None
        self.connection_lost(None)
