"""Which link is measured when: one at a time, each pair of machines, politely, and for long."""

from __future__ import annotations

from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.observed.link_schedule import (
    ANSWER_NS,
    IN_USE_FRESH_S,
    LOOK_NS,
    MOST_BUSY,
    MOST_SERVERS,
    SPACING_NS,
    LinkEnd,
    LinkOrder,
    LinkOutcome,
    LinkSchedule,
)
from catenary_scheduler.observed.links import FRESH_S, MeasuredLinks
from catenary_scheduler.planning.live import LinkFigures, ServerPair
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.records import measurements_of
from catenary_services.domain.ids import AgentId, ServerId
from scheduling_cases.stored_tables import stored_of

SECOND = 1_000_000_000
HOUR_S = 3600
FIGURES = LinkFigures(400_000, 6_250_000)


def end(server: str, agent: str = "", address: str = "") -> LinkEnd:
    name = agent or f"{server}-0"
    return LinkEnd(AgentId(name), ServerId(server), address or f"10.0.0.{server}")


class Clockwork:
    """A schedule on a clock that only the test moves."""

    def __init__(self, *ends: LinkEnd) -> None:
        self.links = MeasuredLinks()
        self.schedule = LinkSchedule(self.links, 100)
        self.ends = list(ends)
        self.in_use: set[ServerPair] = set()
        self.now = 0
        self.began_unix_s = 1_790_000_000

    @property
    def unix_s(self) -> int:
        return self.began_unix_s + self.now // SECOND

    def next(self, within_s: int = 60) -> LinkOrder | None:
        """Returns the next order, looked for once a second."""
        for _ in range(within_s):
            order = self.schedule.next_order(self.ends, self.now, self.unix_s, self.in_use)
            if order is not None:
                return order
            self.now += SECOND
        return None

    def answer(
        self,
        order: LinkOrder,
        outcome: LinkOutcome = LinkOutcome.MEASURED,
        found: LinkFigures = FIGURES,
    ) -> None:
        figures = found if outcome is LinkOutcome.MEASURED else None
        agent = order.source.agent
        taken = self.schedule.answered(agent, order.number, outcome, figures, self.now, self.unix_s)
        assert taken == order

    def all(self, within_s: int = 60) -> list[ServerPair]:
        found = []
        while (order := self.next(within_s)) is not None:
            found.append(order.pair)
            self.answer(order)
        return found


def test_every_pair_of_machines_is_measured_in_both_directions_once() -> None:
    work = Clockwork(end("a"), end("a", "a-1"), end("b"), end("c"))
    measured = work.all()
    assert sorted(measured) == sorted(permutations("abc", 2))
    assert {pair for pair, _ in work.links.all()} == set(measured)
    assert work.links.known.figures["a", "b"] == FIGURES  # type: ignore[index]


def test_one_at_a_time_and_no_more_than_thirty_a_minute() -> None:
    work = Clockwork(*(end(f"{number}") for number in range(8)))
    orders = []
    for _ in range(120):
        order = work.schedule.next_order(work.ends, work.now, work.unix_s)
        if order is not None:
            orders.append(work.now)
            assert work.schedule.next_order(work.ends, work.now, work.unix_s) is None
            work.answer(order)
        work.now += SECOND // 2
    assert len(orders) == 30
    assert min(b - a for a, b in pairwise(orders)) >= SPACING_NS


def test_with_very_many_machines_links_between_the_first_ones_are_measured() -> None:
    work = Clockwork(*(end(f"m{number:03}") for number in range(MOST_SERVERS + 40)))
    seen = set()
    for _ in range(200):
        order = work.next()
        assert order is not None
        seen.update(order.pair)
        work.answer(order)
    assert len(seen) <= MOST_SERVERS


def test_a_link_is_measured_again_after_hours_or_at_another_address() -> None:
    work = Clockwork(end("a"), end("b"))
    assert len(work.all()) == 2
    work.now += (FRESH_S - HOUR_S) * SECOND
    assert work.next() is None
    work.ends = [end("a"), end("b", address="10.9.9.9")]
    assert sorted(work.all()) == [("a", "b"), ("b", "a")]
    work.now += (FRESH_S + 60) * SECOND
    assert sorted(work.all()) == [("a", "b"), ("b", "a")]


