"""Windows in whatever order of grants, uses, losses and fail-overs: no time is used that is not booked.

The dispatcher and the gateways' windows are the real ones. Between them are streams that may stand
still, break, or (worse than any stream) lose and repeat reports; agents run what reaches them, fail,
and are lost. Every process has a clock of its own.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.events import (
    AdoptedRows,
    AgentJoined,
    AgentLost,
    BatchFailed,
    CancelBatch,
    Command,
    DispatchBatch,
    Event,
    ExtendWindow,
    GrantWindow,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCompleted,
    RevokeWindow,
    StageReported,
    Tick,
    WindowOver,
    WindowReported,
)
from catenary_scheduler.dispatch.pooled.windows import WindowState
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
from catenary_services.domain.plan import Agent, ModelPlan, Pipeline, Plan, Stage
from catenary_services.domain.windows.window import DispatchWindow
from catenary_services.domain.windows.window_queue import WindowOrder, WindowQueue, WindowRows

MS = 1_000_000
COMPUTE = tuple(int(ms * MS) for ms in (2, 2.4, 2.8, 3.2))
CATS, DOGS = ModelKey("cats", "1"), ModelKey("dogs", "1")
AGENTS = {
    AgentId(f"a{i}"): Agent(AgentId(f"a{i}"), "x", ServerId(f"s{i}"), 1, 10**9) for i in range(3)
}
CONFIG = PooledConfig(longest_window_ns=160 * MS, window_share=0.5, delivery_grace_ns=30 * MS)


def stage(model: ModelKey, at: int, *numbers: int) -> Stage:
    pool = tuple(AgentId(f"a{i}") for i in numbers)
    return Stage(PartitionKey(model, at, at + 1), pool, COMPUTE, 300_000 if at else 0)


PLAN = Plan(
    PlanId("p"),
    (
        ModelPlan(CATS, 400 * MS, (Pipeline("c", 4, (stage(CATS, 0, 0), stage(CATS, 1, 1))),)),
        ModelPlan(DOGS, 400 * MS, (Pipeline("d", 3, (stage(DOGS, 0, 1, 2),)),)),
    ),
)


@dataclass
class Asked:
    """A request at its gateway."""

    rows: int
    model: ModelKey
    deadline: int
    submitted: int
    by_window: bool = False
    attempts: list[BatchId] = field(default_factory=list)


@dataclass
class Gateway:
    name: GatewayId
    clock: int
    """What its clock is ahead of the scheduler's."""
    queue: WindowQueue = field(default_factory=WindowQueue)
    open: dict[int, Asked] = field(default_factory=dict)
    failed: set[BatchId] = field(default_factory=set)
    up: deque[Event] = field(default_factory=deque)
    down: deque[tuple[Command, int]] = field(default_factory=deque)
    """Commands, with the moment at which they were sent."""


