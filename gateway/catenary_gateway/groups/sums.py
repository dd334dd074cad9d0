"""Joint statuses, plans and advice of several scheduler groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import InvalidInput

HasPlan = admin_pb2.DeployModelResponse | admin_pb2.ApplyPlanResponse
_Status = admin_pb2.GetStatusResponse


def joint_status(statuses: Mapping[int, _Status], groups: int) -> _Status:
    """Returns the joint status of the groups that answered.

    Figures are summed; names and plans are listed. A group that did not answer is listed without a
    scheduler.
    """
    each = [status for _, status in sorted(statuses.items())]
    joint = _Status(
        scheduler_id=_row(status.scheduler_id for status in each),
        epoch=max((status.epoch for status in each), default=0),
        plan_id=_row(status.plan_id for status in each),
        gateways=sorted({name for status in each for name in status.gateways}),
        queued_requests=sum(status.queued_requests for status in each),
        batches_in_flight=sum(status.batches_in_flight for status in each),
        live_reservations=sum(status.live_reservations for status in each),
        redis_connected=all(status.redis_connected for status in each),
        redis_problem=next((s.redis_problem for s in each if s.redis_problem), ""),
        sessions_in_flight=sum(status.sessions_in_flight for status in each),
        moves_done=sum(status.moves_done for status in each),
        moves_failed=sum(status.moves_failed for status in each),
        audits=sum(status.audits for status in each),
        leaks_mended=sum(status.leaks_mended for status in each),
        takeover_problems=[text for status in each for text in status.takeover_problems],
        quarantined_records=sum(status.quarantined_records for status in each),
    )
    models: dict[tuple[str, str], admin_pb2.ModelStatus] = {}
    for group in range(groups):
        status = statuses.get(group)
        if status is None:
            joint.groups.add(group=group)
            continue
        joint.groups.append(_group_status(group, status))
        joint.agents.extend(status.agents)
        joint.links.extend(status.links)
        joint.versions.extend(each for each in status.versions if each not in joint.versions)
        for model in status.models:
            known = models.get((model.name, model.version))
            if known is None:
                known = models[model.name, model.version] = joint.models.add(
                    name=model.name, version=model.version, attainment_ratio=-1
                )
            _add_model(known, model, group)
    return joint


def joint_plan(plans: Mapping[int, admin_pb2.GetPlanResponse]) -> admin_pb2.GetPlanResponse:
    """Returns the plans of all groups: documents by group, and explanations joined."""
    each = sorted(plans.items())
    documents = {str(group): json.loads(plan.plan_json) for group, plan in each}
    texts = [f"scheduler group {group}\n{plan.explanation}" for group, plan in each]
    joint = admin_pb2.GetPlanResponse(
        plan_json=json.dumps({"groups": documents}, indent=2),
        explanation="\n\n".join(texts),
        plan_id=_row(plan.plan_id for _, plan in each),
        planner=_row(plan.planner for _, plan in each),
    )
    switched = [plan for _, plan in each if plan.HasField("last_switch")]
    for _, plan in each:
        joint.promises.extend(plan.promises)  # a model in two groups has a promise in each
    if switched:
        # A switch under way or failed tells more than one that is done.
        joint.last_switch.CopyFrom(
            min(switched, key=lambda plan: plan.last_switch.phase == "done").last_switch
        )
    return joint


def joint_sessions(
    lists: Mapping[int, admin_pb2.ListSessionsResponse],
) -> admin_pb2.ListSessionsResponse:
    """Returns the sessions of all groups, with names of chains as in `joint_status`."""
    joint = admin_pb2.ListSessionsResponse()
    for group, answer in sorted(lists.items()):
        for session in answer.sessions:
            added = joint.sessions.add()
            added.CopyFrom(session)
            added.group = group
            if session.chain_id:
                added.chain_id = f"{group}/{session.chain_id}"
            if session.moving_to:
                added.moving_to = f"{group}/{session.moving_to}"
    return joint


def joint_timelines(
    answers: Mapping[int, admin_pb2.GetTimelinesResponse],
) -> admin_pb2.GetTimelinesResponse:
    """Returns the devices and links of all groups; a link that two groups share is listed twice."""
    joint = admin_pb2.GetTimelinesResponse(
        truncated=any(answer.truncated for answer in answers.values())
    )
    for group, answer in sorted(answers.items()):
        for resource in answer.resources:
            added = joint.resources.add()
            added.CopyFrom(resource)
            added.group = group
    return joint


def plans_by_group(plan_json: str, groups: int) -> dict[int, str]:
    """Returns the plan documents by group from a plan in the form of `joint_plan`.

    Raises:
        InvalidInput: The document is not JSON, not by group, or names a group that does not exist.
    """
    try:
        document = json.loads(plan_json)
    except ValueError as error:
        raise InvalidInput("plan_json", f"is not JSON: {error}") from None
    parts = document.get("groups") if isinstance(document, dict) else None
    if not isinstance(parts, dict) or not parts:
        raise InvalidInput(
            "plan_json", 'needs a plan by scheduler group: {"groups": {"0": {"models": [...]}}}'
        )
    known = {str(group): group for group in range(groups)}
    unknown = sorted(parts.keys() - known.keys())
    if unknown:
        raise InvalidInput(f"groups.{unknown[0]}", f"there are groups 0 to {groups - 1}")
    return {known[name]: json.dumps(part) for name, part in parts.items()}


def joint_ids(answers: Iterable[HasPlan]) -> str:
    """Returns the plan ids in several groups' answers, joined by commas."""
    return _row(answer.plan_id for answer in answers)


