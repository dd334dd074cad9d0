"""What a scheduler of thirty agents and five models would answer: for what must hold at that size."""

from __future__ import annotations

import random

from catenary_protos.catenary.v1 import admin_pb2

MACHINES = 15
AGENTS = 30
POOLED = ("efficientnet-lite0", "resnet-50", "yolo-v8")
GENERATING = ("smollm2-135m", "llama-3-8b")
MOST_BOOKINGS = 10_000
"""As real schedulers answer."""
SESSIONS_ONLY = "agent-29"
_BLOCKS = 32
_MILLISECOND = 1_000_000
_CLASSES = ("nvidia-l4", "nvidia-t4", "nvidia-p4")


def agent_name(number: int) -> str:
    return f"agent-{number}"


def status(seed: int = 1) -> admin_pb2.GetStatusResponse:
    """Agents of all states and classes; three models on pools, two on fourteen chains."""
    draw = random.Random(seed)
    answer = admin_pb2.GetStatusResponse(
        scheduler_id="scheduler-0",
        epoch=4,
        plan_id="plan-17",
        gateways=["gateway-t"],
        queued_requests=12,
        batches_in_flight=44,
        live_reservations=391,
        redis_connected=True,
        sessions_in_flight=57,
        moves_done=8,
        moves_failed=1,
        audits=240,
        leaks_mended=2,
    )
    for number in range(AGENTS):
        _add_agent(answer, number, draw)
    for at, name in enumerate(POOLED):
        model = answer.models.add(
            name=name, version="1", ready=True, pipelines=1, queued_requests=at * 2
        )
        served = model.pipelines_served.add(batch=8)
        first = at * 4
        for stage in range(2):
            names = [agent_name(first + 2 * stage + part) for part in range(2)]
            served.stages.add(first_block=stage * 5, last_block=stage * 5 + 5, agent_ids=names)
    for at, name in enumerate(GENERATING):
        _add_chains(answer, name, 12 + at * 9, draw)
    return answer


