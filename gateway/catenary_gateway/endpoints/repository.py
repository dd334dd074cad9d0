"""The model repository extension: an operator deploys and undeploys models by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grpc.aio

from catenary_gateway.catalog import Catalog
from catenary_gateway.endpoints.admin import SchedulerAdmin
from catenary_gateway.endpoints.security import on_behalf_of
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import InvalidInput, InvalidMessage, NotSupported
from catenary_services.grpc.rpc_errors import error_of_rpc
from catenary_services.log import get_logger
from catenary_services.rules import check
from catenary_services.security.keys import SCOPE_ADMIN, Principal

_DEPENDENTS = "unload_dependents"
"""A parameter of Triton's clients. No model here depends on another, so it says nothing."""

_log = get_logger("catenary_gateway.repository")


class Repository:
    """The model repository of the cluster; an operator's orders go to the scheduler."""

    def __init__(self, catalog: Catalog, scheduler: SchedulerAdmin) -> None:
        self._catalog = catalog
        self._scheduler = scheduler

    def index(self, *, ready_only: bool) -> Iterator[tuple[str, str, str, str]]:
        """Yields (name, version, state, reason) of every model; a ready one has no reason."""
        for model in self._catalog.models():
            if model.ready:
                yield model.key.name, model.key.version, "READY", ""
            elif not ready_only:
                yield model.key.name, model.key.version, "UNAVAILABLE", model.not_ready_reason

    async def load(
        self,
        operator: Principal,
        presented: str | None,
        name: str,
        parameters: Mapping[str, object],
        timeout_s: float | None = None,
    ) -> None:
        """Deploys a model, "name" or "name:version", with the defaults of its manifest.

        Args:
            operator: The caller.
            presented: The caller's key, which the scheduler checks again.
            name: The model.
            parameters: Parameters of the order, none of which is offered.
            timeout_s: Seconds to wait; None for the usual time.

        Raises:
            PermissionDenied: The caller is no operator.
            NotSupported: There is a parameter.
            CatenaryError: The scheduler does not deploy it.
        """
        for key in parameters:
            raise NotSupported(
                f"parameters[{key[:100]!r}]: a model is deployed as it lies in the repository; "
                "`catenary deploy` takes options"
            )
        model, chosen = _named(operator, name)
        request = admin_pb2.DeployModelRequest(model=model, version=chosen)
        await self._order("DeployModel", request, operator, presented, timeout_s)

    async def unload(
        self,
        operator: Principal,
        presented: str | None,
        name: str,
        parameters: Mapping[str, object],
        timeout_s: float | None = None,
    ) -> None:
        """Undeploys a model, "name" or "name:version"; see `load`.

        Raises:
            PermissionDenied: The caller is no operator.
            NotSupported: There is a parameter other than `unload_dependents`.
            CatenaryError: The scheduler does not undeploy it.
        """
        for key in parameters:
            if key != _DEPENDENTS:
                raise NotSupported(f"parameters[{key[:100]!r}]: models are unloaded without it")
        model, chosen = _named(operator, name)
        request = admin_pb2.UndeployModelRequest(model=model, version=chosen)
        await self._order("UndeployModel", request, operator, presented, timeout_s)

    async def _order(
        self,
        method: str,
        request: Any,
        operator: Principal,
        presented: str | None,
        timeout_s: float | None,
    ) -> None:
        try:
            check(request)
        except InvalidMessage as error:
            raise InvalidInput("model_name", error.message.partition(": ")[2]) from None
        _log.info("operator_acts", action=method, key=operator.name, model=request.model)
        # The variable must not outlive the order: one connection's requests share a context.
        token = on_behalf_of.set(presented or "")
        try:
            await self._scheduler.call(method, request, timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_rpc(error) from None
        finally:
            on_behalf_of.reset(token)


def _named(operator: Principal, name: str) -> tuple[str, str]:
    """Returns the name and the version of a model that an operator may order something of."""
    operator.require(SCOPE_ADMIN)
    # What is not printable includes lone surrogates, which no message takes.
    if not name or not name.isprintable():
        raise InvalidInput("model_name", "must be the name of a model")
    model, _, chosen = name.partition(":")
    return model, chosen
