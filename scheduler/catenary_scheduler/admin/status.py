"""The cluster at one moment, as operators see it."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.admin.agent_status import add_agents
from catenary_scheduler.admin.sessions import SessionTotals, hop_status
from catenary_scheduler.admin.software_versions import add_versions
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.plan import Chain, Pipeline


def status_of(leader: LeaderRuntime) -> admin_pb2.GetStatusResponse:
    """Returns the cluster as operators see it."""
    dispatcher = leader.dispatcher.statistics()
    status = admin_pb2.GetStatusResponse(
        scheduler_id=leader.settings.scheduler_id,
        epoch=leader.epoch,
        plan_id=leader.cluster.plan_id,
        gateways=[g.gateway_id for g in leader.gateways.gateways.values() if g.session is not None],
        queued_requests=len(leader.waiting)
        + dispatcher["queued_rows"]
        + dispatcher["queued_requests"],
        batches_in_flight=len(leader.in_flight),
        live_reservations=len(leader.dispatcher.snapshot()),
        redis_connected=leader.write_behind.connected,
        redis_problem=leader.write_behind.problem,
        sessions_in_flight=len(leader.live),
        moves_done=dispatcher["kv_moves"] + dispatcher["tokens_moves"],
        moves_failed=dispatcher["failed_moves"],
        audits=leader.audits.audits,
        leaks_mended=leader.audits.leaks_mended,
        takeover_problems=leader.takeover_problems,
        quarantined_records=leader.quarantined,
    )
    add_agents(status, leader)
    add_versions(status, leader)
    _add_models(status, leader)
    for reference, problem in leader.deployments.problems.items():
        name, _, version = reference.partition(":")
        status.models.add(name=name, version=version, ready=False, reason=problem)
    return status


def _add_models(status: admin_pb2.GetStatusResponse, leader: LeaderRuntime) -> None:
    active = leader.cluster.active
    plans = {model.model: model for model in active.plan.models} if active else {}
    sessions, by_chain = leader.live.by_model(), leader.live.by_chain()
    figures = SessionTotals(leader.moves.sessions())
    for key in leader.deployments.ready:
        reason = leader.cluster.reason(key)
        plan = plans.get(key)
        status.models.add(
            name=key.name,
            version=key.version,
            ready=not reason,
            reason=reason,
            pipelines=len(plan.pipelines) if plan is not None else 0,
            queued_requests=leader.waiting.count(key) + leader.dispatcher.chained.queued(key),
            chains=[
                _chain(chain, by_chain, figures, leader.sessions.latency.message(key, chain))
                for chain in (plan.chains if plan is not None else ())
            ],
            sessions=sessions[key],
            packing=plan.packing if plan is not None and plan.chains else "",
            sessions_moving=figures.moving[key],
            attainment_ratio=leader.autoscaler.attainment(key, now_ns()),
            pipelines_served=[_pipeline(each) for each in (plan.pipelines if plan else ())],
        )


def _pipeline(pipeline: Pipeline) -> admin_pb2.PipelineStatus:
    return admin_pb2.PipelineStatus(
        batch=pipeline.batch_size,
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