def _add_agent(answer: admin_pb2.GetStatusResponse, number: int, draw: random.Random) -> None:
    pooled = number < 12
    held = POOLED[number // 4] if pooled else GENERATING[int(number >= 21)]
    device = _CLASSES[number % len(_CLASSES)]
    memory = (24, 16, 8)[number % 3] << 30
    agent = answer.agents.add(
        agent_id=agent_name(number),
        device="cuda",
        device_class=device,
        state="lost" if number == 7 else "draining" if number == 19 else "ready",
        partitions=[f"{held}:1[0,5)"],
        memory_bytes=memory,
        virtual_level=1 + (number % 4 == 0),
        utilisation_ratio=draw.random(),
        device_id=f"GPU-{number // 2}",
        slowdown_ratio=draw.uniform(0.9, 1.4),
        batches=draw.randrange(4),
        server_id=f"node-{number % MACHINES}",
        used_memory_bytes=int(memory * draw.uniform(0.3, 0.97)),
    )
    if not pooled:
        agent.block_slots = 640
        agent.used_block_slots = draw.randrange(640)
        agent.most_block_tokens = 640 * 2048
        agent.cached_block_tokens = agent.used_block_slots * draw.randrange(2048)


def _add_chains(
    answer: admin_pb2.GetStatusResponse, name: str, first: int, draw: random.Random
) -> None:
    model = answer.models.add(
        name=name,
        version="1",
        ready=True,
        queued_requests=3,
        sessions=28,
        packing="pack",
        sessions_moving=1,
    )
    for chain in range(7):
        agents = [agent_name(first + (chain + hop) % 9) for hop in range(3)]
        cut = _BLOCKS // 3
        hops = [
            admin_pb2.ChainHopStatus(
                agent_id=agent, first_block=at * cut, last_block=(at + 1) * cut
            )
            for at, agent in enumerate(agents)
        ]
        model.chains.add(
            chain_id=f"{name}/{chain}",
            hops=hops,
            capacity=8,
            sessions=draw.randrange(9),
            service_ns=4 * 10**9,
            role="mixed",
            cache_tokens=16384,
            cached_tokens=draw.randrange(16384),
        )


def plan(seed: int = 1) -> admin_pb2.GetPlanResponse:
    answer = admin_pb2.GetPlanResponse(
        plan_json="{}",
        plan_id="plan-17",
        planner="pooled",
        explanation="\n".join(f"pipeline {at}: two pools of two agents" for at in range(12)),
        last_switch=admin_pb2.PlanSwitch(
            from_plan="plan-16",
            to_plan="plan-17",
            phase="done",
            cause="agent-7 was lost",
            duration_ns=1_900 * _MILLISECOND,
            downtime=[
                admin_pb2.ModelDowntime(model="yolo-v8", version="1", downtime_ns=84_000_000)
            ],
        ),
    )
    for at, name in enumerate(POOLED):
        answer.promises.add(
            model=name,
            version="1",
            throughput_per_s=180.0 - 40 * at,
            latency_ns=88 * _MILLISECOND,
            slo_ns=100 * _MILLISECOND,
            binds="compute of the second pool, 2 x nvidia-t4",
        )
    for name in GENERATING:
        answer.promises.add(
            model=name,
            version="1",
            sessions=56,
            response_lower_ns=3_900 * _MILLISECOND,
            response_upper_ns=5_200 * _MILLISECOND,
            binds="memory of caches",
        )
    return answer


def timelines(
    request: admin_pb2.GetTimelinesRequest, seed: int = 1
) -> admin_pb2.GetTimelinesResponse:
    """Some fifty bookings a second on every device, half as many on every link, up to the bound."""
    draw = random.Random(seed)
    owners = [("gpu", agent_name(at), 20) for at in range(AGENTS)]
    for kind in ("uplink", "downlink"):
        owners += [(kind, f"node-{at}", 40) for at in range(MACHINES)]
    per_s = sum(1000 / every_ms for _, _, every_ms in owners)
    back_ns = min(int(request.back_ns), int(MOST_BOOKINGS / per_s * 1e9))
    answer = admin_pb2.GetTimelinesResponse(truncated=back_ns < request.back_ns)
    for number, (kind, owner, every_ms) in enumerate(owners):
        resource = answer.resources.add(kind=kind, owner=owner)
        if owner == SESSIONS_ONLY:  # what sessions take is reported, and never booked
            label = f"{GENERATING[1]}:1"
            resource.bookings.add(model=label, real_start_ns=-back_ns, real_end_ns=-back_ns // 2)
            continue
        for batch, start_ns in enumerate(
            range(-back_ns, 200 * _MILLISECOND, every_ms * _MILLISECOND)
        ):
            length_ns = int(every_ms * draw.uniform(0.3, 0.8) * _MILLISECOND)
            booking = resource.bookings.add(
                batch_id=(4 << 40) + 1000 * number + batch,
                model=f"{POOLED[number // 4 % 3]}:1",
                rows=1 + batch % 8,
                booked_start_ns=start_ns,
                booked_end_ns=start_ns + length_ns,
            )
            if start_ns + length_ns < 0:
                booking.real_start_ns = start_ns + draw.randrange(2 * _MILLISECOND)
                taken_ns = int(length_ns * draw.uniform(0.85, 1.15))
                booking.real_end_ns = booking.real_start_ns + taken_ns
    return answer


def sessions() -> admin_pb2.ListSessionsResponse:
    hops = [admin_pb2.ChainHopStatus(agent_id="agent-12", last_block=_BLOCKS)]
    return admin_pb2.ListSessionsResponse(
        sessions=[
            admin_pb2.SessionStatus(
                session_id=(4 << 40) + at,
                gateway_id="gateway-t" if at % 2 else "gateway-u",
                request_number=at,
                model=GENERATING[at % 2],
                version="1",
                chain_id=f"{GENERATING[at % 2]}/{at % 7}",
                hops=hops,
                tokens=100 + 31 * at,
                moving_to=f"{GENERATING[at % 2]}/3" if at == 5 else "",
                moving_by="kv" if at == 5 else "",
                generates=at % 9 != 0,
            )
            for at in range(57)
        ]
    )


def story(request: admin_pb2.GetStoryRequest) -> admin_pb2.GetStoryResponse:
    """What happened to a session that moved once."""
    old, new = request.session_id or 4 << 40, (request.session_id or 4 << 40) + 1
    steps = (
        ("SessionRequested", 0, "new", "waiting", "arrived", ""),
        ("SessionRequested", 0, "waiting", "running", "placed", "smollm2-135m/1"),
        ("SessionRequested", old, "new", "starting", "started", "smollm2-135m/1"),
        ("SessionsProgressed", old, "starting", "decoding", "first token", ""),
        ("MoveRequested", new, "new", "migrating in", "reserved for a move", "smollm2-135m/2"),
        ("MoveRequested", old, "decoding", "migrating out", "move began", "requested"),
        ("SessionMoved", new, "migrating in", "starting", "took over", f"from {old}"),
        ("SessionMoved", old, "migrating out", "closing", "moved away", f"to {new}"),
    )
    return admin_pb2.GetStoryResponse(
        changes=[
            admin_pb2.StateChange(
                ago_ns=(len(steps) - at) * 10**8,
                event=40 + at,
                event_kind=kind,
                session_id=session,
                before=before,
                after=after,
                name=name,
                why=why,
                answers=44 if kind == "SessionMoved" else 0,
            )
            for at, (kind, session, before, after, name, why) in enumerate(steps)
        ]
    )


def answers() -> dict[str, object]:
    """For `ScriptedScheduler.answers`."""
    return {
        "GetStatus": lambda _: status(),
        "GetPlan": lambda _: plan(),
        "GetTimelines": timelines,
        "ListSessions": lambda _: sessions(),
        "GetStory": story,
    }
