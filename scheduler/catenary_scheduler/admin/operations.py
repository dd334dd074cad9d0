"""Operations on a running cluster: plans, deployments, and agents that are drained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from catenary_scheduler.agents.registry import is_draining
from catenary_scheduler.cluster.plan_documents import document_of, placement_of
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.planning import Placement
from catenary_scheduler.rollout.report import RolloutReport
from catenary_scheduler.rollout.rollout import RolloutPhase
from catenary_scheduler.storage.values.stored import DeploymentSpec
from catenary_services.domain.ids import AgentId, ModelKey
from catenary_services.errors import InvalidInput, ModelNotFound, PlanInfeasible, Unavailable
from catenary_services.models.model_repository import did_you_mean

_LOOK_S = 0.02


async def apply_plan(leader: LeaderRuntime, text: str, timeout_s: float) -> str:
    """Makes a document the plan and returns the plan's id once it is in force.

    Empty text, or a document without models, has the planner decide anew.

    Raises:
        InvalidInput: The document is wrong; nothing was changed.
        PlanInfeasible: The change of plan was rolled back; the message says why.
        Unavailable: The plan is not in force within `timeout_s`. Until the change of plan is given
            up it stays the plan and comes into force when it can. The message says what it waits
            for.
    """
    if not text.strip() or not document_of(text).get("models"):
        return await replan(leader, timeout_s)
    placement = await placement_of(text, leader.deployments)
    _check_boundaries(leader, placement)
    leader.cluster.fix(placement)
    before = leader.cluster.last_switch
    leader.cluster.reconcile(time.monotonic())

    def decided() -> bool:
        given_up = leader.cluster.desired.fixed is not placement and not leader.cluster.is_switching
        return leader.cluster.is_settled or given_up

    await _until(leader, decided, timeout_s, "the plan is not active yet")
    _raise_if_rolled_back(leader, before)
    if leader.cluster.desired.fixed is not placement:
        raise PlanInfeasible("another plan took its place")
    return leader.cluster.plan_id


async def replan(leader: LeaderRuntime, timeout_s: float) -> str:
    """Has the planner decide anew, in place of a plan given by an operator; returns the plan's id.

    Raises:
        PlanInfeasible: The change of plan was rolled back; the message says why.
        Unavailable: The plan is not in force within `timeout_s`; it will be when it can.
    """
    cluster, planner = leader.cluster, leader.planner
    cluster.fix(None)
    planner.ask("it was asked for by hand")
    asked = planner.answers
    before = cluster.last_switch
    cluster.reconcile(time.monotonic())

    def decided() -> bool:
        given_up = cluster.last_switch is not before and not cluster.is_switching
        return planner.answers > asked and (cluster.is_settled or given_up)

    await _until(leader, decided, timeout_s, "the plan is not active yet")
    _raise_if_rolled_back(leader, before)
    return cluster.plan_id


def _raise_if_rolled_back(leader: LeaderRuntime, before: RolloutReport | None) -> None:
    last = leader.cluster.last_switch
    if last is not before and last is not None and last.phase is RolloutPhase.ROLLED_BACK:
        raise PlanInfeasible(f"{last.from_plan} stays in force: {last.problem}")


def _check_boundaries(leader: LeaderRuntime, placement: Placement) -> None:
    """Refuses a placement that changes the type of a served model's feature maps.

    Partitions of one model that disagree on the type between them must never meet.

    Raises:
        InvalidInput: A served model has another `float16_boundaries`.
    """
    active = leader.cluster.active
    served = {m.model: m.float16_boundaries for m in active.placement.models} if active else {}
    for index, model in enumerate(placement.models):
        if served.get(model.model, model.float16_boundaries) != model.float16_boundaries:
            raise InvalidInput(
                f"models[{index}].float16_boundaries", "cannot change while the model is served"
            )


async def deploy_model(
    leader: LeaderRuntime, reference: str, spec: DeploymentSpec, timeout_s: float
) -> str:
    """Serves a model, or serves it differently, and returns the plan's id once the model is ready.

    Raises:
        ModelNotFound: The model is not in the repository.
        Unavailable: The model is not ready within `timeout_s`; it will be when it can.
    """
    key = await leader.deployments.deploy(reference, spec)
    leader.cluster.reconcile(time.monotonic())

    def ready() -> bool:
        is_planned = leader.cluster.desired.fixed is not None or not leader.planner.is_thinking
        return is_planned and leader.cluster.is_settled and leader.cluster.is_ready(key)

    await _until(leader, ready, timeout_s, f"{key} is not ready yet")
    return leader.cluster.plan_id


async def undeploy_model(
    leader: LeaderRuntime, name: str, version: str, timeout_s: float
) -> tuple[ModelKey, str]:
    """Serves a model no longer, and returns its key and the id of the plan without it.

    New requests are refused at once; what runs is finished.

    Raises:
        ModelNotFound: The model is not deployed.
        InvalidInput: Several versions are deployed and none is named, or a plan that was applied by
            hand names the model.
        Unavailable: The plan without it is not in force within `timeout_s`; it will be when it can.
    """
    deployments, cluster = leader.deployments, leader.cluster
    found = [key for key in deployments.ready if key.name == name and version in ("", key.version)]
    if not found:
        wanted = f"{name}:{version}" if version else name
        known = {key.name for key in deployments.ready} | {str(key) for key in deployments.ready}
        guess = did_you_mean(wanted, known)
        raise ModelNotFound(f"model {wanted!r} is not deployed{guess}")
    if len(found) > 1:
        versions = ", ".join(sorted(key.version for key in found))
        raise InvalidInput("version", f"{name!r} is deployed in the versions {versions}: name one")
    key = found[0]
    fixed = cluster.desired.fixed
    if fixed is not None and any(model.model == key for model in fixed.models):
        raise InvalidInput(
            "model",
            f"{key} is in the plan applied by hand: apply one without it, or replan",
        )
    deployments.withdraw(key, time.time())
    leader.note("model_undeployed", {"model": str(key)})
    cluster.reconcile(time.monotonic())

    def gone() -> bool:
        active = cluster.active
        is_planned = active is not None and any(m.model == key for m in active.plan.models)
        return not is_planned and not cluster.is_switching

    await _until(leader, gone, timeout_s, f"{key} is still in the plan")
    return key, cluster.plan_id


def undrain_agent(leader: LeaderRuntime, agent_id: AgentId) -> None:
    """Uses an agent again that was drained, or is being drained.

    Raises:
        InvalidInput: No such agent is connected, it is not drained, or it is about to stop by
            itself.
    """
    record = leader.cluster.registry.get(agent_id)
    if record is None or record.session is None:
        known = {name for name, each in leader.cluster.registry.items() if each.session is not None}
        guess = did_you_mean(agent_id, known)
        raise InvalidInput("agent_id", f"{agent_id!r} is not connected{guess}")
    if not is_draining(agent_id, leader.availability):
        raise InvalidInput("agent_id", f"{agent_id!r} is not drained")
    if record.is_stopping:
        raise InvalidInput("agent_id", f"{agent_id!r} is about to stop: start it again")
    leader.draining.take_back(agent_id)


async def drain_agent(leader: LeaderRuntime, agent_id: AgentId, timeout_s: float) -> bool:
    """Takes an agent out of service; True once it has nothing left to do, False after `timeout_s`.

    The agent gets no new batches and sessions as soon as others can do its work. Running sessions
    move to other chains as these have room. The agent finishes the rest, and is then told that it
    is drained. It is used again when it is restarted, or taken back.

    Raises:
        InvalidInput: No such agent is connected.
    """
    record = leader.cluster.registry.get(agent_id)
    if record is None or record.session is None:
        raise InvalidInput("agent_id", f"{agent_id!r} is not connected")
    leader.draining.begin(agent_id)
    deadline_s = time.monotonic() + timeout_s
    while not leader.draining.is_idle(agent_id):
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_LOOK_S)
    leader.draining.tell_drained(agent_id)
    return True


async def _until(
    leader: LeaderRuntime, condition: Callable[[], bool], timeout_s: float, otherwise: str
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            keys = leader.deployments.ready
            reasons = [
                f"{key}: {leader.cluster.reason(key)}"
                for key in keys
                if not leader.cluster.is_ready(key)
            ]
            said = [otherwise, *reasons]
            raise Unavailable("; ".join(text for text in said if text))
        await leader.announcer.changed(left_s)
