"""The status message: the state of a whole cluster at one moment."""

from __future__ import annotations

import time
from collections.abc import Mapping

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.admin.agent_status import add_agents
from catenary_scheduler.admin.cluster_view import ClusterView
from catenary_scheduler.admin.sessions import SessionTotals, hop_status
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.domain.plan import Chain, ModelPlan, Pipeline
from catenary_services.version import software_version

_MOST_LINKS = 1_000


def status_of(view: ClusterView) -> admin_pb2.GetStatusResponse:
    """Returns the present state of a cluster as the message that operators get."""
    statistics = view.statistics()
    status = admin_pb2.GetStatusResponse(
        scheduler_id=view.scheduler_id,
        epoch=view.epoch,
        plan_id=view.plan_id,
        gateways=[gateway.gateway_id for gateway in view.gateways],
        queued_requests=view.held_requests
        + statistics["queued_rows"]
        + statistics["queued_requests"],
        batches_in_flight=view.batches_in_flight,
        live_reservations=len(view.reservations()),
        redis_connected=view.redis_connected,
        redis_problem=view.redis_problem,
        sessions_in_flight=view.sessions_in_flight,
        moves_done=statistics["kv_moves"] + statistics["tokens_moves"],
        moves_failed=statistics["failed_moves"],
        audits=view.audits,
        leaks_mended=view.leaks_mended,
        takeover_problems=view.takeover_problems,
        quarantined_records=view.quarantined_records,
    )
    add_agents(status, view)
    _add_links(status, view)
    _add_versions(status, view)
    _add_models(status, view)
    for reference, problem in view.undeployed.items():
        name, _, version = reference.partition(":")
        status.models.add(name=name, version=version, ready=False, reason=problem)
    return status


def _add_models(status: admin_pb2.GetStatusResponse, view: ClusterView) -> None:
    plans = {model.model: model for model in view.plan_models}
    sessions, by_chain = view.sessions_by_model(), view.sessions_by_chain()
    figures = SessionTotals(view.sessions())
    for key in view.deployed:
        reason = view.not_ready_reason(key)
        plan = plans.get(key)
        status.models.add(
            name=key.name,
            version=key.version,
            ready=not reason,
            reason=reason,
            pipelines=len(plan.pipelines) if plan is not None else 0,
            queued_requests=view.queued(key),
            chains=[
                _chain(chain, by_chain, figures, view.latency_lines(key, chain))
                for chain in (plan.chains if plan is not None else ())
            ],
            sessions=sessions[key],
            packing=plan.packing if plan is not None and plan.chains else "",
            sessions_moving=figures.moving[key],
            attainment_ratio=view.attainment(key),
            pipelines_served=[_pipeline(each, plan) for each in plan.pipelines] if plan else [],
        )


def _pipeline(pipeline: Pipeline, plan: ModelPlan) -> admin_pb2.PipelineStatus:
    return admin_pb2.PipelineStatus(
        batch=pipeline.batch_size // plan.row_units,
        stages=[
            admin_pb2.PoolStatus(
                first_block=stage.partition.first_block,
                last_block=stage.partition.last_block,
                agent_ids=stage.agents,
            )
            for stage in pipeline.stages
        ],
    )


def _chain(
    chain: Chain,
    sessions: Mapping[str, int],
    figures: SessionTotals,
    lines: admin_pb2.LatencyLines | None,
) -> admin_pb2.ChainStatus:
    return admin_pb2.ChainStatus(
        chain_id=chain.chain_id,
        hops=[hop_status(hop) for hop in chain.hops],
        capacity=chain.capacity,
        sessions=sessions.get(chain.chain_id, 0),
        service_ns=chain.service_ns,
        role=chain.role,
        lines=lines,
        cache_tokens=round(chain.cache_tokens),
        cached_tokens=figures.cached_tokens[chain.chain_id],
    )


def _add_links(status: admin_pb2.GetStatusResponse, view: ClusterView) -> None:
    """Adds the measured links, the slowest first; with very many the fast ones are left out."""
    links = sorted(view.links(), key=lambda each: each[1].figures.bytes_per_second)
    now_s = time.time()
    for (source, target), link in links[:_MOST_LINKS]:
        status.links.add(
            source_server_id=source,
            target_server_id=target,
            round_trip_ns=link.figures.round_trip_ns,
            bytes_per_second=link.figures.bytes_per_second,
            age_ns=max(0, int((now_s - link.unix_s) * NANOSECONDS_PER_SECOND)),
        )


def _add_versions(status: admin_pb2.GetStatusResponse, view: ClusterView) -> None:
    """Adds the leader's own version and those that connected gateways and agents reported."""
    status.versions.add(role="scheduler", name=view.scheduler_id, version=software_version())
    for gateway in sorted(view.gateways, key=lambda each: each.gateway_id):
        status.versions.add(
            role="gateway", name=gateway.gateway_id, version=gateway.software_version
        )
    for agent_id, record in sorted(view.registry.items()):
        if record.session is not None:
            status.versions.add(role="agent", name=agent_id, version=record.software_version)
