"""The fair limiter in front of a simulated device, beside weighted max-min shares by definition."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_gateway.fairness.fair_limiter import FairLimiter, FairRequest, LimiterEntry

SECOND = 1_000_000_000


def max_min(demands: Mapping[str, float], shares: Mapping[str, float], total: float):
    """Weighted max-min by definition: whoever wants less than its part gets it, the others divide
    what is left."""
    given: dict[str, float] = {}
    while len(given) < len(demands):
        rest = {key for key in demands if key not in given}
        left = total - sum(given.values())
        weight = sum(shares[key] for key in rest)
        modest = {key for key in rest if demands[key] <= left * shares[key] / weight}
        if not modest:
            given |= {key: left * shares[key] / weight for key in rest}
        given |= {key: demands[key] for key in modest}
    return given


@dataclass
class Outcome:
    answered: int = 0
    late: int = 0
    refused: int = 0
    latencies: list[float] = field(default_factory=list)

    @property
    def asked(self) -> int:
        return self.answered + self.late + self.refused


@dataclass
class Device:
    """Serves batches by deadline at `capacity` per second; drops what would be late."""

    limiter: FairLimiter
    capacity: float = 80.0
    batch: int = 1
    service_s: float = 0.1
    slo_s: float = 0.5
    priorities: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    queue: list[tuple[int, float, int, LimiterEntry]] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    peak: float = 0.0
    clock_s: float = 0.0

    def run(self, rates: Mapping[str, float], seconds: float, seed: int = 1) -> None:
        """Poisson arrivals of every key for so long; outcomes are those of this run."""
        self.outcomes.clear()
        chance = random.Random(seed)
        events: list[tuple[float, int, str, object]] = []
        for key, rate in rates.items():
            self.outcomes.setdefault(key, Outcome())
            moment = self.clock_s + chance.expovariate(rate)
            while moment < self.clock_s + seconds:
                events.append((moment, len(events), "arrival", key))
                moment += chance.expovariate(rate)
        heapq.heapify(events)
        self._count, self._free = len(events), True
        while events:
            now, _, kind, what = heapq.heappop(events)
            if kind == "arrival":
                self._arrived(str(what), now)
            elif kind == "free":
                self._free = True
            else:
                self._answered(what, now)
            self._start(now, events, chance)
            self.peak = max(self.peak, self.limiter.unanswered)
            self.clock_s = now

    def _arrived(self, key: str, now: float) -> None:
        request = FairRequest(
            key,
            self.shares.get(key, 1.0),
            self.priorities.get(key, 0),
            budget_ns=int(self.slo_s * SECOND),
        )
        entry = self.limiter.admit(request, int(now * SECOND))
        if entry is None:
            self.outcomes[key].refused += 1
            return
        self._count += 1
        heapq.heappush(self.queue, (-request.priority, now + self.slo_s, self._count, entry))

    def _answered(self, entries: object, now: float) -> None:
        assert isinstance(entries, list)
        for entry in entries:
            self.limiter.answered(entry, int(now * SECOND))
            outcome = self.outcomes[entry.request.key]
            outcome.answered += 1
            outcome.latencies.append(now - entry.began_ns / SECOND)

    def _start(self, now: float, events: list, chance: random.Random) -> None:
        took: list[LimiterEntry] = []
        busy_s = self.batch / self.capacity
        while self._free and self.queue and len(took) < self.batch:
            _, deadline, _, entry = heapq.heappop(self.queue)
            if now + busy_s + self.service_s > deadline:
                self.limiter.lost(entry, int(now * SECOND))
                self.outcomes[entry.request.key].late += 1
            else:
                took.append(entry)
        if took:
            self._free = False
            self._count += 2
            heapq.heappush(
                events, (now + busy_s * chance.uniform(0.9, 1.1), self._count, "free", None)
            )
            heapq.heappush(events, (now + busy_s + self.service_s, self._count + 1, "done", took))

    def rates(self, seconds: float) -> dict[str, float]:
        return {key: each.answered / seconds for key, each in self.outcomes.items()}


def device(**facts) -> Device:
    return Device(FairLimiter(0), **facts)


@pytest.mark.parametrize("batch", [1, 8])
def test_three_times_the_load_is_answered_at_full_rate_and_refused_at_once(batch: int) -> None:
    under = device(batch=batch, service_s=0.15)
    under.run({"a": 240.0}, 3)
    # Before anything is known of the device, about what it answers in its objective is let in
    # in vain.
    assert under.outcomes["a"].late <= 2 * under.capacity * under.slo_s
    under.run({"a": 240.0}, 20)
    (outcome,) = under.outcomes.values()
    assert outcome.answered / 20 >= 0.93 * under.capacity
    assert outcome.late <= 0.03 * (outcome.late + outcome.refused)
    assert max(outcome.latencies) <= under.slo_s
    # What is unanswered is bounded by what the device answers within the objective.
    assert under.limiter.limit.value <= under.capacity * under.slo_s


def test_nobody_is_refused_while_the_device_keeps_up() -> None:
    easy = device()
    easy.run({"a": 40.0, "b": 20.0}, 20)
    assert all(each.refused == each.late == 0 for each in easy.outcomes.values())


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        ({"a": 200.0, "b": 100.0}, {"a": 1.0, "b": 1.0}),
        ({"a": 300.0, "b": 60.0}, {"a": 1.0, "b": 1.0}),
        ({"a": 200.0, "b": 200.0}, {"a": 3.0, "b": 1.0}),
        ({"a": 400.0, "b": 80.0, "c": 80.0}, {"a": 1.0, "b": 1.0, "c": 1.0}),
        ({"a": 300.0, "b": 10.0, "c": 150.0}, {"a": 1.0, "b": 1.0, "c": 2.0}),
        ({"a": 200.0, "b": 40.0}, {"a": 1.0, "b": 1.0}),
    ],
)
def test_keys_get_their_weighted_max_min_shares(
    rates: dict[str, float], shares: dict[str, float]
) -> None:
    crowded = device(shares=shares)
    crowded.run(rates, 2)  # until the limiter knows the device everybody is let in
    crowded.run(rates, 16)
    asked = {key: each.asked / 16 for key, each in crowded.outcomes.items()}
    wanted = max_min(asked, shares, crowded.capacity)
    got = crowded.rates(16)
    assert sum(got.values()) >= 0.95 * crowded.capacity
    for key, rate in wanted.items():
        assert got[key] == pytest.approx(rate, rel=0.15), (key, got, wanted)


def test_what_an_idle_key_leaves_goes_to_the_others() -> None:
    shared = device()
    shared.run({"a": 240.0, "b": 240.0}, 10)
    shared.run({"a": 240.0}, 20)
    assert shared.rates(20)["a"] >= 0.93 * shared.capacity


def test_urgent_requests_are_not_kept_out_by_others() -> None:
    mixed = device(priorities={"urgent": 1})
    mixed.run({"urgent": 60.0, "usual": 180.0}, 20)
    urgent, usual = mixed.outcomes["urgent"], mixed.outcomes["usual"]
    assert urgent.answered >= 0.97 * (urgent.answered + urgent.late + urgent.refused)
    assert usual.answered / 20 >= 0.6 * (mixed.capacity - 60)


def test_latency_is_as_before_as_soon_as_the_load_has_fallen() -> None:
    after = device()
    after.run({"a": 240.0}, 20)
    after.run({"a": 40.0}, 10)
    outcome = after.outcomes["a"]
    assert outcome.refused == 0
    assert sorted(outcome.latencies)[int(0.9 * len(outcome.latencies))] < 0.2


def test_requests_that_ask_for_the_impossible_do_not_keep_others_out() -> None:
    limiter = FairLimiter(0)
    limiter.limit.usual_budget_ns = SECOND
    for at in range(1, 400):
        now = at * SECOND // 50
        usual = limiter.admit(FairRequest("a", 1.0, 0, budget_ns=SECOND), now)
        hasty = limiter.admit(FairRequest("b", 1.0, 0, budget_ns=1_000_000), now)
        assert usual is not None
        assert hasty is not None
        limiter.lost(hasty, now + 1_000_000)
        limiter.answered(usual, now + 15_000_000)
    assert math.isinf(limiter.limit.value)


def test_a_request_larger_than_the_limit_need_not_wait_for_an_empty_moment() -> None:
    limiter = FairLimiter(0)
    limiter.limit.value = 20.0
    for _ in range(10):
        assert limiter.admit(FairRequest("a", 1.0, 0, budget_ns=SECOND), 0) is not None
    large = limiter.admit(FairRequest("b", 1.0, 0, size=64.0, cost=64.0, budget_ns=SECOND), 1)
    assert large is not None
    assert limiter.unanswered == 74.0
    assert limiter.admit(FairRequest("a", 1.0, 0, budget_ns=SECOND), 2) is None


def test_a_pause_is_no_overload() -> None:
    limiter, inside = FairLimiter(0), []
    for at in range(600):
        now = at * SECOND // 50
        entry = limiter.admit(FairRequest("a", 1.0, 0, budget_ns=5 * SECOND), now)
        assert entry is not None, at
        inside.append(entry)
        # Between the fourth and the seventh second nobody is answered, then everybody at once.
        if not 4 * SECOND < now < 7 * SECOND:
            while inside and now - inside[0].began_ns >= SECOND // 20:
                limiter.answered(inside.pop(0), now)
    assert math.isinf(limiter.limit.value)


def test_requests_that_a_dead_cluster_lost_do_not_keep_later_ones_out() -> None:
    limiter, inside = FairLimiter(0), []
    for at in range(1, 1_000):
        now = at * SECOND // 50
        entry = limiter.admit(FairRequest("a", 1.0, 0, budget_ns=SECOND), now)
        assert entry is not None, at
        inside.append(entry)
        while inside and now - inside[0].began_ns >= SECOND:
            limiter.lost(inside.pop(0), now)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "answered", "lost", "left"]),
            st.sampled_from("abc"),
            st.integers(-2, 2),
            st.integers(1, 5),
            st.integers(0, SECOND // 2),
        ),
        max_size=120,
    )
)
def test_what_is_unanswered_is_what_was_let_in_and_has_not_left(
    steps: list[tuple[str, str, int, int, int]],
) -> None:
    limiter, now, inside = FairLimiter(0), 0, []
    limiter.limit.value = 12.0
    for kind, key, priority, size, wait in steps:
        now += wait
        if kind == "admit" or not inside:
            entry = limiter.admit(FairRequest(key, 1.0, priority, float(size), 1.0, SECOND), now)
            if entry is not None:
                inside.append(entry)
        else:
            entry = inside.pop(0)
            leave = {"answered": limiter.answered, "lost": limiter.lost}.get(kind)
            if leave is None:
                limiter.left(entry)
            else:
                leave(entry, now)
            limiter.left(entry)
        assert limiter.unanswered == pytest.approx(sum(entry.request.size for entry in inside))
        # One request always gets in, however large.
        assert inside or limiter.would_admit(FairRequest("z", 1.0, 0, 99.0, 1.0, SECOND), now)


def test_advice_grows_with_what_is_refused() -> None:
    under = device()
    under.run({"a": 100.0}, 6)
    little = under.limiter.retry_after_ns()
    over = device()
    over.run({"a": 800.0}, 6)
    assert 100_000_000 <= little <= over.limiter.retry_after_ns() <= 5 * SECOND
