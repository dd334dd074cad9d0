"""Cost of one dispatch decision: 100 and 1,000 GPUs in three pools, four to a network card.

Each arrival brings rows for one planned batch. A decision is one pass of Algorithm 1: choose the
pipeline, find the batch size, probe, reserve (with tight deadlines there are also decisions to
wait). `handle` is the whole cost of an arrival per decision: admission, queue, decision, command.
Batches run in virtual time with a few per cent of noise and are reported hop by hop, so that the
book looks as it does in service. Times are CPU time of the thread.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.pools import auditing
from benchmarks.virtual_time import Trial, decision_us
from catenary_lab.limits import Figure, at_least, at_most
from catenary_scheduler.book import COMPILED
from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.events import (
    Command,
    DispatchBatch,
    RequestArrived,
    RequestCompleted,
    StageReported,
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
from catenary_services.domain.plan import Agent, ModelPlan, Pipeline, Plan, Stage

LIMIT_P50_US = 7.0
LIMIT_P99_US = 40.0
LIMIT_GROWTH = 2.0
POOLS = (34, 33, 33)
PER_SERVER = 4
BATCH = 8
MODEL = ModelKey("bench", "1")
COMPUTE_NS = tuple(int(4e6 + 1e6 * rows) for rows in range(1, BATCH + 1))
ROW_BYTES = 800_000
LINK_BYTES_PER_SECOND = 12_500_000_000


def cluster(scale: int = 1, per_server: int = PER_SERVER) -> tuple[list[Agent], Plan]:
    """Returns 100 agents times `scale`, and a plan of one pipeline with three pools of them."""
    agents = [
        Agent(
            AgentId(f"a{i:05}"), "bench", ServerId(f"s{i // per_server}"), 1, LINK_BYTES_PER_SECOND
        )
        for i in range(scale * sum(POOLS))
    ]
    random.Random(1).shuffle(agents)  # servers hold members of several pools
    stages, first = [], 0
    for position, share in enumerate(POOLS):
        size = scale * share
        pool = tuple(agent.agent_id for agent in agents[first : first + size])
        key = PartitionKey(MODEL, position, position + 1)
        stages.append(Stage(key, pool, COMPUTE_NS, ROW_BYTES if position else 0))
        first += size
    pipeline = Pipeline("p0", BATCH, tuple(stages))
    return agents, Plan(PlanId("bench"), (ModelPlan(MODEL, 10**8, (pipeline,)),))


class Run(Trial[PooledDispatcher]):
    """A dispatcher in virtual time, with the real times of `handle`."""

    def __init__(self, *, load: float, budget: tuple[float, float], scale: int = 1) -> None:
        dispatcher = PooledDispatcher(PooledConfig(), stopwatch=time.thread_time_ns)
        super().__init__(dispatcher, *cluster(scale))
        self.gap = COMPUTE_NS[-1] / (scale * min(POOLS) * load)
        self.latency = 3 * COMPUTE_NS[-1] + 2 * BATCH * ROW_BYTES * 10**9 // LINK_BYTES_PER_SECOND
        self.budget = budget
        self.handle_us: list[float] = []
        self.report_us: list[float] = []

    def carry_out(self, command: Command) -> None:
        """Runs a batch as the agents would."""
        if not isinstance(command, DispatchBatch):
            return
        for position, hop in enumerate(command.path):
            real = int(hop.duration_ns * self.random.uniform(0.95, 1.02))
            end = hop.start_ns + real
            self.later(end, StageReported(command.batch, position, hop.start_ns, end))
        for part in command.slices:
            self.later(end + 300_000, RequestCompleted(part.request))

    def go(self, arrivals: int, warm_up: int) -> None:
        """Lets requests arrive and everything run out; figures start after `warm_up` arrivals."""
        moment = 1_000_000.0
        for number in range(arrivals):
            moment += self.random.expovariate(1 / self.gap)
            deadline = int(moment + self.latency * self.random.uniform(*self.budget))
            request = RequestId(GatewayId("g"), number)
            self.later(int(moment), RequestArrived(request, MODEL, BATCH, deadline))
        seen, decided = 0, 0
        for event, _, commands, took in self.handled():
            before, decided = decided, self.dispatcher.statistics()["decisions"]
            if isinstance(event, RequestArrived):
                seen += 1
                decisions = decided - before
                if seen > warm_up and decisions:
                    self.handle_us.append(took / decisions)
            elif isinstance(event, StageReported) and seen > warm_up:
                self.report_us.append(took)
            for command in commands:
                self.carry_out(command)


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    arrivals = 1500 if quick else 8000
    results = [at_least("compiled modules in use", float(COMPILED), "", 1)]
    cases: list[tuple[str, float, tuple[float, float]]] = [
        ("50 % busy, roomy deadlines", 0.5, (1.5, 3.0)),
        ("50 % busy, tight deadlines", 0.5, (0.75, 1.2)),
        ("90 % busy, tight deadlines", 0.9, (0.75, 1.2)),
    ]
    for label, load, budget in cases:
        trial = Run(load=load, budget=budget)
        trial.go(arrivals, warm_up=300)
        p50, p99 = decision_us(trial.dispatcher)
        large = Run(load=load, budget=budget, scale=10)
        large.go(arrivals, warm_up=300)
        growth = decision_us(large.dispatcher)[0] / p50
        results += [
            at_most(f"decision p50, {label}", p50, "us", LIMIT_P50_US),
            at_most(f"decision p99, {label}", p99, "us", LIMIT_P99_US),
            at_most(f"decision p50, 1,000 / 100 GPUs, {label}", growth, "x", LIMIT_GROWTH),
            at_most(f"handle per decision p50, {label}", statistics.median(trial.handle_us), "us"),
            at_most(f"stage report p50, {label}", statistics.median(trial.report_us), "us"),
        ]
    return results + auditing.figures(quick)
