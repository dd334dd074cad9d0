"""Models from elsewhere, which somebody else imports for the scheduler.

Reading files of strangers takes libraries that a scheduler does not have, and time that it must
not give: whoever starts it says who does the work (ADR 0040).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.agents.registry import AgentRegistry
from catenary_services.errors import NotSupported


class ModelImporter(Protocol):
    """Brings models into the repository that the scheduler reads."""

    def bring(
        self, request: admin_pb2.ImportModelRequest
    ) -> AsyncGenerator[admin_pb2.ImportProgress, None]:
        """Yields how far an import is, the version last; closing it cancels the import.

        Raises:
            CatenaryError: It failed; the message names the source or the field.
        """
        ...


async def import_model(
    importer: ModelImporter | None, request: admin_pb2.ImportModelRequest, agents: AgentRegistry
) -> AsyncGenerator[admin_pb2.ImportProgress, None]:
    """Yields the progress of an import that an operator wants.

    Raises:
        NotSupported: Nobody imports models here.
        CatenaryError: The import failed.
    """
    if importer is None:
        raise NotSupported("this scheduler was started without what imports models")
    wanted = admin_pb2.ImportModelRequest()
    wanted.CopyFrom(request)
    if not wanted.target:
        wanted.target = target_for(agents)
    async with aclosing(importer.bring(wanted)) as steps:
        async for step in steps:
            yield step


def target_for(agents: AgentRegistry) -> str:
    """Returns "gpu" if all connected agents are on GPUs and need no graph; else "both"."""
    devices = [record.device for record in agents.values() if record.session is not None]
    return "gpu" if devices and all(each.startswith("cuda") for each in devices) else "both"
