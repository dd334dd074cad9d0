"""Collects the statistics of a model's workers that scaling decisions are based on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.dispatch import CombinedDispatcher
from catenary_scheduler.dispatch.events import LatencyRefitted
from catenary_scheduler.inflight.not_ready_queue import NotReadyQueue
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.planning import requirements
from catenary_scheduler.scaling import ModelWorkers, SessionLengths, WorkerStatistics
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import AgentId, ModelKey
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import Chain, ChainHop, ModelPlan

_UNLIMITED = 1_000_000


@dataclass(frozen=True, slots=True)
class WorkerDeps:
    """The parts of a term from which worker statistics are collected."""

    settings: SchedulerSettings
    cluster: ClusterController
    dispatcher: CombinedDispatcher
    live: LiveSessions
    waiting: NotReadyQueue


class StatisticsCollector:
    """Collects the statistics of models that generate text."""

    def __init__(self, deps: WorkerDeps) -> None:
        self._deps = deps
        self._refits: dict[ModelKey, dict[tuple[ChainHop, ...], LatencyLines]] = {}
        """Latency lines of chains, by model, that were fitted anew since the plan was made."""

    def refitted(self, event: LatencyRefitted) -> None:
        """Replaces the lines of a model's chains by newly fitted ones."""
        self._refits[event.model] = dict(event.lines)

    def plans(self) -> list[ModelPlan]:
        """Returns the active plans of the models that generate text."""
        active = self._deps.cluster.active
        return [model for model in active.plan.models if workers_of(model)] if active else []

    def others(self, workers_of_models: Iterable[ModelWorkers]) -> set[AgentId]:
        """Returns the agents that are needed for anything but the workers of these models."""
        active = self._deps.cluster.active
        generating = {
            agent for model_workers in workers_of_models for agent in model_workers.agents
        }
        return requirements.agents_of(active.placement) - generating if active else set()

    def of(self, plan: ModelPlan) -> WorkerStatistics:
        """Returns the statistics of a model's workers at this moment."""
        deps, settings = self._deps, self._deps.settings
        workers = workers_of(plan)
        expected = SessionLengths(settings.expected_prompt_tokens, settings.expected_output_tokens)
        queued = deps.waiting.count(plan.model) + deps.dispatcher.chained.queued(plan.model)
        return WorkerStatistics(
            workers=len(workers),
            sessions=deps.live.by_model()[plan.model],
            slots=sum(sessions_of(each, plan.session_tokens, expected) for each in workers),
            queued=queued,
            forced=deps.dispatcher.statistics().get("forced_placements", 0),
            lines=self._lines(plan.model, workers),
            service_ns=workers[0].service_ns,
            objectives=plan.objectives,
            least=1,
            most=self._most(plan),
            expected=expected,
            packed=deps.dispatcher.chained.chains_needed(plan.model),
        )

    def _lines(self, model: ModelKey, workers: list[Chain]) -> LatencyLines | None:
        """Returns the latest lines of the first worker that has any; None if none has."""
        refits = self._refits.get(model, {})
        for chain in workers:
            lines = refits.get(chain.hops, chain.lines)
            if lines is not None:
                return _without_prompts(lines, chain)
        return None

    def _most(self, plan: ModelPlan) -> int:
        """Returns how many workers of a model fit on the agents that other models leave."""
        if not self._deps.settings.max_agents:
            return _UNLIMITED
        model_workers = model_workers_of(plan)
        left = self._deps.settings.max_agents - len(self.others([model_workers]))
        return max(1, left * len(model_workers.workers) // len(model_workers.agents))


def workers_of(plan: ModelPlan) -> list[Chain]:
    """Returns the chains that generate tokens, without those that only run prompts."""
    return [chain for chain in plan.chains if chain.role != "prefill"]


def sessions_of(chain: Chain, session_tokens: int, expected: SessionLengths) -> int:
    """Returns how many sessions a chain has room for: less than its slots if its cache is small.

    Args:
        chain: The chain.
        session_tokens: Largest number of tokens of a session.
        expected: Lengths of a usual session.
    """
    if not 0 < chain.cache_tokens < chain.capacity * session_tokens:
        return chain.capacity
    fitting = int(chain.cache_tokens / (expected.prompt_tokens + expected.answer_tokens))
    return max(1, min(chain.capacity, fitting))


def _without_prompts(lines: LatencyLines, chain: Chain) -> LatencyLines:
    """Returns a chain's lines without prompts if, in the split phase, another chain runs them."""
    if chain.role != "decode":
        return lines
    return replace(lines, prefill_token_ns=0.0, prefill_ns=0.0, prefill_floor_ns=0.0)


def model_workers_of(plan: ModelPlan, wanted: int = 0) -> ModelWorkers:
    """Returns the workers of a model and how many there should be; 0: as many as there are."""
    workers = [frozenset(hop.agent for hop in chain.hops) for chain in workers_of(plan)]
    return ModelWorkers(workers, wanted or len(workers))
