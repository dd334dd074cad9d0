"""The Open Inference Protocol over gRPC: thin servicer methods around the data plane."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from catenary_gateway.admission.callers import charge, entered, presented
from catenary_gateway.admission.front_desk import FrontDesk
from catenary_gateway.doors.grpc_calls import answered, metadata_of
from catenary_gateway.doors.ordered_stream import answer_in_order
from catenary_gateway.doors.repository import EXTENSIONS, Repository, server_version
from catenary_gateway.doors.security import on_behalf_of
from catenary_gateway.inference import Arrival
from catenary_gateway.oip import oip_proto
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.grpc.error_details import public_message
from catenary_services.grpc.error_tables import error_of_exception
from catenary_services.grpc.grpc_intake import address_of
from catenary_services.security.keys import SCOPE_ADMIN, Principal

INFER = "inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "inference.GRPCInferenceService/ModelStreamInfer"

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(oip_grpc.GRPCInferenceServiceServicer):
    """Every method checks the key, converts, calls and converts back."""

    def __init__(self, desk: FrontDesk, repository: Repository, max_stream_requests: int) -> None:
        self._desk = desk
        self._repository = repository
        self._max_stream_requests = max_stream_requests

    @answered
    async def ServerLive(  # noqa: N802 - named by the protocol, like all below
        self, request: oip.ServerLiveRequest, context: Context
    ) -> oip.ServerLiveResponse:
        """True while the process answers at all; needs no key."""
        return oip.ServerLiveResponse(live=True)

    @answered
    async def ServerReady(  # noqa: N802
        self, request: oip.ServerReadyRequest, context: Context
    ) -> oip.ServerReadyResponse:
        """True if a scheduler leads and every model is ready; needs no key."""
        return oip.ServerReadyResponse(ready=self._desk.readiness.ready)

    @answered
    async def ModelReady(  # noqa: N802
        self, request: oip.ModelReadyRequest, context: Context
    ) -> oip.ModelReadyResponse:
        """True if this model takes requests."""
        self._identify(context)
        model = self._desk.catalog.find(request.name, request.version)
        return oip.ModelReadyResponse(ready=model.ready)

    @answered
    async def ServerMetadata(  # noqa: N802
        self, request: oip.ServerMetadataRequest, context: Context
    ) -> oip.ServerMetadataResponse:
        """Name, version and extensions."""
        self._identify(context)
        return oip.ServerMetadataResponse(
            name="catenary", version=server_version(), extensions=EXTENSIONS
        )

    @answered
    async def ModelMetadata(  # noqa: N802
        self, request: oip.ModelMetadataRequest, context: Context
    ) -> oip.ModelMetadataResponse:
        """The signature of a model."""
        self._identify(context)
        model = self._desk.catalog.find(request.name, request.version)
        return oip_proto.metadata_of(model, self._desk.catalog.versions(request.name))

    @answered
    async def ModelInfer(  # noqa: N802
        self, request: oip.ModelInferRequest, context: Context
    ) -> oip.ModelInferResponse:
        """One inference."""
        traceparent = presented().get("traceparent")
        arrival = self._desk.arrive(INFER, traceparent, context.time_remaining())
        return await self._infer(request, arrival, entered())

    @answered
    async def ModelStreamInfer(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: AsyncIterator[oip.ModelInferRequest],
        context: Context,
    ) -> None:
        """Many inferences on one stream; answers in the order of the requests."""
        metadata, address = metadata_of(context), address_of(context.peer())

        async def answer(request: oip.ModelInferRequest) -> oip.ModelStreamInferResponse:
            arrival = self._desk.arrive(
                STREAM_INFER, metadata.get("traceparent"), context.time_remaining()
            )
            # Anew each time: a key that was revoked is refused on streams it opened before, too.
            presented = metadata.get("authorization")
            return await self._infer_in_stream(request, arrival, presented, address)

        await answer_in_order(request_iterator, answer, context.write, self._max_stream_requests)

    @answered
    async def RepositoryIndex(  # noqa: N802
        self, request: oip.RepositoryIndexRequest, context: Context
    ) -> oip.RepositoryIndexResponse:
        """Every model with its state."""
        self._identify(context)
        index = oip.RepositoryIndexResponse()
        for name, version, state, reason in self._repository.index(ready_only=request.ready):
            index.models.add(name=name, version=version, state=state, reason=reason)
        return index

    @answered
    async def RepositoryModelLoad(  # noqa: N802
        self, request: oip.RepositoryModelLoadRequest, context: Context
    ) -> oip.RepositoryModelLoadResponse:
        """Has the scheduler deploy a model."""
        self._identify(context).require(SCOPE_ADMIN)
        on_behalf_of.set(metadata_of(context).get("authorization") or "")
        await self._repository.load(request.model_name, context.time_remaining())
        return oip.RepositoryModelLoadResponse()

    @answered
    async def RepositoryModelUnload(  # noqa: N802
        self, request: oip.RepositoryModelUnloadRequest, context: Context
    ) -> oip.RepositoryModelUnloadResponse:
        """Refused; says what to do instead."""
        self._identify(context).require(SCOPE_ADMIN)
        self._repository.unload(request.model_name)
        return oip.RepositoryModelUnloadResponse()

    def _identify(self, context: Context) -> Principal:
        return self._desk.identify(metadata_of(context).get("authorization"))

    async def _infer(
        self, message: oip.ModelInferRequest, arrival: Arrival, principal: Principal
    ) -> oip.ModelInferResponse:
        desk, name, version = self._desk, message.model_name, message.model_version
        with desk.visit(principal, name, version, message.ByteSize()) as visit:
            request, form = oip_proto.request_of(message, visit.model, desk.intake())
            response = await visit.infer(request, arrival)
            return oip_proto.response_of(response, form, request.outputs)

    async def _infer_in_stream(
        self, message: oip.ModelInferRequest, arrival: Arrival, presented: str | None, address: str
    ) -> oip.ModelStreamInferResponse:
        answer = oip.ModelStreamInferResponse()
        try:
            principal = self._desk.enter(presented, address)
            answer.infer_response.CopyFrom(await self._infer(message, arrival, principal))
        except Exception as exc:
            error = error_of_exception(exc)
            charge(error)
            answer.error_message = f"[{error.reason}] {public_message(error)}"
            # Triton's clients find out by the id which of their requests it was.
            answer.infer_response.id = message.id
        answer.infer_response.parameters["triton_final_response"].bool_param = True
        return answer
