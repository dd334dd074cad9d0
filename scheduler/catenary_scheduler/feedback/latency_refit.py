"""Fits the latency lines of chains to agents' reports, for the dispatcher and for metrics."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import TYPE_CHECKING

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.dispatch.events import LatencyRefitted
from catenary_scheduler.planning import ChainLatency
from catenary_scheduler.planning.latency import ErrorWindow, ObservedCost, WorkTotals
from catenary_scheduler.replanning.chain_costs import latency_lines
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import Chain, ChainHop, ModelPlan, Plan
from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_scheduler.agents.deployments import Deployments
    from catenary_scheduler.book import SlotLedger
    from catenary_scheduler.cluster.controller import ClusterController
    from catenary_scheduler.observed.profiles import MeasuredProfiles
    from catenary_services.telemetry.metrics import Metrics

_log = get_logger(__name__)
_KINDS: dict[str, Callable[[ObservedCost], ErrorWindow]] = {
    "prefill": lambda observed: observed.prefill_errors,
    "decode": lambda observed: observed.decode_errors,
    "cache": lambda observed: observed.cache_errors,
}
_COEFFICIENTS = (
    "prefill_token_ns",
    "prefill_ns",
    "prefill_floor_ns",
    "decode_context_token_ns",
    "decode_session_ns",
    "decode_ns",
    "decode_lone_ns",
)
NOTHING_SEEN = -1.0

Hops = tuple[ChainHop, ...]


class LatencyRefit:
    """The latency lines of the chains of the plan in force.

    Invariant: `lines` returns for a chain what the dispatcher has, from the plan or a later event.
    """

    def __init__(
        self,
        cluster: ClusterController,
        deployments: Deployments,
        measured: MeasuredProfiles,
        slots: SlotLedger,
    ) -> None:
        self._cluster = cluster
        self._deployments = deployments
        self._measured = measured
        self._slots = slots
        self._refitted: dict[Hops, LatencyLines] = {}
        """Lines of chains that were fitted anew since the plan in force was made."""
        self._plan_id = ""
        self._shown: set[tuple[str, str, str]] = set()

    # ---- what happened ----

    def reported(
        self, agent: AgentId, partition: PartitionKey, work: WorkTotals, used_block_slots: int
    ) -> LatencyRefitted | None:
        """Takes a report in; returns the lines that changed by it, None if none did."""
        has_moved = self._measured.observe(agent, partition, work)
        self._note_slots(agent, partition, used_block_slots)
        return self._refit(partition.model, agent) if has_moved else None

    def relinked(self) -> list[LatencyRefitted]:
        """Takes in that links were measured to be other ones; returns the lines that changed."""
        active = self._cluster.active
        models = [model.model for model in active.plan.models if model.chains] if active else []
        return [refitted for model in models if (refitted := self._refit(model)) is not None]

    def _note_slots(self, agent: AgentId, partition: PartitionKey, used: int) -> None:
        """Compares the cache slots in use with the book.

        Sessions that come or go at that moment make the two differ.
        """
        observed = self._measured.observed_at(agent, partition)
        if observed is not None:
            observed.cache_errors.add(used, self._slots.cache(agent, partition).used)

    def _refit(self, model: ModelKey, agent: AgentId | None = None) -> LatencyRefitted | None:
        """Fits the lines of a model's chains anew: of those over one agent, or of all."""
        latency = self._latency()
        found: list[tuple[Hops, LatencyLines]] = []
        for chain in self._chains(model):
            if agent is not None and not any(hop.agent == agent for hop in chain.hops):
                continue
            lines = _known(latency, model, chain.hops)
            if lines is not None and lines != self.lines(chain):
                found.append((chain.hops, lines))
        self._forget_earlier_plan()
        self._refitted.update(found)
        if not found:
            return None
        _log.info("latency_refitted", model=str(model), agent=agent or "", chains=len(found))
        return LatencyRefitted(model, tuple(found))

    # ---- what is known ----

    def lines(self, chain: Chain) -> LatencyLines | None:
        """Returns the latest lines of a chain of the plan in force; None if there are none."""
        self._forget_earlier_plan()
        return self._refitted.get(chain.hops, chain.lines)

    def refreshed(self, plan: Plan) -> Plan:
        """Returns a plan, or the rest of one, with the latest lines.

        The same plan is dispatched by again when a switch holds some of it back, or lets it go.
        """
        self._forget_earlier_plan()
        if not self._refitted:
            return plan
        return replace(plan, models=tuple(self._with_lines(model) for model in plan.models))

    def errors(
        self, model: ModelKey, kind: str, agents: Container[AgentId] | None = None
    ) -> tuple[float, float]:
        """Returns the mean and the largest error of predictions; -1 where nothing was seen.

        Args:
            model: The model.
            kind: "prefill", "decode" or "cache".
            agents: The agents to take into account; None: all.
        """
        windows = [
            _KINDS[kind](observed)
            for agent, partition, observed in self._measured.observed()
            if partition.model == model and (agents is None or agent in agents)
        ]
        count = sum(len(window) for window in windows)
        if not count:
            return NOTHING_SEEN, NOTHING_SEEN
        mean = sum(len(window) * window.mean for window in windows) / count
        return mean, max(window.maximum for window in windows)

    def message(self, model: ModelKey, chain: Chain) -> admin_pb2.LatencyLines | None:
        """Returns a chain's lines in the form operators get; None if nothing is known."""
        lines = self.lines(chain)
        if lines is None:
            return None
        agents = {hop.agent for hop in chain.hops}
        return admin_pb2.LatencyLines(
            **{name: getattr(lines, name) for name in _COEFFICIENTS},
            prefill_error_ratio=self.errors(model, "prefill", agents)[0],
            decode_error_ratio=self.errors(model, "decode", agents)[0],
        )

    def export(self, metrics: Metrics) -> None:
        """Sets the gauges of latency lines and of prediction errors."""
        shown = set()
        active = self._cluster.active
        for model in active.plan.models if active is not None else ():
            for number, chain in enumerate(model.chains):
                lines = self.lines(chain)
                for name in _COEFFICIENTS if lines is not None else ():
                    labels = model.model.name, str(number), name
                    metrics.latency_lines.labels(*labels).set(getattr(lines, name))
                    shown.add(labels)
            for kind in _KINDS if model.chains else ():
                mean, largest = self.errors(model.model, kind)
                if mean >= 0.0:
                    metrics.prediction_error.labels(model.model.name, kind).set(mean)
                    metrics.prediction_error_max.labels(model.model.name, kind).set(largest)
        for gone in self._shown - shown:
            metrics.latency_lines.remove(*gone)
        self._shown = shown

    # ---- inside ----

    def _latency(self) -> ChainLatency:
        return latency_lines(self._deployments, self._measured, self._cluster.registry)

    def _chains(self, model: ModelKey) -> tuple[Chain, ...]:
        active = self._cluster.active
        plans = active.plan.models if active is not None else ()
        return next((each.chains for each in plans if each.model == model), ())

    def _with_lines(self, model: ModelPlan) -> ModelPlan:
        chains = tuple(replace(chain, lines=self.lines(chain)) for chain in model.chains)
        return replace(model, chains=chains)

    def _forget_earlier_plan(self) -> None:
        if self._plan_id != self._cluster.plan_id:
            self._plan_id = self._cluster.plan_id
            self._refitted.clear()


def _known(latency: ChainLatency, model: ModelKey, hops: Hops) -> LatencyLines | None:
    try:
        return latency(model, hops)
    except CatenaryError:  # the model is not deployed any more; its sessions end
        return None
