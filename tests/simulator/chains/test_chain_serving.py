"""Sessions over composed chains: against exact queueing theory, and by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from catenary_lab.chains.exact import one_chain_response_s, two_chains_response_s
from catenary_lab.policies import seeded
from catenary_scheduler.planning.chains import (
    ComposedChain,
    ComposedHop,
    Composition,
    HostedBlocks,
    best_composition,
    compose,
)
from catenary_simulator.arrivals import PoissonArrivals
from catenary_simulator.chains.cluster import (
    ChainsCluster,
    CommunicationCost,
    DecoderModel,
    GpuSlice,
    ServerSite,
    cluster_of,
)
from catenary_simulator.chains.serve import ReplayEvaluator, serve_chains
from catenary_simulator.chains.workload import SessionWorkload, exponential

GPU = GpuSlice("gpu", memory_gb=10, tflops=1, bandwidth_gb_per_ms=1, block_ms=100)
MODEL = DecoderModel(
    "model", blocks=10, block_gb=0.5, cache_gb=0.1, hidden_size=64, parameters_per_block=1
)
ONE_WAY = CommunicationCost("session", overhead_ms=0)
POLICIES = ("jffc", "jsq", "sa-jsq", "jiq", "sed")


def cluster(*rtts_ms: float) -> ChainsCluster:
    """Every server could host the whole model: a session takes 1 s and the round trip."""
    places = [ServerSite(f"server-{number}", GPU, rtt) for number, rtt in enumerate(rtts_ms)]
    return cluster_of(MODEL, places, ONE_WAY)


def whole_on_each(servers: ChainsCluster, *capacities: int) -> Composition:
    hosted = tuple(HostedBlocks(each.name, 0, 10, 10**6) for each in servers.servers)
    chains = tuple(
        ComposedChain((ComposedHop(each.name, 0, 10),), capacity, 1.0 + each.rtt_ms / 1000)
        for each, capacity in zip(servers.servers, capacities, strict=True)
    )
    return Composition(1, hosted, chains, 1.0)


def work(rate_per_s: float, count: int, seed: int = 1) -> SessionWorkload:
    return exponential(PoissonArrivals(), rate_per_s, (2000, 20), count, seed)


def mean_of_runs(
    servers: ChainsCluster, composition: Composition, rate: float
) -> tuple[float, float]:
    """Returns the mean response over independent runs, and its standard error."""
    means = [
        serve_chains(
            servers, composition, "jffc", work(rate, 2500, seed), checked=True
        ).mean_response_s
        for seed in range(1, 7)
    ]
    return float(np.mean(means)), float(np.std(means, ddof=1) / len(means) ** 0.5)


def test_one_chain_behaves_as_the_exact_formula_says() -> None:
    servers = cluster(0.0)
    exact = one_chain_response_s(4, 1.0, 2.8)
    mean, error = mean_of_runs(servers, whole_on_each(servers, 4), 2.8)
    assert error < 0.05 * exact
    assert mean == pytest.approx(exact, abs=4 * error)


def test_two_chains_behave_as_the_exact_formula_says() -> None:
    servers = cluster(0.0, 2000.0)
    exact = float(two_chains_response_s((3, 3), (Fraction(1), Fraction(1, 3)), Fraction(3)))
    mean, error = mean_of_runs(servers, whole_on_each(servers, 3, 3), 3.0)
    assert error < 0.05 * exact
    assert mean == pytest.approx(exact, abs=4 * error)


def test_jffc_is_the_best_policy_under_load() -> None:
    servers = cluster(0.0, 500.0, 3000.0)
    composition = whole_on_each(servers, 2, 2, 4)
    workload = work(0.85 * composition.total_rate_per_s, 2500)
    means = {
        policy: serve_chains(
            servers, composition, seeded(policy, 1), workload, checked=True
        ).mean_response_s
        for policy in POLICIES
    }
    assert min(means, key=lambda each: means[each]) == "jffc"
    assert means["jffc"] <= means["sa-jsq"] < means["jsq"] < means["jiq"]


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_runs_and_others_do_not(policy: str) -> None:
    servers = cluster(0.0, 100.0, 100.0)
    composition = whole_on_each(servers, 2, 2, 2)
    first, again = (
        serve_chains(servers, composition, seeded(policy, 1), work(4.0, 400), checked=True)
        for _ in range(2)
    )
    assert np.array_equal(first.responses_s, again.responses_s)
    other = serve_chains(servers, composition, seeded(policy, 2), work(4.0, 400, seed=2))
    assert not np.array_equal(first.responses_s, other.responses_s)


def test_sessions_wait_in_order_of_arrival_and_take_what_their_chain_takes() -> None:
    servers = cluster(0.0, 1000.0)
    arrived = [0, 100_000_000, 200_000_000, 300_000_000]
    workload = SessionWorkload(arrived, [1.0, 0.5, 1.0, 2.0], [2000.0] * 4, [20.0] * 4)
    result = serve_chains(servers, whole_on_each(servers, 1, 1), "jffc", workload, checked=True)
    # 0 s: fast chain until 1.0; 0.1 s: slow one until 1.1; then two wait and take them in turn.
    assert result.waits_s.tolist() == pytest.approx([0.0, 0.0, 0.8, 0.8])
    assert result.services_s.tolist() == pytest.approx([1.0, 1.0, 1.0, 4.0])
    assert result.to_json()["mean_wait_s"] == pytest.approx(0.4)


def test_times_of_a_session_follow_its_tokens() -> None:
    model = DecoderModel(
        "llm",
        blocks=4,
        block_gb=0.4,
        cache_gb=0.1,
        hidden_size=64,
        parameters_per_block=1,
        gflop_per_token=2,
        overhead_ms=1,
        input_tokens=100,
        output_tokens=10,
    )
    gpu = GpuSlice("gpu", memory_gb=10, tflops=100, bandwidth_gb_per_ms=0.2)
    servers = cluster_of(model, [ServerSite("a", gpu, 30.0)], CommunicationCost(), compute_factor=3)
    composition = compose(servers.task(0.1), 1)
    workload = SessionWorkload([0], [1.0], [500.0], [6.0])
    result = serve_chains(servers, composition, "jffc", workload, checked=True)
    per_block_ms = 1 + 0.02 * 500 + 2.0 * 5  # overhead, prefill, decoding after the first token
    expected = (6 * (30 + 18) + 3 * 4 * per_block_ms) / 1000
    assert result.services_s[0] == pytest.approx(expected)


def test_replaying_bursts_reserves_more_cache_than_the_mean_rate_says() -> None:
    servers = cluster_of(
        MODEL, [ServerSite(f"s{number}", GPU, 5.0) for number in range(6)], ONE_WAY
    )
    burst = [second * 10**10 + number for second in range(4) for number in range(100)]
    workload = SessionWorkload(burst, [1.0] * 400, [2000.0] * 400, [20.0] * 400)
    replayed = ReplayEvaluator(servers, workload)
    task = servers.task(workload.rate_per_s)
    by_bound, by_replay = best_composition(task, "lower"), best_composition(task, replayed)
    assert by_replay.capacity > by_bound.capacity
    assert replayed(by_replay) < 0.9 * replayed(by_bound)
    assert replayed(compose(task, 10**6)) == float("inf")


@pytest.mark.parametrize("seed", range(8))
def test_the_replay_by_which_c_is_tuned_gives_what_the_dispatcher_gives(seed: int) -> None:
    """The scheduler tunes its chains by the replay, the simulator runs the dispatcher itself."""
    chance = np.random.default_rng(seed)
    servers = cluster_of(
        MODEL,
        [ServerSite(f"s{number}", GPU, float(rtt)) for number, rtt in enumerate((5, 40, 40, 300))],
        CommunicationCost(),
    )
    composition = best_composition(servers.task(0.4))
    count = 400
    moments = np.cumsum(chance.exponential(chance.choice([0.001, 0.02], count)) * 1e9).astype(int)
    lengths = chance.integers(1, 4000, count), chance.integers(1, 60, count)
    workload = SessionWorkload(
        moments.tolist(),
        [1.0] * count,
        lengths[0].astype(float).tolist(),
        lengths[1].astype(float).tolist(),
    )
    served = serve_chains(servers, composition, "jffc", workload, checked=seed == 0)
    assert served.waits_s.max() > 0
    assert ReplayEvaluator(servers, workload)(composition) == pytest.approx(
        served.mean_response_s, rel=1e-12
    )


def test_a_session_that_takes_an_hour_is_not_taken_for_a_silent_one() -> None:
    servers = cluster(0.0, 0.0)
    long = SessionWorkload([0, 1], [3600.0, 1.0], [2000, 2000], [20, 20])
    result = serve_chains(servers, whole_on_each(servers, 1, 1), "jffc", long, checked=True)
    assert result.responses_s.tolist() == pytest.approx([3600.0, 1.0])
    assert result.waits_s.tolist() == [0, 0]