def test_a_new_leader_measures_nothing_that_is_known() -> None:
    work = Clockwork(end("a"), end("b"))
    work.all()
    stored = measurements_of(stored_of(RedisTable.MEASURED, work.links.records()))
    after = Clockwork(*work.ends)
    after.links.restore(stored.server_links)
    after.began_unix_s = work.unix_s + HOUR_S
    assert after.links.known == work.links.known
    assert after.links.records() == work.links.records()
    assert after.next() is None
    after.ends.append(end("c"))
    assert len(after.all()) == 4


def test_agents_at_work_are_left_alone_longer_each_time_and_then_measured_all_the_same() -> None:
    work = Clockwork(end("a"), end("b"))
    pauses: dict[ServerPair, list[int]] = {("a", "b"): [], ("b", "a"): []}  # type: ignore[dict-item]
    while True:
        order = work.next(10_000)
        assert order is not None
        pauses[order.pair].append(work.now)
        if order.even_if_busy:
            break
        work.answer(order, LinkOutcome.BUSY)
    moments = pauses[order.pair]
    assert len(moments) == MOST_BUSY + 1
    waits = [b - a for a, b in pairwise(moments)]
    assert all(late >= 1.8 * early for early, late in pairwise(waits))


def test_a_link_that_fails_or_whose_agent_never_answers_holds_up_no_other() -> None:
    work = Clockwork(end("a"), end("b"), end("c"))
    first = work.next()
    assert first is not None
    began = work.now
    second = work.next()  # no answer came
    assert second is not None
    assert second.pair != first.pair
    assert work.now - began >= ANSWER_NS
    work.answer(second, LinkOutcome.FAILED)
    third = work.next()
    assert third is not None
    assert third.pair not in (first.pair, second.pair)
    late = work.schedule.answered(
        first.source.agent, first.number, LinkOutcome.MEASURED, FIGURES, work.now, work.unix_s
    )
    assert late is None
    assert not list(work.links.all())


def test_when_the_agent_that_measures_is_gone_the_next_link_has_its_turn() -> None:
    work = Clockwork(end("a"), end("b"), end("c"))
    order = work.next()
    assert order is not None
    work.ends = [each for each in work.ends if each != order.source]
    began = work.now
    following = work.next()
    assert following is not None
    assert work.now - began <= 2 * SPACING_NS


def test_only_the_agent_that_was_asked_can_answer() -> None:
    work = Clockwork(end("a"), end("b"))
    order = work.next()
    assert order is not None
    for agent, number in (
        (order.target.agent, order.number),
        (order.source.agent, order.number + 1),
    ):
        said = LinkOutcome.MEASURED, FIGURES, work.now, work.unix_s
        assert work.schedule.answered(agent, number, *said) is None
    assert not list(work.links.all())


def test_processes_that_came_to_share_a_host_have_no_link_any_more() -> None:
    work = Clockwork(end("a"), end("b"))
    work.all()
    work.now += (FRESH_S + 60) * SECOND
    order = work.next()
    assert order is not None
    work.answer(order, LinkOutcome.SAME_HOST)
    assert order.pair not in work.links.known.figures


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(LinkOutcome)),
            st.sets(st.sampled_from("abcd")),
            st.integers(0, 100),
        ),
        max_size=60,
    )
)
def test_whatever_comes_one_order_is_under_way_and_only_to_who_is_there(
    steps: list[tuple[LinkOutcome, set[str], int]],
) -> None:
    work = Clockwork()
    waiting: LinkOrder | None = None
    numbers = []
    for outcome, there, seconds in steps:
        work.ends = [end(name) for name in sorted(there)]
        work.now += seconds * SECOND
        order = work.schedule.next_order(work.ends, work.now, work.unix_s)
        if order is not None:
            assert order.source in work.ends
            assert order.target in work.ends
            assert order.source.server != order.target.server
            numbers.append(order.number)
            waiting = order
        if waiting is not None and seconds % 2:
            said = outcome, FIGURES, work.now, work.unix_s
            work.schedule.answered(waiting.source.agent, waiting.number, *said)
            waiting = None
    assert numbers == sorted(set(numbers))
    assert all(pair[0] != pair[1] for pair, _ in work.links.all())


