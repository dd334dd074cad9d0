"""The Generation service, declared so that clients get an answer and not a puzzle."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from gateway.front_desk import FrontDesk
from gateway.grpc_calls import metadata_of
from services.error_tables import abort, error_of_exception
from services.errors import NotSupported


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Says UNIMPLEMENTED: no model that generates text is served."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk

    async def Generate(  # noqa: N802 - named by the protocol
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Refuses every call."""
        try:
            self._desk.identify(metadata_of(context).get("authorization"))
            raise NotSupported("this cluster serves no model that generates text")
        except Exception as exc:
            await abort(context, error_of_exception(exc))
        yield generation_pb2.GenerateResponse()  # makes this a stream; never reached
