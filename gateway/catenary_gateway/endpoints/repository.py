"""The model repository extension of the Open Inference Protocol, except unloading."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from catenary_gateway.catalog import Catalog
from catenary_gateway.endpoints.admin import SchedulerAdmin
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import InvalidInput, NotSupported

EXTENSIONS = ("model_repository", "binary_tensor_data", "parameters")


class Repository:
    """The model repository of the cluster; loading a model deploys it at the scheduler."""

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

    async def load(self, name: str, timeout_s: float | None) -> None:
        """Deploys a model, "name" or "name:version", with the defaults of its manifest."""
        if not name:
            raise InvalidInput("model_name", "is empty")
        model, _, chosen = name.partition(":")
        request = admin_pb2.DeployModelRequest(model=model, version=chosen)
        await self._scheduler.call("DeployModel", request, timeout_s)

    def unload(self, name: str) -> None:
        """Refuses to unload a model, which is for the command `catenary undeploy`.

        Raises:
            NotSupported: Always.
        """
        raise NotSupported(
            f"unloading {name!r} is not offered by this protocol; `catenary undeploy` does it"
        )


def server_version() -> str:
    """Returns the version of this release, "0" if the package is not installed."""
    try:
        return version("catenary")
    except PackageNotFoundError:
        return "0"
