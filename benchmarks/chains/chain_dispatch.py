"""Cost of choosing a chain: join-the-fastest-free-chain over 100 and 1,000 chains.

A chain has three agents and up to eight sessions; service times are spread tenfold. A decision
takes the head of the queue, chooses its chain, checks and books the slots on its three agents, and
orders the session. `handle` is the whole cost of an arrival: admission, queue, decision, command.
Sessions run in virtual time and end as in service: each agent reports it, then the gateway. Times
are CPU time of the thread.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.virtual_time import Trial, decision_us
from catenary_lab.limits import Figure, at_least, at_most
from catenary_scheduler.dispatch.chained import ChainedDispatcher
from catenary_scheduler.dispatch.chained import dispatcher as compiled_part
from catenary_scheduler.dispatch.events import (
    Command,
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

LIMIT_P50_US = 5.0
LIMIT_GROWTH = 2.0
MODEL = ModelKey("bench", "1")
HOPS = 3
BLOCKS = 10
BUDGET_NS = 600 * 10**9


def cluster(chains: int, seed: int = 1) -> tuple[list[Agent], Plan]:
    """Returns agents, and a plan with `chains` chains over them."""
    draw = random.Random(seed)
    agents, found = [], []
    for k in range(chains):
        hops = []
        for position in range(HOPS):
            name = AgentId(f"a{k:05}.{position}")
            agents.append(Agent(name, "bench", ServerId(name), 1, 1))
            first, last = position * BLOCKS, (position + 1) * BLOCKS
            hops.append(ChainHop(name, PartitionKey(MODEL, first, last), first, last))
        service = round(10**9 * draw.uniform(1, 10))
        found.append(Chain(f"c{k}", tuple(hops), draw.randint(1, 8), service))
    model = ModelPlan(MODEL, 10**9, (), chains=tuple(found))
    return agents, Plan(PlanId("bench"), (model,))


class Run(Trial[ChainedDispatcher]):
    """A dispatcher in virtual time, with the real times of `handle`."""

    def __init__(self, chains: int, load: float) -> None:
        agents, plan = cluster(chains)
        super().__init__(ChainedDispatcher(stopwatch=time.thread_time_ns), agents, plan)
        self.chains = {chain.chain_id: chain for chain in plan.models[0].chains}
        rate = sum(chain.capacity / chain.service_ns for chain in self.chains.values())
        self.gap = 1 / (rate * load)
        self.arrival_us: list[float] = []
        self.end_us: list[float] = []

    def carry_out(self, command: Command, now: int) -> None:
        """Runs a session as the agents would."""
        if isinstance(command, StartSession):
            mean = self.chains[command.chain_id].service_ns
            end = now + round(mean * self.random.expovariate(1))
            for hop in reversed(command.hops):
                self.later(end, SessionsClosed(hop.agent, (command.session,)))
            self.later(end, RequestCompleted(command.request))

    def go(self, arrivals: int, warm_up: int) -> None:
        """Lets requests arrive and all end; figures start after `warm_up` arrivals."""
        moment = 0.0
        for number in range(arrivals):
            moment += self.random.expovariate(1 / self.gap)
            request = RequestId(GatewayId("g"), number)
            deadline = round(moment) + BUDGET_NS
            self.later(round(moment), SessionRequested(request, MODEL, 100, 100, deadline))
        seen = 0
        for event, now, commands, took in self.handled():
            if isinstance(event, SessionRequested):
                seen += 1
                if seen == warm_up:
                    self.dispatcher.take_decision_times()
                if seen > warm_up:
                    self.arrival_us.append(took)
            elif isinstance(event, SessionsClosed) and seen > warm_up:
                self.end_us.append(took)
            for command in commands:
                self.carry_out(command, now)


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    steady = 3000 if quick else 12_000
    compiled = not compiled_part.__file__.endswith(".py")
    results = [at_least("compiled modules in use", float(compiled), "", 1)]
    for label, load in (("50 % busy", 0.5), ("95 % busy", 0.95), ("20 % overload", 1.2)):
        medians = []
        for chains in (100, 1000):
            trial = Run(chains, load)
            warm_up = 8 * chains
            trial.go(warm_up + steady, warm_up)
            p50, p99 = decision_us(trial.dispatcher)
            medians.append(p50)
        results += [
            at_most(f"decision p50, 1,000 chains, {label}", p50, "us", LIMIT_P50_US),
            at_most(f"decision p99, 1,000 chains, {label}", p99, "us"),
            at_most(
                f"decision p50, 1,000 / 100 chains, {label}",
                medians[1] / medians[0],
                "x",
                LIMIT_GROWTH,
            ),
            at_most(f"handle an arrival p50, {label}", statistics.median(trial.arrival_us), "us"),
            at_most(f"handle an end p50, {label}", statistics.median(trial.end_us), "us"),
        ]
    return results
