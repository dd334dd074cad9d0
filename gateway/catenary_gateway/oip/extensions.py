"""Triton's extensions of the Open Inference Protocol, for gRPC and HTTP alike.

Requests and answers are the messages of the protocol. Endpoints know who asks; what it takes to be
answered is decided here, so that both protocols say the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from catenary_gateway.admission.request_pipeline import Caller, RequestPipeline
from catenary_gateway.class_names import ClassNames, Names
from catenary_gateway.endpoints.repository import Repository
from catenary_gateway.inference import InferenceResponse
from catenary_gateway.oip.caller_memory import CallerMemory
from catenary_gateway.oip.model_descriptions import config_of, statistics_of
from catenary_gateway.oip.process_settings import LogSettings, LogValue, TraceSettings
from catenary_gateway.oip.shared_regions import SharedRegions
from catenary_gateway.tensors.classification import classified
from catenary_protos.inference import grpc_predict_v2_pb2 as oip
from catenary_services.errors import (
    InvalidInput,
    ModelNotFound,
    NotSupported,
    PermissionDenied,
    Unavailable,
)
from catenary_services.security.keys import SCOPE_ADMIN, SCOPE_VIEW, Principal
from catenary_services.telemetry.tracing import Tracer

_ALWAYS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
_NAMES_WAIT_S = 1.0
"""Seconds that an answer with classes waits for the files with their names."""


class ProtocolExtensions:
    """The extensions of one gateway."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        repository: Repository,
        regions: SharedRegions,
        tracer: Tracer,
        class_names: ClassNames,
        *,
        is_open: bool,
    ) -> None:
        """Makes the extensions; without keys, settings are changed only if `is_open`."""
        self.repository = repository
        self.regions = regions
        self.traces = TraceSettings(tracer)
        self.logs = LogSettings()
        self._pipeline = pipeline
        self._class_names = class_names
        self._is_open = is_open

    @property
    def names(self) -> tuple[str, ...]:
        """The extensions that are offered, by the names that Triton gives them."""
        return (*_ALWAYS, "system_shared_memory") if self.regions.is_offered else _ALWAYS

    def config(self, name: str, version: str) -> oip.ModelConfig:
        """Returns the configuration of a model.

        Raises:
            CatenaryError: It is not served.
        """
        pipeline = self._pipeline
        model = pipeline.catalog.find(name, version)
        return config_of(model, pipeline.capacity.max_request_bytes)

    def statistics(self, asker: Principal, name: str, version: str) -> oip.ModelStatisticsResponse:
        """Returns the statistics of a model; of all versions or models if these are "".

        Raises:
            PermissionDenied: The caller may not look.
            CatenaryError: The model is not served.
        """
        asker.require(SCOPE_VIEW)
        catalog, metrics = self._pipeline.catalog, self._pipeline.plane.request_metrics
        if name and version:
            models = [catalog.find(name, version)]
        elif name:
            catalog.find(name, "")
            models = [model for model in catalog.models() if model.key.name == name]
        elif version:
            raise InvalidInput("version", "is nothing without the name of a model")
        else:
            models = catalog.models()
        return oip.ModelStatisticsResponse(
            model_stats=[
                statistics_of(model, metrics.totals(model.label), metrics.counts(model.label))
                for model in models
            ]
        )

    def trace_settings(
        self, asker: Principal, model: str, changes: Mapping[str, Sequence[str]]
    ) -> dict[str, list[str]]:
        """Changes settings of tracing, if there are changes, and returns all.

        Raises:
            PermissionDenied: The caller may not look, or not change.
            CatenaryError: A change is wrong, or the model is not served.
        """
        self._require_leave(asker, changes)
        if model:
            self._pipeline.catalog.find(model, "")
            if changes:
                raise NotSupported("trace settings are those of the gateway, not of single models")
        self.traces.update(changes)
        return self.traces.values()

    def log_settings(self, asker: Principal, changes: Mapping[str, object]) -> dict[str, LogValue]:
        """Changes settings of the log, if there are changes, and returns all.

        Raises:
            PermissionDenied: The caller may not look, or not change.
            CatenaryError: A change is wrong.
        """
        self._require_leave(asker, changes)
        self.logs.update(changes)
        return self.logs.values()

    def _require_leave(self, asker: Principal, changes: Mapping[str, object]) -> None:
        """Checks that a caller may look at settings, or make these changes.

        Raises:
            PermissionDenied: The caller may not.
        """
        asker.require(SCOPE_ADMIN if changes else SCOPE_VIEW)
        if changes and not self._is_open and not self._pipeline.keys.enabled:
            raise PermissionDenied("settings are changed with a key, and there is no api_keys_file")

    def register(self, caller: Caller, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Registers a region of shared memory; see `SharedRegions.register`.

        Raises:
            CatenaryError: It is refused, or no regions are offered to the caller.
        """
        owner = self.regions.require_offered(caller)
        self.regions.register(owner, name, key, offset, size_bytes)

    def unregister(self, caller: Caller, name: str) -> None:
        """Forgets a region of the caller, or all of them for "".

        Raises:
            CatenaryError: No regions are offered to the caller.
        """
        self.regions.unregister(self.regions.require_offered(caller), name)

    def region_status(self, caller: Caller, name: str) -> oip.SystemSharedMemoryStatusResponse:
        """Returns a region of the caller, or all of them for "".

        Raises:
            CatenaryError: There is no such region, or none are offered to the caller.
        """
        owner = self.regions.require_offered(caller)
        status = oip.SystemSharedMemoryStatusResponse()
        for region in self.regions.registered(owner, name):
            entry = status.regions[region.name]
            entry.name, entry.key = region.name, region.key
            entry.offset, entry.byte_size = region.offset, region.size_bytes
        return status

    def refuse_cuda_region(self) -> None:
        """Refuses to register memory of a GPU.

        Raises:
            NotSupported: Always.
        """
        raise NotSupported(
            "CUDA shared memory is not offered: agents on other machines have the GPUs, and the "
            "gateway has none"
        )

    def cuda_region_status(self, name: str) -> oip.CudaSharedMemoryStatusResponse:
        """Returns no regions, as there are none.

        Raises:
            InvalidInput: One is asked for by its name.
        """
        if name:
            raise InvalidInput("name", "no CUDA shared memory region is registered")
        return oip.CudaSharedMemoryStatusResponse()

    def memory_of(self, caller: Caller) -> CallerMemory:
        """Returns the shared memory that a request of this sender may name."""
        return CallerMemory(self.regions, caller, self._pipeline.capacity.max_request_bytes)

    async def with_classes(
        self, response: InferenceResponse, counts: Sequence[int]
    ) -> InferenceResponse:
        """Returns an answer with classes in place of outputs; see `classified`.

        Classes have names if the model has a file with names and it can be had soon.

        Raises:
            InvalidInput: The classes of all rows are too many.
        """
        key = response.model.key
        names: Names = ()
        with suppress(ModelNotFound, Unavailable):
            names = await self._class_names.of(key.name, key.version, _NAMES_WAIT_S)
        # Millions of numbers are sorted in a good part of a second.
        return await asyncio.to_thread(classified, response, counts, names)
