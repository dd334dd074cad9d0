"""The port for probes, which answers gRPC health checks and nothing else.

Kubernetes' own gRPC probes speak no TLS and bring no key, so that the ports for clients, which
demand both, cannot answer them. This port reports the state of the process and takes no other call.
It names two services:

    live     the process runs and its event loop turns; an orchestrator restarts it if not
    ready    it can take work, or may be counted on (a standby scheduler); also asked as ""

A full queue changes neither. A scheduler has a third, `leader`.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary_services.grpc.grpc_kit import HealthSwitch, bind, create_server
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.security.tls import ServerSecurity

LIVE, READY, LEADER = "live", "ready", "leader"
_MOST_CALLS = 64
_MOST_WATCHERS = 16
"""The most concurrent watchers, so that they do not keep probes from being answered."""
_STOP_GRACE_S = 0.2

_Context = grpc.aio.ServicerContext[Any, Any]


class Probes(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service of a process. Its state may be set before it is started."""

    def __init__(self, *more: str) -> None:
        """Creates the services `live`, `ready` and those in `more`."""
        ready = HealthSwitch(())
        self._switches = {name: HealthSwitch((name,)) for name in (LIVE, *more)}
        self._switches |= {"": ready, READY: HealthSwitch((READY,))}
        self._server: GrpcServer | None = None
        self._watchers = 0

    async def start(self, host: str, port: int) -> int:
        """Starts to answer, with `live` from now on.

        Returns:
            The port; for port 0 a free one is chosen.

        Raises:
            Unavailable: The address is in use or does not belong to this machine.
        """
        self._switches[LIVE].set_serving(True)
        security = ServerSecurity(insecure=True)
        server = create_server(security, most_calls=_MOST_CALLS)
        health_pb2_grpc.add_HealthServicer_to_server(self, server)
        bound = bind(server, host, port, security)
        await server.start()
        self._server = server
        return bound

    def set_ready(self, ready: bool) -> None:
        """Sets whether the process can take work."""
        self.set(READY, ready)
        self.set("", ready)

    def set(self, name: str, serving: bool) -> None:
        """Sets the status of one service."""
        self._switches[name].set_serving(serving)

    async def stop(self) -> None:
        """Ends every watch and the server; idempotent."""
        for switch in self._switches.values():
            await switch.shutdown()
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
            self._server = None

    async def Check(  # noqa: N802 - named by the protocol
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Answers a probe; NOT_FOUND for an unknown name."""
        switch = self._switches.get(request.service, self._switches[LIVE])
        return await switch.Check(request, context)

    async def Watch(  # noqa: N802 - named by the protocol
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> Any:
        """Sends the status now and whenever it changes."""
        if self._watchers >= _MOST_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch already")
        switch = self._switches.get(request.service, self._switches[LIVE])
        self._watchers += 1
        try:
            async for answer in switch.Watch(request, context):
                yield answer
        finally:
            self._watchers -= 1
