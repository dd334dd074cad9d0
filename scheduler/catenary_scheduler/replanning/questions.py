"""Answers what a model would get on devices of some classes, without touching the plan in force."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from catenary_scheduler.agents.deployments import Deployment, Deployments
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning.live import (
    ChainCluster,
    ChainLoad,
    LiveCluster,
    LiveModel,
    PlanningRules,
    SessionShape,
    origins,
    pooling_problem,
)
from catenary_scheduler.planning.search import PlanAnswer, SearchOrder
from catenary_scheduler.planning.search.question import (
    ChainQuestion,
    PlanQuestion,
    PoolQuestion,
    QuestionDevices,
    asked_devices,
    with_estimates,
)
from catenary_scheduler.scaling import SessionLoad
from catenary_scheduler.scaling.groups import (
    USUAL_DECISION_US,
    USUAL_LATENCY_MS,
    USUAL_WASTE_RATIO,
    divide,
    rate_within,
)
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.plan import Agent
from catenary_services.errors import InvalidInput, PlanInfeasible, Unavailable

_MEMORY_SHARE = 0.9
"""Share of a device's memory that a model which is alone on it may take."""
_RETRY_NS = 1_000_000_000

AnswerQuestion = Callable[[PlanQuestion, float], Awaitable[PlanAnswer]]
"""Answers a question within so many seconds."""


@dataclass(frozen=True, slots=True)
class PlanDemand:
    """A model, devices and a load that somebody asks about.

    Attributes:
        model: Name of the model.
        version: Its version; empty for the latest.
        gpus: Number of devices by class.
        order: What decides once the objectives are met.
        rate_per_s: Requests or sessions per second; 0 for what arrives now.
        prompt_tokens: Mean length of prompts; 0 for that of the sessions seen. So is the next.
        output_tokens: Mean length of answers.
    """

    model: str
    version: str
    gpus: Mapping[str, int]
    order: SearchOrder
    rate_per_s: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class QuestionRules:
    """The rules of the planner, which answers keep, too.

    Attributes:
        pools: Rules that pooled plans keep.
        chains: An empty cluster, with what an operator asked of all chains.
    """

    pools: PlanningRules
    chains: ChainCluster


class PlanQuestions:
    """Answers one question at a time.

    Args:
        deployments: The models, deployed or in the repository.
        measured: What agents measured.
        rules: The rules of the planner.
        answer: Answers a question beside the event loop.
        session_load: Returns the load of a model that generates text.
        decision_ns: Returns the time in which a scheduler decides on a request; 0 if unknown.
    """

    def __init__(
        self,
        deployments: Deployments,
        measured: MeasuredProfiles,
        rules: QuestionRules,
        answer: AnswerQuestion,
        session_load: Callable[[ModelKey], SessionLoad],
        decision_ns: Callable[[], float],
    ) -> None:
        self._deployments = deployments
        self._measured = measured
        self._rules = rules
        self._answer = answer
        self._session_load = session_load
        self._decision_ns = decision_ns
        self._is_busy = False

    async def ask(self, wanted: PlanDemand, present: Sequence[Agent], most_s: float) -> PlanAnswer:
        """Returns what the model would get, and what every other option would give.

        Args:
            wanted: The model, the devices and the load.
            present: The agents that are here.
            most_s: Longest time for an answer, in seconds.

        Raises:
            ModelNotFound: The model is not in the repository.
            InvalidInput: A class of devices is not known, or something else is wrong.
            PlanInfeasible: The devices cannot serve the model.
            Unavailable: Another question is being answered, or there was no answer in time.
        """
        if self._is_busy:
            raise Unavailable(
                "another question about a plan is being answered", retry_after_ns=_RETRY_NS
            )
        self._is_busy = True
        try:
            devices = asked_devices(wanted.gpus, self._measured.links.known.seen(present))
            deployment = await self._deployments.find(wanted.model, wanted.version)
            question = self._question(wanted, deployment, devices)
            answer = await self._answer(question, most_s)
            return _with_groups(answer, _load_of(question), self._decision_ns())
        finally:
            self._is_busy = False

    def _question(
        self, wanted: PlanDemand, deployment: Deployment, devices: QuestionDevices
    ) -> PlanQuestion:
        if deployment.decoder is not None:
            return self._of_chains(wanted, deployment, devices)
        return self._of_pools(wanted, deployment, devices)

    def _of_chains(
        self, wanted: PlanDemand, deployment: Deployment, devices: QuestionDevices
    ) -> ChainQuestion:
        model = deployment.for_planning()
        usual = self._session_load(model.key)
        shape = SessionShape(
            wanted.prompt_tokens or usual.prompt_tokens, wanted.output_tokens or usual.output_tokens
        )
        load = ChainLoad(model, wanted.rate_per_s or usual.rate_per_s, shape)
        measured, notes = with_estimates(model, devices, self._measured.generation())
        cluster = replace(
            self._rules.chains, agents=devices.agents, loads=(load,), measured=measured
        )
        note = (
            f"asked for {load.rate_per_s:.3g} sessions/s of {shape.prompt_tokens:.0f} and"
            f" {shape.output_tokens:.0f} tokens"
        )
        return ChainQuestion(cluster, wanted.order, (note, *notes))

    def _of_pools(
        self, wanted: PlanDemand, deployment: Deployment, devices: QuestionDevices
    ) -> PoolQuestion:
        if wanted.order is SearchOrder.FEWEST_GPUS and not wanted.rate_per_s:
            raise InvalidInput("rate_per_s", "the fewest GPUs are those that carry a load; name it")
        model = deployment.for_planning()
        times = devices.measured(self._measured.everything())
        cluster = LiveCluster(
            devices.agents, (LiveModel(model, deployment.profile),), times, _MEMORY_SHARE
        )
        served = devices.measured(dict.fromkeys(self._measured.served_places(), True))
        return PoolQuestion(
            cluster,
            pooling_problem(cluster, self._rules.pools),
            wanted.order,
            wanted.rate_per_s,
            self._rules.chains.survival_first,
            tuple(origins(cluster.profiled, cluster.groups, times, served)),
        )


def _load_of(question: PlanQuestion) -> float:
    """Returns the sessions or requests per second of a question; 0 for as much as there can be."""
    if isinstance(question, PoolQuestion):
        return question.rate_per_s
    (load,) = question.cluster.loads
    return load.rate_per_s


def _with_groups(answer: PlanAnswer, rate_per_s: float, decision_ns: float) -> PlanAnswer:
    """Returns an answer with the number of scheduler groups that its load needs (eq. 8)."""
    chosen = answer.options[0]
    if chosen.placement is None or chosen.figures is None:
        return answer
    rate = rate_per_s or chosen.figures.rate_per_s
    workers = len(chosen.placement.chains) or max(1, chosen.figures.gpus)
    decision_us = decision_ns / 1e3 or USUAL_DECISION_US
    most = rate_within(decision_us / 1e6, USUAL_LATENCY_MS / 1e3)
    known = "as this one does" if decision_ns else "which is assumed, as nobody has asked yet"
    said = (
        f"a scheduler that decides in {decision_us:.0f} us, {known}, takes {most:,.0f} requests/s"
    )
    try:
        groups = len(divide(workers, rate, USUAL_WASTE_RATIO, most).groups) if most else 0
    except PlanInfeasible as error:
        groups, said = 0, f"{said}; {error.message}"
    if groups:
        said += f"; {groups} scheduler group(s) are enough for {rate:,.3g}"
    return replace(answer, groups=groups, notes=(*answer.notes, said))
