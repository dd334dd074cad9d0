"""The part of a status message that describes agents: hardware, load, impairments, caches."""

from __future__ import annotations

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.admin.cluster_view import ClusterView
from catenary_scheduler.agents.registry import AgentState, address_of
from catenary_scheduler.book.caches import Cache
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import AgentId


def add_agents(status: admin_pb2.GetStatusResponse, view: ClusterView) -> None:
    """Adds every agent the leader knows, connected or not."""
    caches: dict[AgentId, list[Cache]] = {}
    for cache in view.caches():
        caches.setdefault(cache.agent, []).append(cache)
    batches = view.batches_by_agent()
    for agent_id, record in sorted(view.registry.items()):
        added = status.agents.add(
            agent_id=agent_id,
            device=record.device,
            device_class=record.agent.device_class,
            state=view.state_of(record),
            partitions=[str(key) for key in record.loaded],
            memory_bytes=record.agent.memory_bytes,
            utilisation_ratio=view.utilisation(agent_id),
            virtual_level=record.agent.virtual_level,
            device_id=record.agent.device_id,
            group=view.group,
            slowdown_ratio=view.slowdown(agent_id),
            batches=batches[agent_id],
            server_id=record.agent.server,
            used_memory_bytes=sum(loaded.memory_bytes for loaded in record.loaded.values()),
            address=address_of(record.peer),
            device_facts=record.device_facts,
        )
        for fetch in record.fetches:
            added.fetches.add(
                model=fetch.model.name,
                model_version=fetch.model.version,
                wanted_bytes=fetch.wanted_bytes,
                fetched_bytes=fetch.fetched_bytes,
                bytes_per_second=fetch.bytes_per_second,
            )
        _add_impairments(added, agent_id, view)
        _add_unloadable(added, record, view)
        _add_caches(added, record, caches.get(agent_id, []), view)


def _add_impairments(status: admin_pb2.AgentStatus, agent: AgentId, view: ClusterView) -> None:
    """Adds every reason not to give an agent work, with the time that it still holds if known."""
    now = now_ns()
    for each in view.impairments(agent):
        status.impairments.add(
            kind=each.kind,
            partition=str(each.partition) if each.partition is not None else "",
            remaining_ns=max(1, each.until - now) if each.until is not None else 0,
            why=each.why,
        )


def _add_unloadable(status: admin_pb2.AgentStatus, record: AgentState, view: ClusterView) -> None:
    """Adds the models that the runtime of an agent cannot load; no plan uses the agent for them."""
    for key, deployment in sorted(view.deployed.items()):
        if why := deployment.for_planning().why_not_loaded(record.agent):
            status.impairments.add(kind="cannot_load", partition=str(key), why=why)


def _add_caches(
    status: admin_pb2.AgentStatus, record: AgentState, caches: list[Cache], view: ClusterView
) -> None:
    """Adds how full the key-value caches of an agent are.

    Slots are counted by the book, tokens as the agent reported them.
    """
    for cache in caches:
        status.block_slots += cache.capacity
        status.used_block_slots += cache.used
        loaded = record.loaded.get(cache.partition)
        if loaded is None or loaded.cache is None:
            continue
        status.most_block_tokens += loaded.cache.tokens
        # Agents report only while they compute, so the last report may be of a session that ended.
        if cache.used:
            status.cached_block_tokens += view.cached_tokens(cache.agent, cache.partition)
