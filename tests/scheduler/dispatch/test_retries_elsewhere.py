"""Who failed or was overdue is not asked again first; who makes others fail is found."""

from __future__ import annotations

from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.events import (
    AgentLost,
    BatchFailed,
    Command,
    DispatchBatch,
    Event,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCompleted,
    StageReported,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    PartitionKey,
)
from catenary_services.domain.plan import Stage
from scheduling_cases.pipelines import CATS, joins, pipeline, plan, request, served

KEY = PartitionKey(CATS, 0, 1)
CONFIG = PooledConfig(max_linger_ns=0, safety_margin_ns=0, dispatch_lead_ns=0, overdue_grace_ns=50)


class Bench:
    """One stage, `names` in its pool; the first is free first."""

    def __init__(self, *names: str, batch: int = 4) -> None:
        self.now = 1_000
        self.number = 0
        self.dispatcher = PooledDispatcher(CONFIG)
        self.sent: list[DispatchBatch] = []
        self.answers: dict[int, Reject] = {}
        for name in names:
            self.tell(joins(name))
        stage = Stage(KEY, tuple(AgentId(name) for name in names), (20, 24, 28, 32), 0)
        self.tell(PlanActivated(plan(served(pipeline(batch, stage), slo_ms=1))))

    def tell(self, event: Event) -> list[Command]:
        commands = self.dispatcher.handle(event, self.now)
        self.sent += [each for each in commands if isinstance(each, DispatchBatch)]
        self.answers |= {each.request.number: each for each in commands if isinstance(each, Reject)}
        return commands

    def arrive(self, rows: int = 1, budget: int = 10**6) -> int:
        self.number += 1
        self.tell(RequestArrived(request(self.number), CATS, rows, self.now + budget))
        return self.number

    @property
    def last(self) -> DispatchBatch:
        return self.sent[-1]

    def on(self, command: DispatchBatch) -> str:
        return command.path[0].agent

    def fail(self, command: DispatchBatch, reason: str = "DEVICE_FAILED") -> None:
        self.tell(BatchFailed(command.batch, command.path[0].agent, reason, "no", True))

    def done(self, command: DispatchBatch) -> None:
        hop = command.path[0]
        end = max(self.now, hop.start_ns + hop.duration_ns)
        self.now = end
        self.tell(StageReported(command.batch, 0, end - hop.duration_ns, end))
        for part in command.slices:
            self.tell(RequestCompleted(part.request))


def test_what_failed_on_an_agent_is_retried_on_another() -> None:
    bench = Bench("a", "b")
    for reason in ("DEVICE_FAILED", "DEVICE_OUT_OF_MEMORY", "DEVICE_LOST", "PARTITION_LOST"):
        bench.arrive()
        first = bench.last
        bench.fail(first, reason)
        assert bench.on(bench.last) != bench.on(first), reason
        bench.done(bench.last)


def test_who_is_overdue_is_asked_again_only_if_there_is_no_other() -> None:
    for names in (("a", "b"), ("a",)):
        bench = Bench(*names)
        bench.arrive()
        first = bench.last
        bench.now += 1_000
        bench.tell(Tick())
        assert len(bench.sent) == 2
        assert (bench.on(bench.last) == bench.on(first)) == (len(names) == 1)


def round_of(bench: Bench, requests: int, broken: str) -> list[str]:
    """Serves requests that arrive together; returns who was given batches, the broken one's fail."""
    known = len(bench.sent)
    for _ in range(requests):
        bench.arrive()
    given = []
    while known < len(bench.sent):
        batch = bench.sent[known]
        known += 1
        given.append(bench.on(batch))
        if given[-1] == broken:
            bench.fail(batch)
        else:
            bench.done(batch)
    return given


def test_an_agent_that_fails_again_and_again_is_left_alone() -> None:
    bench = Bench("a", "b", batch=1)
    given = [each for _ in range(20) for each in round_of(bench, 2, "a")]
    assert not bench.answers
    assert given.count("b") == 40
    assert given.count("a") == 3
    assert bench.dispatcher.statistics()["opened_circuits"] == 1


def test_a_probe_closes_the_circuit_of_an_agent_that_is_well_again() -> None:
    bench = Bench("a", "b", batch=1)
    for _ in range(3):
        round_of(bench, 2, "a")
    assert set(round_of(bench, 8, "a")) == {"b"}
    bench.now += CONFIG.breaker.first_pause_ns
    bench.tell(Tick())
    before = len(bench.sent)
    for _ in range(8):
        bench.arrive()
    given = [bench.on(each) for each in bench.sent[before:]]
    assert given.count("a") == 1  # the probe
    for each in sorted(bench.sent[before:], key=bench.on):
        bench.done(each)
    assert set(round_of(bench, 8, "")) == {"a", "b"}


def test_a_probe_that_fails_is_served_elsewhere_and_the_next_comes_later() -> None:
    bench = Bench("a", "b", batch=1)
    for _ in range(3):
        round_of(bench, 2, "a")
    for doubled in range(3):
        bench.now += CONFIG.breaker.first_pause_ns << doubled
        bench.tell(Tick())
        given = round_of(bench, 8, "a")
        assert (given.count("a"), given.count("b")) == (1, 8)
    assert not bench.answers


def test_a_request_that_makes_two_agents_fail_is_answered_and_they_are_not_to_blame() -> None:
    bench = Bench("a", "b", "c")
    for _ in range(10):
        poison = bench.arrive()
        for _ in range(2):
            bench.fail(bench.last)
        assert bench.answers[poison].reason == "COMPUTE_FAILED"
    figures = bench.dispatcher.statistics()
    assert (figures["failed_requests"], figures["opened_circuits"]) == (10, 0)
    well = bench.arrive()
    bench.done(bench.last)
    assert well not in bench.answers


def test_who_shared_a_batch_with_it_is_served() -> None:
    bench = Bench("a", "b", batch=4)
    busy = [bench.arrive(4), bench.arrive(4)]
    blocking = list(bench.sent)
    shared = [bench.arrive() for _ in range(3)]
    for each in blocking:
        bench.done(each)
    poison = shared[1]
    open_batches = [each for each in bench.sent if each not in blocking]
    finished = set()
    while open_batches:
        batch = open_batches.pop(0)
        known = len(bench.sent)
        if any(part.request.number == poison for part in batch.slices):
            bench.fail(batch)
        else:
            finished |= {part.request.number for part in batch.slices}
            bench.done(batch)
        open_batches += bench.sent[known:]
    assert bench.answers.keys() == {poison}
    assert set(shared) - {poison} <= finished
    assert busy


def test_a_lone_agent_is_tried_as_often_as_is_allowed() -> None:
    bench = Bench("a")
    number = bench.arrive()
    while number not in bench.answers:
        bench.fail(bench.last)
    assert len(bench.sent) == CONFIG.max_attempts
    assert bench.answers[number].reason == "PARTITION_LOST"


def test_what_avoids_an_agent_that_is_all_there_is_goes_back_to_it() -> None:
    bench = Bench("a", "b")
    bench.arrive()
    first = bench.last
    bench.fail(first)
    other = bench.on(bench.last)
    bench.tell(AgentLost(AgentId(other)))
    assert bench.on(bench.last) == bench.on(first)