@dataclass
class Running:
    """A batch on agents."""

    gateway: Gateway
    requests: tuple[int, ...]
    path: tuple[AgentId, ...]
    ends: tuple[int, ...]
    window: BatchId | None
    position: int = 0


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000 * MS
        self.numbers = itertools.count(1)
        self.gateways = [Gateway(GatewayId("g0"), 10**12), Gateway(GatewayId("g1"), -(10**8))]
        self.alive = set(AGENTS)
        self.running: dict[BatchId, Running] = {}
        self.ended: set[RequestId] = set()
        self.epoch = 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.lost_windows: set[BatchId] = set()
        self.grants: dict[BatchId, GrantWindow] = {}
        self.dispatcher = PooledDispatcher(CONFIG, first_batch=self.epoch << 40)
        for agent in sorted(self.alive):
            self.tell(AgentJoined(AGENTS[agent]))
        self.tell(PlanActivated(PLAN))

    # The scheduler

    def tell(self, event: Event) -> None:
        for command in self.dispatcher.handle(event, self.now):
            self.obey(command)

    def obey(self, command: Command) -> None:
        if isinstance(command, CancelBatch):
            self.running.pop(command.batch, None)
        elif isinstance(command, Reject):
            self.to(command.request.gateway, command)
        elif isinstance(command, DispatchBatch):
            for name in {piece.request.gateway for piece in command.slices}:
                self.to(name, command)
        elif isinstance(command, GrantWindow | ExtendWindow | RevokeWindow):
            if isinstance(command, GrantWindow):
                self.grants[command.window] = command
            if isinstance(command, RevokeWindow) and command.lost:
                self.lost_windows.add(command.window)
            self.to(command.gateway, command)
        else:
            assert isinstance(command, WindowOver)

    def to(self, name: GatewayId, command: Command) -> None:
        gateway = next(each for each in self.gateways if each.name == name)
        gateway.down.append((command, self.now))

    # Gateways

    def look(self, gateway: Gateway) -> None:
        now = self.now + gateway.clock
        actions = gateway.queue.look(now)
        for order in actions.orders:
            self.send_by_window(gateway, order)
        for number in actions.submissions:
            asked = gateway.open.get(number)
            if asked is not None:
                assert asked.by_window
                self.submit(gateway, number, asked)
        for use in actions.reports:
            gateway.up.append(WindowReported(gateway.name, use.model, use.window, *use[2:]))

    def submit(self, gateway: Gateway, number: int, asked: Asked) -> None:
        asked.by_window = False
        alive = [batch for batch in asked.attempts if batch not in gateway.failed]
        adopted = tuple(AdoptedRows(each, 0, asked.rows, self.now + 5 * MS) for each in alive[-1:])
        gateway.up.append(
            RequestArrived(
                RequestId(gateway.name, number),
                asked.model,
                asked.rows,
                asked.deadline,
                0,
                adopted,
                None,
                True,
            )
        )

    def send_by_window(self, gateway: Gateway, order: WindowOrder) -> None:
        batch, window = order.batch, order.window
        assert batch.batch not in self.running
        for each in order.requests:
            if each.request in gateway.open:
                assert gateway.open[each.request].by_window
                gateway.open[each.request].attempts.append(batch.batch)
        starts = [start - gateway.clock for start in batch.starts_ns]
        if window.window >> 40 != self.epoch:
            gateway.queue.failed(batch.batch, self.now + gateway.clock)  # agents obey another
            return
        self.is_reserved(window, starts, batch.rows)
        ends = tuple(start + COMPUTE[batch.rows - 1] for start in starts)
        path = tuple(hop.agent for hop in window.hops)
        numbers = tuple(each.request for each in order.requests)
        if path[0] in self.alive:
            self.running[batch.batch] = Running(gateway, numbers, path, ends, window.window)

    def is_reserved(self, window: DispatchWindow, starts: list[int], rows: int) -> None:
        """The book has this time for the window, unless a late batch or a loss took it since."""
        if window.window in self.lost_windows:
            return
        granted = self.dispatcher._state.windows._windows[window.window]
        assert granted.state in (WindowState.OPEN, WindowState.REVOKED)
        book = self.dispatcher._book
        for position, booking, is_of_links in granted.bookings:
            hop = granted.grant.hops[position]
            records = [record for record in book.snapshot() if record.batch == booking]
            if not records or records[0].done or records[0].start_ns != hop.start_ns:
                continue  # corrected, or displaced by what was late
            start, end = starts[position], starts[position] + COMPUTE[rows - 1]
            if is_of_links:
                start, end = start - hop.transfer_ns[rows - 1], start
            assert all(record.start_ns <= start and end <= record.end_ns for record in records)

    def answered(self, gateway: Gateway, number: int) -> None:
        asked = gateway.open.pop(number, None)
        if asked is None:
            return
        request = RequestId(gateway.name, number)
        assert request not in self.ended
        self.ended.add(request)
        if not asked.by_window:
            gateway.up.append(RequestCompleted(request))
        gateway.queue.withdraw(asked.model, number)

    # Rules

    @rule(
        which=st.sampled_from([0, 0, 0, 0, 1]),
        model=st.sampled_from([CATS, CATS, DOGS]),
        rows=st.sampled_from([1, 1, 1, 2, 5]),
        budget=st.sampled_from([5, 30, 150, 400, 400]),
    )
    def arrive(self, which: int, model: ModelKey, rows: int, budget: int) -> None:
        self.ask(self.gateways[which], model, rows, budget)

    def ask(self, gateway: Gateway, model: ModelKey, rows: int, budget: int) -> None:
        number, local = next(self.numbers), self.now + gateway.clock
        asked = Asked(rows, model, self.now + budget * MS, local)
        gateway.open[number] = asked
        order = WindowRows(number, rows, asked.deadline + gateway.clock)
        asked.by_window = gateway.queue.offer(model, order, local)
        if not asked.by_window:
            self.submit(gateway, number, asked)
        self.look(gateway)

    @rule(requests=st.integers(3, 8), pause=st.integers(2, 5), model=st.sampled_from([CATS, DOGS]))
    def one_at_a_time(self, requests: int, pause: int, model: ModelKey) -> None:
        """What windows are for: one gateway alone, one request soon after the other."""
        gateway = self.gateways[0]
        for _ in range(requests):
            self.ask(gateway, model, 1, 400)
            self.settle()
            self.pass_time(pause * MS)
            self.settle()
            for batch in sorted(self.running):
                if batch in self.running:
                    self.run_to_the_end(batch)
            self.settle()

    @rule(before=st.integers(-2, 6), model=st.sampled_from([CATS, DOGS]))
    def one_at_the_end_of_a_window(self, before: int, model: ModelKey) -> None:
        self.one_at_a_time(6, 3, model)
        for gateway in self.gateways:
            window = gateway.queue.window_of(model)
            if window is not None:
                end = window.end_ns - gateway.clock - before * MS // 2
                self.pass_time(max(0, end - COMPUTE[0] - self.now))
                self.ask(gateway, model, 1, 400)

    @rule(which=st.integers(0, 1), most=st.integers(1, 4))
    def up_comes(self, which: int, most: int) -> None:
        up = self.gateways[which].up
        for _ in range(min(most, len(up))):
            self.tell(up.popleft())

    @rule(which=st.integers(0, 1), most=st.integers(1, 4))
    def down_comes(self, which: int, most: int) -> None:
        gateway = self.gateways[which]
        for _ in range(min(most, len(gateway.down))):
            self.hear(gateway, *gateway.down.popleft())

    @rule()
    def settle(self) -> None:
        while any(gateway.up or gateway.down for gateway in self.gateways):
            for which in range(len(self.gateways)):
                self.up_comes(which, 100)
                self.down_comes(which, 100)

    def hear(self, gateway: Gateway, command: Command, sent: int) -> None:
        now = self.now + gateway.clock
        if isinstance(command, Reject):
            asked = gateway.open.pop(command.request.number, None)
            if asked is not None:
                assert command.request not in self.ended
                assert not asked.by_window
                self.ended.add(command.request)
        elif isinstance(command, DispatchBatch):
            mine = [p.request.number for p in command.slices if p.request.gateway == gateway.name]
            for number in mine:
                if number in gateway.open:
                    gateway.open[number].attempts.append(command.batch)
            path = tuple(hop.agent for hop in command.path)
            ends = tuple(hop.start_ns + hop.duration_ns for hop in command.path)
            if path[0] in self.alive and command.batch in self.dispatcher._state.tracker.batches:
                self.running[command.batch] = Running(gateway, tuple(mine), path, ends, None)
        elif isinstance(command, GrantWindow):
            asked_ns = gateway.open.get(command.request.number)
            if asked_ns is None:
                no_rows = (command.first_batch, (), 0, False)
                its = (gateway.name, command.model, command.window, 1)
                gateway.up.append(WindowReported(*its, *no_rows))
                return
            hops = tuple(
                hop._replace(
                    start_ns=now + max(0, hop.start_ns - sent),
                    end_ns=asked_ns.submitted + max(0, hop.end_ns - sent),
                )
                for hop in command.hops
            )
            if all(hop.start_ns < hop.end_ns for hop in hops):
                ids = (command.first_batch, command.batches)
                wait = command.most_wait_ns
                window = DispatchWindow(command.window, command.model, hops, ids, wait)
                gateway.queue.granted(window, now)
        elif isinstance(command, ExtendWindow):
            asked_at = gateway.queue.asked_ns(command.window, command.number)
            if asked_at is not None:
                ends = tuple(asked_at + max(0, end - sent) for end in command.ends_ns)
                gateway.queue.extended(command.window, command.number, ends, now)
        elif isinstance(command, RevokeWindow):
            if command.lost:
                for batch, running in self.running.items():
                    if running.window == command.window:
                        gateway.failed.add(batch)
                grant = self.grants[command.window]
                gateway.failed.update(
                    batch
                    for asked in gateway.open.values()
                    for batch in asked.attempts
                    if grant.has(batch)
                )
            gateway.queue.revoked(command.window, command.lost, now)
        self.look(gateway)

    @precondition(lambda self: any(gateway.up for gateway in self.gateways))
    @rule(which=st.integers(0, 1), twice=st.booleans())
    def report_is_lost_or_comes_twice(self, which: int, twice: bool) -> None:
        up = self.gateways[which].up
        if up and isinstance(up[0], WindowReported):
            if twice:
                self.tell(up[0])
            else:
                up.popleft()

    @rule(which=st.integers(0, 1))
    def stream_breaks(self, which: int) -> None:
        """What was under way is lost; then the gateway says again what is unfinished."""
        self.comes_back(self.gateways[which])

    def comes_back(self, gateway: Gateway) -> None:
        gateway.up.clear()
        gateway.down.clear()
        gateway.queue.clear()
        for number, asked in gateway.open.items():
            self.submit(gateway, number, asked)
        closed = set(self.dispatcher.open_requests()) - {
            RequestId(gateway.name, number) for number in gateway.open
        }
        for request in closed:
            if request.gateway == gateway.name:
                gateway.up.append(RequestCompleted(request))

    @rule(restored=st.booleans())
    def scheduler_changes(self, restored: bool) -> None:
        snapshot = self.dispatcher.snapshot()
        self.start()
        if restored:
            self.dispatcher.restore(snapshot)
        for gateway in self.gateways:
            self.comes_back(gateway)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), late=st.sampled_from([-2, 0, 0, 1, 12]))
    def finish(self, data: st.DataObject, late: int) -> None:
        batch = data.draw(st.sampled_from(sorted(self.running)))
        self.run_to_the_end(batch, late * MS)

    def run_to_the_end(self, batch: BatchId, late: int = 0) -> None:
        running = self.running[batch]
        for position in range(running.position, len(running.path)):
            end = max(1, running.ends[position] + late)
            self.pass_time(max(0, end - self.now))
            if batch not in self.running:
                return
            running.position = position + 1
            start = end - COMPUTE[0]
            self.tell(StageReported(batch, position, start, end, rows=1))
        if self.running.pop(batch, None) is not None:
            gateway = running.gateway
            for number in running.requests:
                self.answered(gateway, number)
            gateway.queue.answered(batch, self.now + gateway.clock)
            self.look(gateway)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        del self.running[data.draw(st.sampled_from(sorted(self.running)))]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), gateway_hears=st.booleans())
    def fail(self, data: st.DataObject, gateway_hears: bool) -> None:
        batch = data.draw(st.sampled_from(sorted(self.running)))
        running = self.running.pop(batch)
        agent = running.path[min(running.position, len(running.path) - 1)]
        self.tell(BatchFailed(batch, agent, "INTERNAL", "no", True))
        gateway = running.gateway
        if gateway_hears:
            gateway.failed.add(batch)
            gateway.queue.failed(batch, self.now + gateway.clock)
            self.look(gateway)

    @rule(agent=st.sampled_from(sorted(AGENTS)))
    def lose_or_join(self, agent: AgentId) -> None:
        if agent in self.alive:
            self.alive.remove(agent)
            for batch, running in list(self.running.items()):
                if agent in running.path[running.position :]:
                    del self.running[batch]
            self.tell(AgentLost(agent))
        else:
            self.alive.add(agent)
            self.tell(AgentJoined(AGENTS[agent]))

    @rule(step=st.integers(0, 60))
    def time_passes(self, step: int) -> None:
        self.pass_time(step * MS // 4)

    def pass_time(self, step: int) -> None:
        """Lets time pass with all wake-ups; gateways are woken first."""
        end = self.now + step
        for _ in range(10_000):
            moment, gateway = self.next_wakeup()
            if moment is None or moment > end:
                break
            self.now = max(self.now, moment)
            if gateway is None:
                self.tell(Tick())
            else:
                self.look(gateway)
        self.now = max(self.now, end)

    def next_wakeup(self) -> tuple[int | None, Gateway | None]:
        found: list[tuple[int, int]] = []
        for at, gateway in enumerate(self.gateways):
            wakeup = gateway.queue.next_wakeup()
            if wakeup is not None:
                found.append((wakeup - gateway.clock, at))
        own = self.dispatcher.next_wakeup()
        if own is not None:
            found.append((own, len(self.gateways)))
        if not found:
            return None, None
        moment, at = min(found)
        return moment, self.gateways[at] if at < len(self.gateways) else None

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
    def a_request_is_known_to_the_scheduler_or_goes_by_a_window(self) -> None:
        known = set(self.dispatcher.open_requests())
        for gateway in self.gateways:
            under_way = {
                event.request.number for event in gateway.up if isinstance(event, RequestArrived)
            }
            told = {
                command.request.number for command, _ in gateway.down if isinstance(command, Reject)
            }
            for number, asked in gateway.open.items():
                is_known = RequestId(gateway.name, number) in known
                assert asked.by_window or is_known or number in under_way or number in told

    def teardown(self) -> None:
        for _ in range(3000):
            self.settle()
            if not any(gateway.open for gateway in self.gateways):
                break
            moment, _ = self.next_wakeup()
            assert moment is not None
            self.pass_time(max(0, moment - self.now))
        assert not any(gateway.open for gateway in self.gateways)
        for _ in range(3000):
            self.settle()
            moment, _ = self.next_wakeup()
            if moment is None:
                break
            self.pass_time(max(0, moment - self.now))
        assert self.dispatcher.snapshot() == []
        assert self.dispatcher.statistics()["open_requests"] == 0
        assert self.dispatcher._state.windows.active == {}


Cluster.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase
