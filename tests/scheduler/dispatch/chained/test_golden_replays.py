"""The replays of `tests/data/chain/golden.json`: the same chains, waits and responses, to the last tie."""

from __future__ import annotations

import heapq
import json
from typing import Any

import pytest

from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    Command,
    Event,
    PlanActivated,
    RequestCompleted,
    SessionRequested,
    SessionsClosed,
    StartSession,
)
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.plan import Agent, Chain, ChainHop, ModelPlan, Plan
from reference_data import reference

MODEL = ModelKey("golden", "1")
TICKS_PER_SECOND = 10**9


def traces() -> list[Any]:
    golden = json.loads(reference("chain/golden.json").read_text())
    return [pytest.param(trace, id=trace["name"]) for trace in golden["jffc_traces"]]


class Replay:
    """One agent per chain; a job on a chain of rate mu takes its size over mu."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self.trace = trace
        self.dispatcher = ChainedDispatcher(ChainedConfig(checked=True))
        self.chain: list[int] = [-1] * len(trace["arrivals"])
        self.start: list[float] = [0.0] * len(trace["arrivals"])
        self.end: list[float] = [0.0] * len(trace["arrivals"])
        self.events: list[tuple[float, int, int, int, StartSession | None]] = []
        partition = PartitionKey(MODEL, 0, 3)
        chains = []
        for k, server in enumerate(trace["job_servers"]):
            agent = AgentId(f"a{k}")
            self.tell(AgentJoined(Agent(agent, "x", ServerId("s"), 1, 1)), 0.0)
            hop = ChainHop(agent, partition, 0, 3)
            service = round(TICKS_PER_SECOND / server["rate"])
            chains.append(Chain(str(k), (hop,), server["capacity"], service))
        model = ModelPlan(MODEL, 1, (), chains=tuple(chains))
        self.tell(PlanActivated(Plan(PlanId("p"), (model,))), 0.0)

    def tell(self, event: Event, now: float) -> None:
        for command in self.dispatcher.handle(event, round(now * TICKS_PER_SECOND)):
            self.obey(command, now)

    def obey(self, command: Command, now: float) -> None:
        if not isinstance(command, StartSession):
            return
        job = command.request.number
        k = int(command.chain_id)
        self.chain[job], self.start[job] = k, now
        self.end[job] = now + self.trace["sizes"][job] / self.trace["job_servers"][k]["rate"]
        heapq.heappush(self.events, (self.end[job], 0, job, k, command))

    def run(self) -> None:
        for job, arrival in enumerate(self.trace["arrivals"]):
            heapq.heappush(self.events, (arrival, 1, job, -1, None))
        while self.events:
            now, _, job, k, started = heapq.heappop(self.events)
            request = RequestId(GatewayId("g"), job)
            if started is None:
                self.tell(SessionRequested(request, MODEL, 1, 1, 10**18), now)
            else:
                self.tell(SessionsClosed(AgentId(f"a{k}"), (started.session,)), now)
                self.tell(RequestCompleted(request), now)


@pytest.mark.parametrize("trace", traces())
def test_a_replay_matches_the_reference(trace: dict[str, Any]) -> None:
    replay = Replay(trace)
    replay.run()
    assert replay.chain == trace["chain"]
    waits = [
        start - arrival for start, arrival in zip(replay.start, trace["arrivals"], strict=True)
    ]
    responses = [end - arrival for end, arrival in zip(replay.end, trace["arrivals"], strict=True)]
    assert waits == pytest.approx(trace["wait"], abs=1e-9)
    assert responses == pytest.approx(trace["response"], abs=1e-9)
    assert replay.dispatcher.snapshot() == []
    assert replay.dispatcher.next_wakeup() is None
