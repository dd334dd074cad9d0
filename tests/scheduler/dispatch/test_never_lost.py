"""Whatever happens in whatever order: every request is answered once, nothing stays booked."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.breaker import BreakerConfig
from catenary_scheduler.dispatch.events import (
    AdoptedRows,
    AgentJoined,
    AgentLost,
    BatchFailed,
    CancelBatch,
    Command,
    DispatchBatch,
    Event,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestCompleted,
    StageReported,
    Tick,
)
from catenary_scheduler.dispatch.text_lengths import TextLengths
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ServerId,
)
from catenary_services.domain.model import TokenUnits
from catenary_services.domain.plan import Agent, ModelPlan, Pipeline, Plan, Stage

MODELS = (ModelKey("cats", "1"), ModelKey("dogs", "1"))
AGENTS = {
    AgentId(f"a{i}"): Agent(AgentId(f"a{i}"), "x", ServerId(f"s{i // 2}"), 1, 10**9)
    for i in range(5)
}
CONFIG = PooledConfig(
    max_linger_ns=20,
    safety_margin_ns=5,
    dispatch_lead_ns=3,
    max_queued_rows=24,
    max_requests=30,
    overdue_grace_ns=60,
    delivery_grace_ns=80,
    deadline_grace_ns=40,
    retry_after_ns=10,
    breaker=BreakerConfig(first_pause_ns=30, longest_pause_ns=100),
)


def pool(*numbers: int) -> tuple[AgentId, ...]:
    return tuple(AgentId(f"a{i}") for i in numbers)


def pipeline(model: ModelKey, batch: int, *pools: tuple[AgentId, ...]) -> Pipeline:
    stages = tuple(
        Stage(PartitionKey(model, i, i + 1), agents, (20, 24, 28, 32), 3 if i else 0)
        for i, agents in enumerate(pools)
    )
    return Pipeline(f"{model}/{len(pools)}", batch, stages)


def plan(*models: ModelPlan) -> Plan:
    return Plan(PlanId("p"), models)


CATS = ModelPlan(
    MODELS[0],
    400,
    (
        pipeline(MODELS[0], 4, pool(0, 1), pool(2, 3), pool(4)),
        pipeline(MODELS[0], 2, pool(4)),
    ),
)
UNITS = TokenUnits(8, 16)
DOGS = ModelPlan(MODELS[1], 400, (pipeline(MODELS[1], 3, pool(1, 2), pool(2, 3)),), units=UNITS)
"""A model of texts: one of full length takes two units."""
PLANS = (plan(CATS, DOGS), plan(DOGS), plan(CATS), plan())


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000
        self.number = 0
        self.alive: set[AgentId] = set()
        self.open: dict[RequestId, RequestArrived] = {}
        self.missing: dict[RequestId, set[int]] = {}
        self.batches: dict[BatchId, tuple[DispatchBatch, int]] = {}
        self.ended: set[RequestId] = set()
        self.failed_on: set[tuple[RequestId, AgentId]] = set()
        """Requests, and agents whose devices failed on them."""
        self.not_named: set[RequestId] = set()
        """Requests whose gateway did not name their batches; a result of those is a surprise."""
        self.epoch = 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.dispatcher = PooledDispatcher(CONFIG, first_batch=self.epoch << 40)
        for agent in sorted(self.alive or AGENTS):
            self.tell(AgentJoined(AGENTS[agent]))
            self.alive.add(agent)
        self.tell(PlanActivated(PLANS[0]))

    def tell(self, event: Event) -> None:
        for command in self.dispatcher.handle(event, self.now):
            self.obey(command)

    def obey(self, command: Command) -> None:
        if isinstance(command, Reject):
            if command.reason == "COMPUTE_FAILED":
                assert len([1 for request, _ in self.failed_on if request == command.request]) >= 2
            del self.open[command.request]  # raises if it was answered before
            self.ended.add(command.request)
        elif isinstance(command, DispatchBatch):
            assert command.batch not in self.batches
            assert command.path
            assert all(hop.agent in self.alive for hop in command.path)
            row = 0
            for part in command.slices:
                arrived = self.open[part.request]
                assert part.batch_row == row
                assert part.rows >= 1
                assert 0 <= part.request_row <= arrived.rows - part.rows
                row += part.rows
            assert row == command.rows
            assert command.size <= 4
            for hop in command.path:  # what is booked has room for the batch
                assert hop.duration_ns >= (20, 24, 28, 32)[command.size - 1]
            self.batches[command.batch] = (command, 0)
        else:
            assert isinstance(command, CancelBatch)
            assert set(command.agents) <= self.alive
            self.batches.pop(command.batch, None)

    @rule(
        model=st.sampled_from(MODELS),
        rows=st.integers(1, 9),
        budget=st.integers(0, 700),
        priority=st.sampled_from([0, 0, 0, 1]),
        longest=st.sampled_from([3, 11, 16]),
    )
    def arrive(self, model: ModelKey, rows: int, budget: int, priority: int, longest: int) -> None:
        self.number += 1
        request = RequestId(GatewayId("g"), self.number)
        texts = None
        if model == MODELS[1]:
            runs = [(rows - 1, 3), (1, longest)] if rows > 1 else [(1, longest)]
            texts = TextLengths.of(runs, UNITS)
        event = RequestArrived(request, model, rows, self.now + budget, priority, (), texts)
        self.open[request] = event
        self.missing[request] = set(range(rows))
        self.tell(event)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), late=st.integers(-10, 30))
    def next_hop(self, data: st.DataObject, late: int) -> None:
        batch = data.draw(st.sampled_from(sorted(self.batches)))
        command, position = self.batches[batch]
        if position == len(command.path):
            del self.batches[batch]
            self.deliver(command)
            return
        hop = command.path[position]
        end = max(1, min(self.now, hop.start_ns + hop.duration_ns + late))
        self.batches[batch] = (command, position + 1)
        transfer = (max(0, end - hop.duration_ns - 6), end - hop.duration_ns) if position else None
        start = max(0, end - hop.duration_ns)
        self.tell(StageReported(batch, position, start, end, *(transfer or (None, None))))

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), late=st.integers(-5, 10), delivered=st.sampled_from([True, True, False]))
    def finish(self, data: st.DataObject, late: int, delivered: bool) -> None:
        batch = data.draw(st.sampled_from(sorted(self.batches)))
        command, position = self.batches[batch]
        for at in range(position, len(command.path)):
            hop = command.path[at]
            start = max(0, hop.start_ns + late)
            self.now = max(self.now, start + hop.duration_ns)
            self.tell(StageReported(batch, at, start, start + hop.duration_ns))
            if batch not in self.batches:
                return
        del self.batches[batch]
        if delivered:
            self.deliver(command)

    def deliver(self, command: DispatchBatch) -> None:
        for part in command.slices:
            if part.request in self.open:
                rows = set(range(part.request_row, part.request_row + part.rows))
                self.missing[part.request] -= rows
                if not self.missing[part.request]:
                    del self.open[part.request]
                    self.ended.add(part.request)
                    self.tell(RequestCompleted(part.request))

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), retryable=st.booleans())
    def fail(self, data: st.DataObject, retryable: bool) -> None:
        batch = data.draw(st.sampled_from(sorted(self.batches)))
        command, position = self.batches.pop(batch)
        agent = command.path[min(position, len(command.path) - 1)].agent
        self.tell(BatchFailed(batch, agent, "INTERNAL", "no", retryable))

    @precondition(lambda self: self.batches)
    @rule(
        data=st.data(),
        reason=st.sampled_from(["DEVICE_FAILED", "DEVICE_FAILED", "DEVICE_LOST", "PARTITION_LOST"]),
    )
    def device_fails(self, data: st.DataObject, reason: str) -> None:
        batch = data.draw(st.sampled_from(sorted(self.batches)))
        command, position = self.batches.pop(batch)
        agent = command.path[min(position, len(command.path) - 1)].agent
        self.failed_on = {*self.failed_on, *((part.request, agent) for part in command.slices)}
        self.tell(BatchFailed(batch, agent, reason, "no", True))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def agent_hangs(self, data: st.DataObject) -> None:
        """What it has is overdue one after the other, and then it is found stuck."""
        batch = data.draw(st.sampled_from(sorted(self.batches)))
        command, position = self.batches[batch]
        agent = command.path[min(position, len(command.path) - 1)].agent
        for each in [
            each
            for each, (held, at) in self.batches.items()
            if at < len(held.path) and held.path[at].agent == agent
        ]:
            del self.batches[each]
        if agent in self.alive:
            for _ in range(3):
                self.wake_up()
            self.lose_or_join(agent)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), reason=st.sampled_from(["CANCELLED", "CANCELLED", "OVERLOADED"]))
    def gateway_cannot_send(self, data: st.DataObject, reason: str) -> None:
        """Its rows were cancelled, or find no room; the first agent may have those of others."""
        batch = data.draw(st.sampled_from(sorted(self.batches)))
        command, _ = self.batches[batch]
        if reason == "CANCELLED":
            self.ends(data.draw(st.sampled_from([part.request for part in command.slices])))
        self.tell(BatchFailed(batch, command.path[0].agent, reason, "no", True))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        del self.batches[data.draw(st.sampled_from(sorted(self.batches)))]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.ends(data.draw(st.sampled_from(sorted(self.open))))

    def ends(self, request: RequestId) -> None:
        if self.open.pop(request, None) is not None:
            self.ended.add(request)
            self.tell(RequestCancelled(request))

    @rule(agent=st.sampled_from(sorted(AGENTS)))
    def lose_or_join(self, agent: AgentId) -> None:
        if agent in self.alive:
            self.alive.remove(agent)
            for batch, (command, position) in list(self.batches.items()):
                if position < len(command.path) and command.path[position].agent == agent:
                    del self.batches[batch]
            self.tell(AgentLost(agent))
        else:
            self.alive.add(agent)
            self.tell(AgentJoined(AGENTS[agent]))

    @rule(which=st.sampled_from([0, 0, 1, 2, 3]))
    def activate(self, which: int) -> None:
        self.tell(PlanActivated(PLANS[which]))

    @rule(step=st.integers(0, 60))
    def time_passes(self, step: int) -> None:
        self.now += step
        self.tell(Tick())

    @rule()
    def wake_up(self) -> None:
        moment = self.dispatcher.next_wakeup()
        if moment is not None:
            self.now = max(self.now, moment)
            self.tell(Tick())

    @rule(known=st.booleans())
    def gateway_comes_back(self, known: bool) -> None:
        self.resubmit(self.resubmissions(known))

    @rule(known=st.booleans(), restored=st.booleans())
    def scheduler_changes(self, known: bool, restored: bool) -> None:
        events = self.resubmissions(known)
        snapshot = self.dispatcher.snapshot()
        self.start()
        if restored:
            self.dispatcher.restore(snapshot)
        self.resubmit(events)

    def resubmit(self, events: list[RequestArrived]) -> None:
        for event in events:
            if event.request in self.open:  # not answered while the others were resubmitted
                self.tell(event)

    def resubmissions(self, known: bool) -> list[RequestArrived]:
        if not known:
            self.not_named |= self.open.keys()
        in_flight = defaultdict(list)
        for batch, (command, _) in self.batches.items():
            for part in command.slices:
                adopted = AdoptedRows(
                    batch, part.request_row, part.rows, command.expected_finish_ns
                )
                in_flight[part.request].append(adopted)
        return [
            RequestArrived(
                request,
                event.model,
                event.rows,
                event.deadline_ns,
                event.priority,
                tuple(in_flight[request]) if known else (),
                event.texts,
            )
            for request, event in self.open.items()
        ]

    @invariant()
    def nothing_is_booked_twice(self) -> None:
        lines = defaultdict(list)
        for record in self.dispatcher.snapshot():
            lines[record.resource].append((record.start_ns, record.end_ns))
        for intervals in lines.values():
            intervals.sort()
            for (_, end), (start, _) in itertools.pairwise(intervals):
                assert end <= start

    @invariant()
    def what_agents_hold_is_wanted(self) -> None:
        """Whatever is given up, everyone who may have it is told; `obey` lets it go."""
        held = {
            batch
            for batch, (command, position) in self.batches.items()
            if batch >> 40 == self.epoch
            and position < len(command.path)
            and self.not_named.isdisjoint(part.request for part in command.slices)
        }
        assert held <= set(self.dispatcher.followed())

    @invariant()
    def what_is_open_here_is_open_there(self) -> None:
        figures = self.dispatcher.statistics()
        assert figures["open_requests"] == len(self.open)
        assert figures["queued_rows"] <= sum(event.rows for event in self.open.values())
        if self.open:
            assert self.dispatcher.next_wakeup() is not None

    @invariant()
    def every_row_of_an_open_request_is_in_the_queue_or_in_one_batch(self) -> None:
        life = self.dispatcher._state
        places = defaultdict(list)
        for queue in life.queues.values():
            for _, rows in queue._entries:
                places[rows.request.request_id] += range(rows.first, rows.first + rows.count)
        for batch in life.tracker.batches.values():
            assert batch.final or batch.batch_id in self.dispatcher._book
            for rows in batch.rows:
                places[rows.request.request_id] += range(rows.first, rows.first + rows.count)
        assert {request: sorted(rows) for request, rows in places.items()} == {
            request: list(range(event.rows)) for request, event in self.open.items()
        }

    def teardown(self) -> None:
        for _ in range(2000):
            moment = self.dispatcher.next_wakeup()
            if moment is None:
                break
            self.now = max(self.now, moment)
            self.tell(Tick())
        assert not self.open
        assert self.dispatcher.next_wakeup() is None
        assert self.dispatcher.snapshot() == []
        figures = self.dispatcher.statistics()
        gauges = ("queued_rows", "open_requests", "batches_in_flight", "booked_batches")
        assert [figures[name] for name in gauges] == [0, 0, 0, 0]


Cluster.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase
