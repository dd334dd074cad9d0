"""Bursts in pools of other models, and what the owners of these pools keep."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.dispatch import PooledConfig, PooledDispatcher
from catenary_scheduler.dispatch.events import (
    AgentLost,
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
from catenary_services.domain.ids import AgentId, ModelKey
from catenary_services.domain.plan import ModelPlan
from scheduling_cases.pipelines import CATS, DOGS, MS, joins, pipeline, plan, request, served, stage

SECOND = 1000.0


def sharing(cats_on: str = "a", dogs_on: str = "b", dogs_slo_ms: float = 60) -> list[ModelPlan]:
    """Cats on agents of their own and on those of dogs, dogs on theirs; 10 ms each."""
    guest = replace(pipeline(1, stage(0, dogs_on, 10)), is_shared=True, pipeline_id="guest")
    cats = served(pipeline(1, stage(0, cats_on, 10)), guest)
    return [cats, served(pipeline(1, stage(0, dogs_on, 10, model=DOGS)), slo_ms=dogs_slo_ms)]


class Bench:
    """A dispatcher on agents "a" and "b" that compute as booked, and what became of each request."""

    def __init__(self, *models: ModelPlan, config: PooledConfig | None = None) -> None:
        self.dispatcher = PooledDispatcher(config or PooledConfig(max_linger_ns=None))
        self.agents: dict[int, str] = {}
        self.refused: set[int] = set()
        self.number = 0
        self._deadlines: dict[int, int] = {}
        self._computing: list[tuple[int, int, DispatchBatch]] = []
        for name in "ab":
            self.tell(0, joins(name))
        self.tell(0, PlanActivated(plan(*models)))

    def tell(self, ms: float, event: Event) -> None:
        """Lets everything happen that happens before a moment, and then an event."""
        until_ns = round(ms * MS)
        while True:
            wake = self.dispatcher.next_wakeup()
            ended = self._computing[0][0] if self._computing else until_ns
            first = min(until_ns, ended, until_ns if wake is None else wake)
            if first >= until_ns:
                break
            if ended == first:
                self._end(heappop(self._computing)[2])
            else:
                self._take(self.dispatcher.handle(Tick(), first))
        self._take(self.dispatcher.handle(event, until_ns))

    def _end(self, batch: DispatchBatch) -> None:
        (hop,) = batch.path
        end = batch.expected_finish_ns
        report = StageReported(batch.batch, 0, hop.start_ns, end, None, None)
        self._take(self.dispatcher.handle(report, end))
        for part in batch.slices:
            self._take(self.dispatcher.handle(RequestCompleted(part.request), end))

    def _take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, DispatchBatch):
                heappush(self._computing, (command.expected_finish_ns, command.batch, command))
                for part in command.slices:
                    number = part.request.number
                    assert command.expected_finish_ns <= self._deadlines[number]
                    self.agents[number] = command.path[0].agent
            elif isinstance(command, Reject):
                self.refused.add(command.request.number)

    def ask(self, ms: float, which: ModelKey, slo: float) -> int:
        """Submits a request, and returns its number."""
        self.number += 1
        self._deadlines[self.number] = round((ms + slo) * MS)
        deadline = self._deadlines[self.number]
        self.tell(ms, RequestArrived(request(self.number), which, 1, deadline))
        return self.number

    def burst(self, ms: float, size: int, slo: float, which: ModelKey = CATS) -> list[str]:
        """Returns the agents of the requests of a burst; "" for those that were refused."""
        numbers = [self.ask(ms, which, slo) for _ in range(size)]
        return [self.agents.get(number, "") for number in numbers]


def test_what_own_pools_cannot_do_in_time_goes_to_pools_of_others() -> None:
    bench = Bench(*sharing())
    assert bench.burst(SECOND, 5, slo=25) == ["a", "a", "b", "b", ""]
    assert bench.dispatcher.statistics()["shared_batches"] == 2


def test_a_plan_without_shared_routes_refuses_what_own_pools_cannot_do() -> None:
    cats, dogs = sharing()
    bench = Bench(replace(cats, pipelines=cats.own_pipelines), dogs)
    assert bench.burst(SECOND, 3, slo=25) == ["a", "a", ""]


def test_guests_get_only_time_that_was_left_over() -> None:
    bench = Bench(*sharing(), config=PooledConfig(max_linger_ns=None, protected_share=0.5))
    # Half of 30 ms is left over: time for one batch of 10 ms, not for two.
    assert bench.burst(30, 5, slo=25) == ["a", "a", "b", "", ""]
    # An owner that takes the other half leaves nothing, however long that goes on.
    busy = Bench(*sharing(), config=PooledConfig(max_linger_ns=None, protected_share=0.5))
    for turn in range(100):
        busy.ask(20 * turn, DOGS, 60)
    assert busy.burst(1990, 4, slo=25) == ["a", "a", "", ""]
    # A second later it may take the time that the owner left.
    assert busy.burst(3000, 4, slo=25) == ["a", "a", "b", "b"]


def test_guests_are_not_booked_so_that_a_request_of_the_owner_would_be_late() -> None:
    bench = Bench(*sharing(dogs_slo_ms=40))
    agents = bench.burst(SECOND, 30, slo=200)
    assert agents.count("a") == 20
    assert agents.count("b") == 3  # 30 ms; then a dog needs 10 of its 40
    dog = bench.ask(SECOND, DOGS, 40)
    assert bench.agents[dog] == "b"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(12, 300)), max_size=60),
    st.lists(st.integers(20, 60), min_size=1, max_size=15),
)
def test_an_owner_within_its_share_is_served_whatever_guests_ask_for(
    cats: list[tuple[int, int]], gaps: list[int]
) -> None:
    """A dog every 20 ms at most, half of what its agent can do: none is refused or late.

    The book raises an error if anything is booked twice.
    """
    bench = Bench(*sharing(dogs_slo_ms=40), config=PooledConfig(None, protected_share=0.0))
    arrivals = [(SECOND + moment, CATS, slo) for moment, slo in cats]
    at = SECOND
    for gap in gaps:
        at += gap
        arrivals.append((at, DOGS, 40))
    dogs = []
    for ms, which, slo in sorted(arrivals, key=lambda each: each[0]):
        number = bench.ask(ms, which, slo)
        if which == DOGS:
            dogs.append(number)
    bench.tell(at + SECOND, Tick())
    assert not bench.refused & set(dogs)
    assert {bench.agents[number] for number in dogs} == {"b"}


def test_a_model_whose_agents_are_lost_is_served_by_pools_of_others() -> None:
    bench = Bench(*sharing())
    bench.tell(SECOND, AgentLost(AgentId("a")))
    assert bench.burst(SECOND + 1, 2, slo=25) == ["b", "b"]


def test_a_model_that_can_do_without_others_leaves_them_alone() -> None:
    bench = Bench(*sharing())
    for turn in range(20):
        assert bench.burst(SECOND + 20 * turn, 2, slo=25) == ["a", "a"]
    assert bench.dispatcher.statistics()["shared_batches"] == 0


def test_an_agent_that_lacks_the_guest_is_used_by_its_owner_only() -> None:
    """Time that is left is counted for the owner's pool, though guests see a part of it."""
    models = sharing(dogs_on="ab")
    guest = replace(pipeline(1, stage(0, "b", 10)), is_shared=True, pipeline_id="guest")
    bench = Bench(served(guest), models[1])
    assert bench.burst(SECOND, 2, slo=25) == ["b", "b"]
    assert bench.burst(SECOND, 2, slo=25, which=DOGS) == ["a", "a"]
