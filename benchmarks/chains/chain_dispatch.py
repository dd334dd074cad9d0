"""Cost of choosing a chain: the policies "jffc" and "least-time" over 100 and 1,000 chains.

"least-time" is timed with latency lines, which it predicts by, and without, where it takes the
fastest free chain as the other one does. A chain has three agents and up to eight sessions; service
times are spread tenfold. A decision takes the head of the queue, chooses its chain, checks and
books the slots on its three agents, and orders the session. `handle` is the whole cost of an
arrival: admission, queue, decision, command. Sessions run in virtual time and end as in service:
each agent reports it, then the gateway. Times are CPU time of the thread.
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
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import Agent, Chain, ChainHop, ModelPlan, Plan

LIMIT_P50_US = {"jffc": 4.0, "least-time": 10.0, "least-time, no lines": 10.0}
LIMIT_GROWTH = 2.0
MODEL = ModelKey("bench", "1")
HOPS = 3
BLOCKS = 10
BUDGET_NS = 600 * 10**9
TOKENS = 100
"""Tokens of each prompt and of each answer."""


def lines_of(service_ns: int) -> LatencyLines:
    """Returns the lines of a chain that takes `service_ns` for a lone session."""
    step = service_ns / (TOKENS + 20)
    return LatencyLines(
        prefill_token_ns=0.1 * step,
        prefill_ns=10 * step,
        decode_context_token_ns=1e-4 * step,
        decode_session_ns=0.05 * step,
        decode_ns=0.9 * step,
        decode_lone_ns=step,
    )


def cluster(chains: int, has_lines: bool, seed: int = 1) -> tuple[list[Agent], Plan]:
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
        lines = lines_of(service) if has_lines else None
        found.append(Chain(f"c{k}", tuple(hops), draw.randint(1, 8), service, lines=lines))
    model = ModelPlan(MODEL, 10**9, (), chains=tuple(found))
    return agents, Plan(PlanId("bench"), (model,))


class Run(Trial[ChainedDispatcher]):
    """A dispatcher in virtual time, with the real times of `handle`."""

    def __init__(self, policy: str, chains: int, load: float) -> None:
        name, _, without = policy.partition(", ")
        agents, plan = cluster(chains, has_lines=not without)
        dispatcher = ChainedDispatcher(policy=name, stopwatch=time.thread_time_ns)
        super().__init__(dispatcher, agents, plan)
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
            self.later(round(moment), SessionRequested(request, MODEL, TOKENS, TOKENS, deadline))
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
    for policy, limit_us in LIMIT_P50_US.items():
        for label, load in (("50 % busy", 0.5), ("95 % busy", 0.95), ("20 % overload", 1.2)):
            results += _figures(policy, label, load, steady, limit_us)
    return results


def _figures(policy: str, label: str, load: float, steady: int, limit_us: float) -> list[Figure]:
    medians = []
    for chains in (100, 1000):
        trial = Run(policy, chains, load)
        warm_up = 8 * chains
        trial.go(warm_up + steady, warm_up)
        p50, p99 = decision_us(trial.dispatcher)
        medians.append(p50)
    # The figures of "jffc" keep the names that they have in earlier records.
    case = label if policy == "jffc" else f"{policy}, {label}"
    return [
        at_most(f"decision p50, 1,000 chains, {case}", p50, "us", limit_us),
        at_most(f"decision p99, 1,000 chains, {case}", p99, "us"),
        at_most(
            f"decision p50, 1,000 / 100 chains, {case}",
            medians[1] / medians[0],
            "x",
            LIMIT_GROWTH,
        ),
        at_most(f"handle an arrival p50, {case}", statistics.median(trial.arrival_us), "us"),
        at_most(f"handle an end p50, {case}", statistics.median(trial.end_us), "us"),
    ]
