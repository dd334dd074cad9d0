"""Readiness of all scheduler groups of a local cluster; a gateway is ready when one of them is."""

from __future__ import annotations

import grpc.aio

from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.domain.groups import metadata_of_group

_ANSWER_S = 2.0


async def what_groups_wait_for(admin_target: str, groups: int) -> str:
    """Returns why a group does not serve all models yet; empty if every group does."""
    async with grpc.aio.insecure_channel(admin_target) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        for group in range(groups):
            try:
                status = await stub.GetStatus(
                    admin_pb2.GetStatusRequest(),
                    metadata=metadata_of_group(group, groups),
                    timeout=_ANSWER_S,
                )
            except grpc.aio.AioRpcError as error:
                return f"scheduler group {group}: {error.details()}"
            waiting = [
                f"{model.name}: {model.reason}" for model in status.models if not model.ready
            ]
            if waiting:
                return f"scheduler group {group}: {'; '.join(waiting)}"
    return ""
