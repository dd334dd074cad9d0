"""What an operator can do to a running cluster: apply, deploy, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from catenary_protos.catenary.v1 import scheduler_pb2
from scheduler import targets
from scheduler.deployments import Wish
from scheduler.planning import Placement
from scheduler.plans import document_of, placement_of
from scheduler.term import Term
from services.domain.ids import AgentId
from services.errors import InvalidInput, Unavailable

_LOOK_S = 0.02


async def apply_plan(term: Term, text: str, timeout_s: float) -> str:
    """Makes a document the plan and returns its id once it is active; empty text: split evenly.

    Raises:
        InvalidInput: the document is wrong; nothing was changed.
        Unavailable: not active within `timeout_s`; it stays the plan and becomes active when it
            can. The message says what it waits for.
    """
    if not text.strip() or not document_of(text).get("models"):
        term.cluster.fixed = None
    else:
        placement = await placement_of(text, term.deployments)
        _check_boundaries(term, placement)
        term.cluster.fixed = placement
    term.cluster.reconcile(time.monotonic())

    def active() -> bool:
        present = term.cluster.active
        return present is not None and present.placement == term.cluster.target

    await _until(term, active, timeout_s, "the plan is not active yet")
    return term.cluster.plan_id


def _check_boundaries(term: Term, placement: Placement) -> None:
    """Partitions of one model that disagree on the type between them must never meet."""
    active = term.cluster.active
    served = {m.model: m.float16_boundaries for m in active.placement.models} if active else {}
    for index, model in enumerate(placement.models):
        if served.get(model.model, model.float16_boundaries) != model.float16_boundaries:
            raise InvalidInput(
                f"models[{index}].float16_boundaries", "cannot change while the model is served"
            )


async def deploy_model(term: Term, reference: str, wish: Wish, timeout_s: float) -> str:
    """Serves a model (or serves it differently) and returns the plan's id once it is ready.

    Raises:
        ModelNotFound: it is not in the repository.
        Unavailable: not ready within `timeout_s`; it will be when it can.
    """
    key = await term.deployments.deploy(reference, wish)
    term.cluster.reconcile(time.monotonic())

    def ready() -> bool:
        target, active = term.cluster.target, term.cluster.active
        current = active is not None and active.placement == target
        return current and term.is_ready(key)

    await _until(term, ready, timeout_s, f"{key} is not ready yet")
    return term.cluster.plan_id


async def drain_agent(term: Term, agent_id: AgentId, timeout_s: float) -> bool:
    """Takes an agent out of service; True once it has nothing left to do.

    It gets no new batches as soon as others can do its work, finishes what it has, and is then
    told. It is used again when it is restarted.

    Raises:
        InvalidInput: there is no such agent.
    """
    record = term.cluster.roster.get(agent_id)
    if record is None or record.session is None:
        raise InvalidInput("agent_id", f"{agent_id!r} is not connected")
    record.draining = True
    term.cluster.reconcile(time.monotonic())
    deadline_s = time.monotonic() + timeout_s
    while not _idle(term, agent_id):
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_LOOK_S)
    if record.session is not None:
        record.session.send(
            scheduler_pb2.SchedulerToAgentMessage(epoch=term.epoch, drain=scheduler_pb2.Drain())
        )
    return True


def _idle(term: Term, agent_id: AgentId) -> bool:
    active = term.cluster.active
    planned = active is not None and agent_id in targets.agents_of(active.placement)
    return not planned and not term.in_flight.uses_agent(agent_id)


async def _until(
    term: Term, condition: Callable[[], bool], timeout_s: float, otherwise: str
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            keys = term.deployments.ready
            reasons = [f"{key}: {term.cluster.reason(key)}" for key in keys if not
                       term.is_ready(key)]  # fmt: skip
            said = [otherwise, *reasons]
            raise Unavailable("; ".join(text for text in said if text))
        await term.changed(left_s)
