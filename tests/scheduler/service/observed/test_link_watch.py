"""Round trips of links in use are looked at, and another one is believed when it is no noise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.observed.link_watch import LinkWatch, links_in_use
from catenary_scheduler.planning.live import LinkFigures, ServerPair
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, PlanId, ServerId
from catenary_services.domain.plan import Chain, ChainHop, ModelPlan, Plan

MS = 1_000_000
PERIOD = 60_000 * MS
KNOWN = LinkFigures(40 * MS, 10_000_000)


def pair(letters: str) -> ServerPair:
    return ServerId(letters[0]), ServerId(letters[1])


def test_links_in_use_are_looked_at_in_turn_and_no_others() -> None:
    watch = LinkWatch(PERIOD)
    pairs = [pair("ab"), pair("ba")]
    assert watch.due(pairs, 0) is None  # their figures are known, so a look can wait
    assert watch.due(pairs, PERIOD) == pair("ab")
    watch.looked(pair("ab"), KNOWN, 40 * MS, PERIOD)
    assert watch.due(pairs, PERIOD) == pair("ba")
    watch.looked(pair("ba"), KNOWN, 0, PERIOD)  # nothing came back
    assert watch.due(pairs, 2 * PERIOD - 1) is None
    assert watch.due([pair("ba")], 2 * PERIOD) == pair("ba")
    assert watch.due([], 9 * PERIOD) is None


def test_a_longer_round_trip_counts_when_a_second_look_finds_the_like() -> None:
    watch = LinkWatch(PERIOD)
    watch.due([pair("ab")], 0)
    assert watch.looked(pair("ab"), KNOWN, 90 * MS, PERIOD) is None
    assert watch.due([pair("ab")], PERIOD) == pair("ab")  # at once
    changed = watch.looked(pair("ab"), KNOWN, 80 * MS, PERIOD + 1)
    assert changed == LinkFigures(80 * MS, KNOWN.bytes_per_second)
    assert watch.due([pair("ab")], PERIOD + 2) is None


def test_one_long_look_alone_is_noise() -> None:
    watch = LinkWatch(PERIOD)
    for number in range(1, 6):
        assert watch.looked(pair("ab"), KNOWN, 90 * MS, 2 * number * PERIOD) is None
        assert watch.looked(pair("ab"), KNOWN, 41 * MS, (2 * number + 1) * PERIOD) is None


def test_a_shorter_round_trip_counts_at_once() -> None:
    assert LinkWatch(PERIOD).looked(pair("ab"), KNOWN, 20 * MS, 0) == LinkFigures(
        20 * MS, KNOWN.bytes_per_second
    )


@given(st.integers(1, 10**9), st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_what_is_believed_was_never_longer_than_what_was_found(
    known_ns: int, found: list[int]
) -> None:
    """Of two looks in a row the shorter one counts, so load alone must last to be believed."""
    watch, known = LinkWatch(PERIOD), LinkFigures(known_ns, 1)
    for number, round_trip_ns in enumerate(found):
        changed = watch.looked(pair("ab"), known, round_trip_ns, number)
        if changed is not None:
            last = found[max(0, number - 1) : number + 1]
            assert changed.round_trip_ns in last
            assert changed.round_trip_ns < known.round_trip_ns or changed.round_trip_ns == min(last)
            known = changed


def test_links_in_use_are_those_of_chains_and_back() -> None:
    model = ModelKey("llm", "1")

    def chain(*agents: str) -> Chain:
        hops = [
            ChainHop(AgentId(agent), PartitionKey(model, at, at + 1), at, at + 1)
            for at, agent in enumerate(agents)
        ]
        return Chain("-".join(agents), tuple(hops), 1, 1)

    chains = (chain("a-0", "b-0", "c-0"), chain("a-0", "a-1"), chain("d-0"), chain("a-0", "x-0"))
    plan = Plan(PlanId("p"), (ModelPlan(model, 1, (), chains=chains),))
    servers = {AgentId(f"{name}-{n}"): ServerId(name) for name in "abcd" for n in (0, 1)}
    assert links_in_use(plan, servers) == {pair("ab"), pair("bc"), pair("ca")}