# ---- links that chains pass ----

PAIR = (ServerId("a"), ServerId("b"))


def in_use() -> Clockwork:
    """Two machines whose links are known, one of which chains pass."""
    work = Clockwork(end("a"), end("b"))
    work.all(5)
    work.in_use = {PAIR}
    return work


def test_a_link_in_use_is_looked_at_every_minute_also_at_work() -> None:
    work = in_use()
    began = work.now
    for _ in range(3):
        order = work.next(200)
        assert order is not None
        assert (order.pair, order.is_look, order.even_if_busy) == (PAIR, True, True)
        work.answer(order, found=LinkFigures(FIGURES.round_trip_ns + 50_000, 1))
        assert work.links.known.figures[PAIR] == FIGURES  # a look tells no rate, and this no change
    assert LOOK_NS * 3 <= work.now - began <= LOOK_NS * 3 + 40 * SECOND


def test_a_link_that_became_long_is_measured_in_full_after_two_looks() -> None:
    work = in_use()
    longer = LinkFigures(50 * FIGURES.round_trip_ns, 1)
    first = work.next(200)
    assert first is not None
    work.answer(first, found=longer)
    assert work.links.known.figures[PAIR] == FIGURES
    second = work.next(10)
    assert second is not None
    assert second.is_look
    work.answer(second, found=longer)
    back = (PAIR[1], PAIR[0])
    for pair in (PAIR, back):  # a round trip is the same in both directions
        assert work.links.known.figures[pair] == LinkFigures(longer.round_trip_ns, 6_250_000)
    for pair in (PAIR, back):
        whole = work.next(10)
        assert whole is not None
        assert (whole.pair, whole.is_look) == (pair, False)
        work.answer(whole, found=LinkFigures(longer.round_trip_ns, 1_000_000))
        assert work.links.known.figures[pair] == LinkFigures(longer.round_trip_ns, 1_000_000)
    assert work.next(40) is None


def test_looks_and_measurements_of_unknown_links_take_turns() -> None:
    servers = "abcdefgh"
    work = Clockwork(*(end(name) for name in servers))
    pairs = list(permutations(servers, 2))
    work.in_use = {(ServerId(a), ServerId(b)) for a, b in pairs[-20:]}
    orders = []
    for _ in pairs:
        order = work.next()
        assert order is not None
        orders.append(order)
        work.answer(order)
    assert {order.pair for order in orders[:20]} == work.in_use  # these first
    # A minute later the first of them are due, while others are not known yet.
    looks = [order.is_look for order in orders]
    first = looks.index(True)
    assert looks[first:] == ([True, False] * len(looks))[: len(looks) - first]
    assert first <= 32


def test_a_look_that_is_not_answered_is_made_again_a_period_later() -> None:
    work = in_use()
    order = work.next(200)
    assert order is not None
    work.now += ANSWER_NS + 10 * SECOND
    assert work.next(30) is None
    again = work.next(60)
    assert again is not None
    assert again.is_look
    assert work.links.known.figures[PAIR] == FIGURES


def test_a_link_in_use_is_measured_in_full_again_sooner_than_others() -> None:
    work = in_use()
    work.now += (IN_USE_FRESH_S + 60) * SECOND
    seen = set()
    for _ in range(4):
        order = work.next(10)
        if order is not None:
            seen.add((order.pair, order.is_look))
            work.answer(order)
    assert seen == {(PAIR, False)}


def test_a_whole_measurement_at_work_does_not_make_a_link_in_use_longer_by_itself() -> None:
    work = in_use()
    work.now += (IN_USE_FRESH_S + 60) * SECOND
    order = work.next(10)
    assert order is not None
    assert not order.is_look
    work.answer(order, found=LinkFigures(9 * FIGURES.round_trip_ns, 5_000_000))
    assert work.links.known.figures[PAIR] == LinkFigures(FIGURES.round_trip_ns, 5_000_000)
    look = work.next(10)  # at once
    assert look is not None
    assert look.is_look
    work.answer(look, found=LinkFigures(8 * FIGURES.round_trip_ns, 1))
    assert work.links.known.figures[PAIR] == LinkFigures(8 * FIGURES.round_trip_ns, 5_000_000)
