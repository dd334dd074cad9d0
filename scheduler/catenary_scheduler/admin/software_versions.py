"""Software versions of the processes of a cluster, for rolling upgrades."""

from __future__ import annotations

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.admin.cluster_view import ClusterView
from catenary_services.version import software_version


def add_versions(status: admin_pb2.GetStatusResponse, view: ClusterView) -> None:
    """Adds the leader's own version and those that connected gateways and agents reported."""
    status.versions.add(role="scheduler", name=view.scheduler_id, version=software_version())
    for gateway in sorted(view.gateways, key=lambda each: each.gateway_id):
        status.versions.add(
            role="gateway", name=gateway.gateway_id, version=gateway.software_version
        )
    for agent_id, record in sorted(view.registry.items()):
        if record.session is not None:
            status.versions.add(role="agent", name=agent_id, version=record.software_version)
