"""Orders agents to load the partitions they should host, and to unload the others.

Memory decides whether both plans of a switch fit side by side. The size of a partition is known if
it was loaded somewhere; else it is estimated from the weights in the model's profile. Where neither
is known the agent is asked to try, and may refuse.
"""

from __future__ import annotations

from collections.abc import Callable

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.agents.load_orders import LoadOrders
from catenary_scheduler.agents.registry import AgentRegistry, AgentState, staying
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.planning.requirements import PartitionRequirement, Requirements
from catenary_scheduler.wire.messages import partition_message
from catenary_scheduler.wire.session_messages import cache_message
from catenary_services.domain.decoder import LargestStep
from catenary_services.domain.ids import AgentId, Epoch, ModelKey, PartitionKey
from catenary_services.log import get_logger

_log = get_logger(__name__)
_NOTHING: Requirements = {}


class LoadCommands:
    """Sends agents the orders to load and unload partitions."""

    def __init__(
        self, deployments: Deployments, orders: LoadOrders, availability: Availability
    ) -> None:
        self._availability = availability
        self._deployments = deployments
        self._orders = orders
        self._sizes: dict[PartitionKey, int] = {}
        self.content_of: Callable[[ModelKey], str] = lambda model: ""
        """Returns the digest of the content that is served for a model; empty if it is unknown."""
        self.sources_of: Callable[[ModelKey, AgentId], list[str]] = lambda model, agent: []
        """Returns the peers from which an agent may fetch the files of a model."""

    def learn(self, key: PartitionKey, memory_bytes: int) -> None:
        """Notes the size of a partition that an agent reported."""
        self._sizes[key] = max(memory_bytes, self._sizes.get(key, 0))

    def load(
        self,
        registry: AgentRegistry,
        required: Callable[[AgentId], Requirements],
        crowded: Callable[[AgentState], bool],
        now_s: float,
        epoch: Epoch,
    ) -> None:
        """Orders agents to load the partitions they lack; crowded agents only those that fit."""
        self._orders.keep(required, self._deployments.ready)
        self._orders.expire(now_s)
        for record in staying(registry, self._availability):
            agent_id = record.agent.agent_id
            # A partition that failed to load is tried again, even if a plan does without it.
            asked = {**self._orders.refused(agent_id), **required(agent_id)}
            for key, requirement in asked.items():
                if record.hosts(key, requirement) and record.layouts.get(key) == requirement.cache:
                    continue
                if not self.fits(record, key, requirement) and crowded(record):
                    continue
                if self._orders.is_due(agent_id, key, now_s, requirement):
                    self._order(record, key, requirement, epoch)

    def unload(
        self,
        registry: AgentRegistry,
        required: Callable[[AgentId], Requirements],
        in_use: Callable[[AgentId, PartitionKey], bool],
        epoch: Epoch,
    ) -> None:
        """Orders agents to unload partitions that are neither wanted of them nor in use."""
        for record in staying(registry, self._availability):
            agent_id = record.agent.agent_id
            keep = required(agent_id)
            for key in [key for key in record.loaded if key not in keep]:
                if in_use(agent_id, key):
                    continue
                self.give_up(record, key, epoch)

    def give_up(self, record: AgentState, key: PartitionKey, epoch: Epoch) -> None:
        """Orders an agent to unload a partition, as soon as none of its batches needs it."""
        record.loaded.pop(key, None)
        record.layouts.pop(key, None)
        assert record.session is not None
        record.session.send(
            scheduler_pb2.SchedulerToAgentMessage(
                epoch=epoch,
                unload_partition=scheduler_pb2.UnloadPartition(key=partition_message(key)),
            )
        )

    def fits(
        self, record: AgentState, key: PartitionKey, requirement: PartitionRequirement
    ) -> bool:
        """Returns False if a partition is known not to fit beside all the agent has or loads."""
        agent_id = record.agent.agent_id
        if self._orders.lacks_memory(agent_id, key):
            return False
        if key in record.loaded or not record.agent.memory_bytes:
            return True
        used = sum(loaded.memory_bytes for loaded in record.loaded.values())
        coming = sum(
            self._size(record, other, ordered)
            for other, ordered in self._orders.open_of(agent_id).items()
            if other not in record.loaded and other != key
        )
        return used + coming + self._size(record, key, requirement) <= record.agent.memory_bytes

    def is_crowded(self, record: AgentState, required: Requirements) -> bool:
        """Returns True if a wanted partition does not fit while an unwanted one takes up memory."""
        if all(key in required for key in record.loaded):
            return False
        return any(
            not record.hosts(key, requirement) and not self.fits(record, key, requirement)
            for key, requirement in required.items()
        )

    def _size(
        self, record: AgentState, key: PartitionKey, requirement: PartitionRequirement | None
    ) -> int:
        deployment = self._deployments.ready.get(key.model)
        if deployment is not None and deployment.decoder is not None:
            # Computed, not remembered: it depends on the agent, and on the caches it is to hold.
            held = deployment.for_planning().held_by(record.agent)
            if requirement is None or requirement.cache is None:
                return held.weight_bytes(key.first_block, key.last_block)
            cache, chunk = requirement.cache, record.agent.prefill_chunk_tokens
            entries = len(cache.entry_blocks)
            step = LargestStep(requirement.batch, chunk, cache.session_tokens, max(1, entries))
            return held.partition_bytes((key.first_block, key.last_block), cache.tokens, step)
        known = self._sizes.get(key)
        if known is not None:
            return known
        block_weights = deployment.block_weight_bytes if deployment is not None else ()
        return sum(block_weights[key.first_block : key.last_block])

    def _order(
        self, record: AgentState, key: PartitionKey, requirement: PartitionRequirement, epoch: Epoch
    ) -> None:
        deployment = self._deployments.ready.get(key.model)
        if deployment is None or record.session is None:
            return
        order = scheduler_pb2.LoadPartition(
            key=partition_message(key),
            max_batch=requirement.batch,
            float16_boundaries=requirement.float16,
            block_table_hash=deployment.table.model_hash,
            cache=cache_message(requirement.cache) if requirement.cache is not None else None,
            content_digest=self.content_of(key.model),
            sources=self.sources_of(key.model, record.agent.agent_id),
        )
        if requirement.cache is not None:
            record.layouts[key] = requirement.cache
        agent = record.agent.agent_id
        _log.info("load_ordered", agent=agent, partition=str(key), batch=requirement.batch)
        record.session.send(
            scheduler_pb2.SchedulerToAgentMessage(epoch=epoch, load_partition=order)
        )
