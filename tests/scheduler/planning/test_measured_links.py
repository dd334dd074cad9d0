"""What was measured of the links between servers decides where plans cut, and what they promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.latency import ClusterLines
from catenary_scheduler.planning.live import (
    LOCAL_WAY_NS,
    NO_LINKS,
    USUAL_FRAME_NS,
    ChainCluster,
    ChainCosts,
    GenerationCost,
    LinkFigures,
    ServerLinks,
    SessionShape,
    chain_jobs,
    device_groups,
    explain_chains,
    solve_job,
)
from catenary_scheduler.replanning.chain_builder import compose
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.plan import Agent, ChainHop
from scheduling_cases.sized_decoders import (
    BLOCKS,
    decoder_table,
    served,
    sized_agent,
    sized_load,
    sized_model,
)

LLM = ModelKey("llm", "1")
MS = 1_000_000
SHAPE = SessionShape(10, 10)
names = st.sampled_from("abcd")
figures = st.builds(LinkFigures, st.integers(1, 10**10), st.integers(1, 2 * 10**9))
any_links = st.dictionaries(st.tuples(names, names), figures, max_size=12).map(
    lambda found: links({pair: each for pair, each in found.items() if pair[0] != pair[1]})
)


def links(measured: dict[tuple[str, str], LinkFigures]) -> ServerLinks:
    return ServerLinks(
        {(ServerId(one), ServerId(other)): each for (one, other), each in measured.items()}
    )


def both_ways(one: str, other: str, round_trip_ns: int, rate: int) -> ServerLinks:
    found = LinkFigures(round_trip_ns, rate)
    return links({(one, other): found, (other, one): found})


def hop(name: str, first: int, last: int) -> ChainHop:
    return ChainHop(AgentId(name), PartitionKey(LLM, first, last), first, last)


def agents(letters: str = "abcd") -> list[Agent]:
    return [sized_agent(name, 900) for name in letters]


# ---- figures ----


def test_a_card_is_as_fast_as_the_fastest_link_over_it() -> None:
    """c is far away: that says nothing about the cards of a and b, which are near each other."""
    slow, fast = LinkFigures(40 * MS, 6_000_000), LinkFigures(MS, 500_000_000)
    known = links(dict.fromkeys(("ac", "ca", "bc", "cb"), slow) | {("a", "b"): fast})
    seen = {each.agent_id: each.link_bytes_per_second for each in known.seen(agents("abcd"))}
    assert seen == {"a": 6_000_000, "b": 6_000_000, "c": 6_000_000, "d": 10**9}
    known = links({**dict(known.figures), ("b", "a"): fast})  # type: ignore[dict-item]
    seen = {each.agent_id: each.link_bytes_per_second for each in known.seen(agents("abcd"))}
    assert seen == {"a": 500_000_000, "b": 500_000_000, "c": 6_000_000, "d": 10**9}


@given(any_links)
def test_nobody_is_faster_than_he_states(known: ServerLinks) -> None:
    for agent, seen in zip(agents(), known.seen(agents()), strict=True):
        assert 0 < seen.link_bytes_per_second <= agent.link_bytes_per_second
        assert replace(seen, link_bytes_per_second=10**9) == agent
        for source in "abcd":
            rate = known.rate(ServerId(source), agent)
            assert 0 < rate <= agent.link_bytes_per_second
            if source == agent.server:
                assert rate == 10**9


@given(any_links)
def test_ways_are_alike_in_both_directions_where_only_one_was_measured(
    known: ServerLinks,
) -> None:
    for (one, other), found in known.figures.items():
        longer_ns = max(0.0, found.round_trip_ns / 2 - LOCAL_WAY_NS)
        assert known.longer_ns(one, other) == longer_ns
        if (other, one) not in known.figures:
            assert known.longer_ns(other, one) == longer_ns
    assert known.longer_ns(ServerId("a"), ServerId("a")) == 0.0


@given(any_links)
def test_factors_are_never_below_one(known: ServerLinks) -> None:
    factors = known.factors(agents("abc"), USUAL_FRAME_NS)
    assert all(factor >= 1.0 for factor in factors.values())
    assert {link.split()[-1] for _, link in factors} <= set("abc")


def test_classes_of_agents_are_planned_with_the_slowest_card_that_was_measured() -> None:
    seen = both_ways("a", "b", 40 * MS, 6_250_000).seen(agents("ab"))
    (group,) = device_groups(seen)
    assert group.slowest_link == 6_250_000
    assert NO_LINKS.seen(agents("ab")) == tuple(agents("ab"))


# ---- sessions on chains ----


def costs(known: ServerLinks) -> ChainCosts:
    measured = {
        (AgentId(name), PartitionKey(LLM, 0, BLOCKS)): GenerationCost(0, MS, MS, 0)
        for name in "abcd"
    }
    return ChainCosts(decoder_table(), agents(), measured, LLM, SHAPE, links=known)


def test_every_token_takes_the_measured_way_and_comes_back() -> None:
    chain = [hop("a", 0, 3), hop("b", 3, BLOCKS)]
    usual = costs(NO_LINKS).service_ns(chain)
    far = costs(both_ways("a", "b", 60 * MS, 10**9)).service_ns(chain)
    # 10 tokens, there and back, take 29.75 ms longer each way.
    assert far - usual == pytest.approx(2 * 10 * 29.75 * MS, rel=1e-6)
    near = costs(both_ways("a", "b", MS // 2, 10**9)).service_ns(chain)
    assert near == usual
    alone = [hop("a", 0, BLOCKS)]
    assert costs(both_ways("a", "b", 60 * MS, 1)).service_ns(alone) == costs(NO_LINKS).service_ns(
        alone
    )


def test_prompts_take_the_measured_rate() -> None:
    chain = [hop("a", 0, 3), hop("b", 3, BLOCKS)]
    slow = costs(both_ways("a", "b", MS // 2, 32_000)).service_ns(chain)
    # Ten rows of 32 bytes.
    assert slow - costs(NO_LINKS).service_ns(chain) == pytest.approx(10 * MS, rel=1e-3)


@given(any_links)
def test_links_never_make_a_chain_faster(known: ServerLinks) -> None:
    for chain in ([hop("a", 0, 3), hop("b", 3, BLOCKS)], [hop("d", 0, BLOCKS)]):
        assert costs(known).service_ns(chain) >= costs(NO_LINKS).service_ns(chain)


@given(any_links)
def test_the_planner_gets_times_of_links_only_where_one_is_slow(known: ServerLinks) -> None:
    ids = [AgentId(name) for name in "abcd"]
    found, usual_s = costs(known).links(ids), costs(NO_LINKS).communication_s(ids[0])
    chains = [[hop(one, 0, 3), hop(other, 3, BLOCKS)] for one, other in permutations("abcd", 2)]
    longest_ns = max(
        costs(known).service_ns(chain) - costs(NO_LINKS).service_ns(chain) for chain in chains
    )
    assert (found is not None) == (longest_ns > 0.05 * usual_s * 1e9 + 1)
    if found is not None:
        assert all(usual_s * 0.999 <= seconds <= 1_000.0 for seconds in found.values())


def test_latency_lines_have_the_measured_ways_of_a_step() -> None:
    measured = {
        (AgentId(name), PartitionKey(LLM, first, last)): GenerationCost(0, MS, MS, 0)
        for name, first, last in (("a", 0, 3), ("b", 3, BLOCKS))
    }
    chain = [hop("a", 0, 3), hop("b", 3, BLOCKS)]

    def lines(known: ServerLinks) -> ClusterLines:
        return ClusterLines(decoder_table(), agents("ab"), measured, LLM, links=known)

    usual, far = (
        lines(NO_LINKS).lines(chain),
        lines(both_ways("a", "b", 60 * MS, 10**9)).lines(chain),
    )
    assert usual is not None
    assert far is not None
    assert far.decode(1, 0) - usual.decode(1, 0) == pytest.approx(2 * 29.75 * MS)
    assert far.prefill_ns - usual.prefill_ns == pytest.approx(29.75 * MS)


# ---- plans ----


def cluster(known: ServerLinks, letters: str = "abx") -> ChainCluster:
    """Agents with room for half of the model each, of which x is the fastest."""
    measured = {
        (AgentId(name), PartitionKey(LLM, 0, 3)): GenerationCost(0, pace, pace, 0)
        for name, pace in (("a", MS), ("b", MS), ("x", MS // 2))
    }
    load = sized_load(sized_model(LLM, 1))
    return ChainCluster(
        tuple(sized_agent(name, 700) for name in letters),
        (load,),
        {},
        measured,
        Placement(()),
        links=known,
    )


def used(known: ServerLinks) -> set[str]:
    return {str(each.agent) for chain in served(cluster(known)).chains for each in chain.hops}


def test_the_plan_changes_when_a_link_degrades() -> None:
    assert "x" in used(NO_LINKS)
    near = links(
        {(one, other): LinkFigures(MS // 2, 10**9) for one, other in ("ax", "xa", "bx", "xb")}
    )
    assert used(near) == used(NO_LINKS)
    slow = LinkFigures(60 * MS, 5_000_000)
    far = links(dict.fromkeys(("ax", "xa", "bx", "xb"), slow))
    assert used(far) == {"a", "b"}


def test_some_of_the_servers_keep_the_links_between_them() -> None:
    (job,) = chain_jobs(cluster(both_ways("a", "x", 60 * MS, 10**9)))
    near, far = job.task.servers[:2], (job.task.servers[0], job.task.servers[2])
    assert job.task.links is not None
    for servers in (near, far):
        names = {server.name for server in servers}
        part = job.task.among(servers)
        assert part.links is not None
        assert {end for pair in part.links for end in pair} == {*names, None}
        assert all(job.task.links[pair] == seconds for pair, seconds in part.links.items())


def test_an_explanation_names_the_link_that_binds() -> None:
    def explained(known: ServerLinks, letters: str) -> str:
        (job,) = chain_jobs(cluster(known, letters))
        return " ".join(explain_chains(job, solve_job(job, compose)))

    far = explained(both_ways("a", "x", 60 * MS, 10**9), "ax")
    assert "the link that binds is the one from" in far
    # Ten tokens take 30.75 ms there and 29.75 ms longer than usual back.
    assert "a session takes 0.605 s of its" in far
    assert "in both directions" in far
    assert "(measured: a round trip of 60 ms, 1,000.0 MB/s)" in far
    near = explained(both_ways("a", "x", MS // 2, 10**9), "ax")
    assert "a session takes 0.01 s of its" in near
    assert "(measured: a round trip of 0.5 ms" in near
    assert "(nobody has measured it)" in explained(NO_LINKS, "ax")
    everywhere = links(
        dict(both_ways("a", "x", 60 * MS, 10**9).figures)
        | dict(both_ways("b", "x", 60 * MS, 10**9).figures)
    )  # type: ignore[arg-type]
    assert "from a to b" in explained(everywhere, "abx")