def joint_replan(answers: Sequence[admin_pb2.ReplanResponse]) -> admin_pb2.ReplanResponse:
    """Returns the joint answer of several groups: changed if any group has a new plan."""
    joint = admin_pb2.ReplanResponse(
        plan_id=_row(answer.plan_id for answer in answers),
        changed=any(answer.changed for answer in answers),
    )
    for answer in answers:
        if answer.HasField("plan_switch"):
            joint.plan_switch.CopyFrom(answer.plan_switch)
    return joint


def joint_advice(advices: Sequence[admin_pb2.ScalingAdvice]) -> admin_pb2.ScalingAdvice:
    """Returns the joint advice: sums over all groups, and attainment weighted by arrivals."""
    joint = admin_pb2.ScalingAdvice(
        agents_wanted=sum(advice.agents_wanted for advice in advices),
        agents_now=sum(advice.agents_now for advice in advices),
        retiring=[agent for advice in advices for agent in advice.retiring],
        drains_agents=all(advice.drains_agents for advice in advices),
    )
    models: dict[tuple[str, str], list[admin_pb2.ModelScaling]] = {}
    for advice in advices:
        for model in advice.models:
            models.setdefault((model.model, model.version), []).append(model)
    for (name, version), parts in models.items():
        rate = sum(part.arrivals_per_s for part in parts)
        # Attainment of each group is weighted by its arrivals.
        weights = [part.arrivals_per_s for part in parts] if rate > 0 else [1.0] * len(parts)
        met = sum(w * part.attainment_ratio for w, part in zip(weights, parts, strict=True))
        joint.models.add(
            model=name,
            version=version,
            workers_wanted=sum(part.workers_wanted for part in parts),
            workers_now=sum(part.workers_now for part in parts),
            arrivals_per_s=rate,
            attainment_ratio=met / sum(weights),
            reason=_row((part.reason for part in parts), "; "),
        )
    return joint


def _group_status(group: int, status: _Status) -> admin_pb2.GroupStatus:
    return admin_pb2.GroupStatus(
        group=group,
        scheduler_id=status.scheduler_id,
        epoch=status.epoch,
        plan_id=status.plan_id,
        agents=sum(agent.state == "ready" for agent in status.agents),
        queued_requests=status.queued_requests,
        batches_in_flight=status.batches_in_flight,
        sessions_in_flight=status.sessions_in_flight,
        redis_connected=status.redis_connected,
    )


def _add_model(joint: admin_pb2.ModelStatus, part: admin_pb2.ModelStatus, group: int) -> None:
    joint.ready = joint.ready or part.ready
    if part.reason:
        joint.reason = _row([joint.reason, f"group {group}: {part.reason}"], "; ")
    joint.pipelines += part.pipelines
    joint.queued_requests += part.queued_requests
    joint.sessions += part.sessions
    joint.packing = _row([joint.packing, part.packing])
    joint.sessions_moving += part.sessions_moving
    joint.pipelines_served.extend(part.pipelines_served)
    if part.attainment_ratio >= 0:  # the lowest; gateways replace it by their own measurement
        known = joint.attainment_ratio
        joint.attainment_ratio = (
            min(known, part.attainment_ratio) if known >= 0 else (part.attainment_ratio)
        )
    for chain in part.chains:
        added = joint.chains.add()
        added.CopyFrom(chain)
        added.chain_id = f"{group}/{chain.chain_id}"  # plans of different groups use the same names


def _row(texts: Iterable[str], between: str = ", ") -> str:
    """Returns the distinct texts that are not empty, in order, joined by `between`."""
    return between.join(dict.fromkeys(text for text in texts if text))
