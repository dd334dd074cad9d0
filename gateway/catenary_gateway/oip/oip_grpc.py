"""The Open Inference Protocol over gRPC: servicer methods that call the data plane."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from catenary_gateway.admission.request_pipeline import RequestPipeline, caller, charge
from catenary_gateway.endpoints.grpc_calls import answered, metadata_of
from catenary_gateway.endpoints.ordered_stream import answer_in_order
from catenary_gateway.inference import NO_MEMORY, RequestArrival
from catenary_gateway.oip import oip_proto
from catenary_gateway.oip.extensions import ProtocolExtensions
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_protos.inference import grpc_predict_v2_pb2_grpc as oip_grpc
from catenary_services.grpc.error_details import public_message
from catenary_services.grpc.error_tables import error_of_exception
from catenary_services.security.keys import Principal
from catenary_services.version import software_version

INFER = "inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "inference.GRPCInferenceService/ModelStreamInfer"

BUFFER_PARSERS = dict.fromkeys((f"/{INFER}", f"/{STREAM_INFER}"), oip_proto.received_request)
"""Parsers of the methods whose messages have tensors."""

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(oip_grpc.GRPCInferenceServiceServicer):
    """The inference service: its methods check keys, convert, and call the data plane."""

    def __init__(
        self, pipeline: RequestPipeline, extensions: ProtocolExtensions, max_stream_requests: int
    ) -> None:
        self._pipeline = pipeline
        self._extensions = extensions
        self._max_stream_requests = max_stream_requests

    @answered
    async def ServerLive(  # noqa: N802 - named by the protocol, like all below
        self, request: oip.ServerLiveRequest, context: Context
    ) -> oip.ServerLiveResponse:
        """Returns true while the process answers at all; needs no key."""
        return oip.ServerLiveResponse(live=True)

    @answered
    async def ServerReady(  # noqa: N802
        self, request: oip.ServerReadyRequest, context: Context
    ) -> oip.ServerReadyResponse:
        """Returns true if a scheduler leads and every model is ready; needs no key."""
        return oip.ServerReadyResponse(ready=self._pipeline.readiness.ready)

    @answered
    async def ModelReady(  # noqa: N802
        self, request: oip.ModelReadyRequest, context: Context
    ) -> oip.ModelReadyResponse:
        """Returns true if the model takes requests."""
        self._identify(context)
        model = self._pipeline.catalog.find(request.name, request.version)
        return oip.ModelReadyResponse(ready=model.ready)

    @answered
    async def ServerMetadata(  # noqa: N802
        self, request: oip.ServerMetadataRequest, context: Context
    ) -> oip.ServerMetadataResponse:
        """Returns the server's name, version and supported extensions."""
        self._identify(context)
        return oip.ServerMetadataResponse(
            name="catenary", version=software_version(), extensions=self._extensions.names
        )

    @answered
    async def ModelMetadata(  # noqa: N802
        self, request: oip.ModelMetadataRequest, context: Context
    ) -> oip.ModelMetadataResponse:
        """Returns the tensor signature of a model."""
        self._identify(context)
        model = self._pipeline.catalog.find(request.name, request.version)
        return oip_proto.metadata_of(model, self._pipeline.catalog.versions(request.name))

    @answered
    async def ModelInfer(  # type: ignore[override]  # noqa: N802
        self, request: oip_proto.ReceivedRequest, context: Context
    ) -> oip.ModelInferResponse:
        """Answers one inference request."""
        sender, left_s = caller(), context.time_remaining()
        arrival = self._pipeline.arrivals.arrive(INFER, sender.metadata.get("traceparent"), left_s)
        return await self._infer(request, arrival, sender.entered)

    @answered
    async def ModelStreamInfer(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: AsyncIterator[oip_proto.ReceivedRequest],
        context: Context,
    ) -> None:
        """Answers many inference requests on one stream, in their order."""
        metadata, arrivals = caller().metadata, self._pipeline.arrivals

        async def answer(request: oip_proto.ReceivedRequest) -> oip.ModelStreamInferResponse:
            arrival = arrivals.arrive(
                STREAM_INFER, metadata.get("traceparent"), context.time_remaining()
            )
            return await self._infer_in_stream(request, arrival, metadata.get("authorization"))

        await answer_in_order(request_iterator, answer, context.write, self._max_stream_requests)

    @answered
    async def RepositoryIndex(  # noqa: N802
        self, request: oip.RepositoryIndexRequest, context: Context
    ) -> oip.RepositoryIndexResponse:
        """Returns every model with its state; only ready ones if asked for."""
        self._identify(context)
        index = oip.RepositoryIndexResponse()
        models = self._extensions.repository.index(ready_only=request.ready)
        for name, version, state, reason in models:
            index.models.add(name=name, version=version, state=state, reason=reason)
        return index

    @answered
    async def RepositoryModelLoad(  # noqa: N802
        self, request: oip.RepositoryModelLoadRequest, context: Context
    ) -> oip.RepositoryModelLoadResponse:
        """Orders the scheduler to deploy a model."""
        await self._extensions.repository.load(
            self._identify(context),
            metadata_of(context).get("authorization"),
            request.model_name,
            oip_proto.plain_parameters(request.parameters),
            context.time_remaining(),
        )
        return oip.RepositoryModelLoadResponse()

    @answered
    async def RepositoryModelUnload(  # noqa: N802
        self, request: oip.RepositoryModelUnloadRequest, context: Context
    ) -> oip.RepositoryModelUnloadResponse:
        """Orders the scheduler to undeploy a model."""
        await self._extensions.repository.unload(
            self._identify(context),
            metadata_of(context).get("authorization"),
            request.model_name,
            oip_proto.plain_parameters(request.parameters),
            context.time_remaining(),
        )
        return oip.RepositoryModelUnloadResponse()

    @answered
    async def ModelConfig(  # noqa: N802
        self, request: oip.ModelConfigRequest, context: Context
    ) -> oip.ModelConfigResponse:
        """Returns the configuration of a model, as Triton describes one."""
        self._identify(context)
        return oip.ModelConfigResponse(
            config=self._extensions.config(request.name, request.version)
        )

    @answered
    async def ModelStatistics(  # noqa: N802
        self, request: oip.ModelStatisticsRequest, context: Context
    ) -> oip.ModelStatisticsResponse:
        """Returns sums over the requests to one model, or to all of them."""
        asker = self._identify(context)
        return self._extensions.statistics(asker, request.name, request.version)

    @answered
    async def SystemSharedMemoryStatus(  # noqa: N802
        self, request: oip.SystemSharedMemoryStatusRequest, context: Context
    ) -> oip.SystemSharedMemoryStatusResponse:
        """Returns the caller's regions of shared memory."""
        self._identify(context)
        return self._extensions.region_status(caller(), request.name)

    @answered
    async def SystemSharedMemoryRegister(  # noqa: N802
        self, request: oip.SystemSharedMemoryRegisterRequest, context: Context
    ) -> oip.SystemSharedMemoryRegisterResponse:
        """Registers a region of shared memory."""
        self._identify(context)
        self._extensions.register(
            caller(), request.name, request.key, request.offset, request.byte_size
        )
        return oip.SystemSharedMemoryRegisterResponse()

    @answered
    async def SystemSharedMemoryUnregister(  # noqa: N802
        self, request: oip.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> oip.SystemSharedMemoryUnregisterResponse:
        """Forgets one of the caller's regions, or all of them."""
        self._identify(context)
        self._extensions.unregister(caller(), request.name)
        return oip.SystemSharedMemoryUnregisterResponse()

    @answered
    async def CudaSharedMemoryStatus(  # noqa: N802
        self, request: oip.CudaSharedMemoryStatusRequest, context: Context
    ) -> oip.CudaSharedMemoryStatusResponse:
        """Returns no regions, as there are none."""
        self._identify(context)
        return self._extensions.cuda_region_status(request.name)

    @answered
    async def CudaSharedMemoryRegister(  # noqa: N802
        self, request: oip.CudaSharedMemoryRegisterRequest, context: Context
    ) -> oip.CudaSharedMemoryRegisterResponse:
        """Refuses to register memory of a GPU."""
        self._identify(context)
        self._extensions.refuse_cuda_region()
        return oip.CudaSharedMemoryRegisterResponse()

    @answered
    async def CudaSharedMemoryUnregister(  # noqa: N802
        self, request: oip.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> oip.CudaSharedMemoryUnregisterResponse:
        """Does nothing, as there are no regions; clients forget all of theirs before they begin."""
        self._identify(context)
        return oip.CudaSharedMemoryUnregisterResponse()

    @answered
    async def TraceSetting(  # noqa: N802
        self, request: oip.TraceSettingRequest, context: Context
    ) -> oip.TraceSettingResponse:
        """Changes the sampling of traces, and returns all settings of it."""
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        settings = self._extensions.trace_settings(
            self._identify(context), request.model_name, changes
        )
        response = oip.TraceSettingResponse()
        for name, value in settings.items():
            response.settings[name].value.extend(value)
        return response

    @answered
    async def LogSettings(  # noqa: N802
        self, request: oip.LogSettingsRequest, context: Context
    ) -> oip.LogSettingsResponse:
        """Changes the level of the log, and returns all settings of it."""
        changes = oip_proto.plain_parameters(request.settings)
        settings = self._extensions.log_settings(self._identify(context), changes)
        return oip.LogSettingsResponse(
            settings={name: oip_proto.log_value(value) for name, value in settings.items()}
        )

    def _identify(self, context: Context) -> Principal:
        return self._pipeline.identify(metadata_of(context).get("authorization"))

    async def _infer(
        self, received: oip_proto.ReceivedRequest, arrival: RequestArrival, principal: Principal
    ) -> oip.ModelInferResponse:
        message = received.message
        pipeline, name, version = self._pipeline, message.model_name, message.model_version
        with pipeline.admit(principal, name, version, received.nbytes) as admitted:
            described = any(tensor.parameters for tensor in message.inputs)
            described = described or any(tensor.parameters for tensor in message.outputs)
            memory = self._extensions.memory_of(caller()) if described else NO_MEMORY
            conversion = pipeline.arrivals.conversion(memory)
            request, form = oip_proto.request_of(received, admitted.model, conversion)
            if memory.read_bytes:
                admitted.hold_more(memory.read_bytes)
            response = await admitted.infer(request, arrival)
            if form.class_counts:
                response = await self._extensions.with_classes(response, form.class_counts)
            return oip_proto.response_of(response, form, request.outputs, memory)

    async def _infer_in_stream(
        self,
        received: oip_proto.ReceivedRequest,
        arrival: RequestArrival,
        presented: str | None,
    ) -> oip.ModelStreamInferResponse:
        answer = oip.ModelStreamInferResponse()
        try:
            # Checked for each request, so that a revoked key is refused on open streams too.
            principal = self._pipeline.enter(presented)
            answer.infer_response.CopyFrom(await self._infer(received, arrival, principal))
        except Exception as exc:
            error = error_of_exception(exc)
            charge(error)
            answer.error_message = f"[{error.reason}] {public_message(error)}"
            # Triton's clients match the error to their request by the id.
            answer.infer_response.id = received.message.id
        answer.infer_response.parameters["triton_final_response"].bool_param = True
        return answer
