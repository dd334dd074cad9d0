"""PETALS and BPRR as simulated systems."""

from __future__ import annotations

import numpy as np

from catenary_lab.chains.baselines import petals_paths, serve_bprr, serve_petals
from catenary_simulator.arrivals import PoissonArrivals
from catenary_simulator.chains.cluster import (
    ChainsCluster,
    CommunicationCost,
    DecoderModel,
    GpuSlice,
    ServerSite,
    cluster_of,
)
from catenary_simulator.chains.workload import exponential

BLOOM = DecoderModel("BLOOM", 70, 1.32, 0.11, 14336, 2466437120, 112, 112, 5.0)
BIG = GpuSlice("3g.40gb", 40, 120, 1.02, 109, 20829, 3020)
SMALL = GpuSlice("2g.20gb", 20, 80, 0.51, 175, 5515, 6276)


def cluster(big: int, small: int) -> ChainsCluster:
    places = [
        ServerSite(f"server-{number}", BIG if number < big else SMALL, 20.0 + number)
        for number in range(big + small)
    ]
    return cluster_of(BLOOM, places, CommunicationCost())


def test_petals_hosts_what_the_paper_says() -> None:
    servers = cluster(4, 16)
    free = petals_paths(servers, 1)
    assert [window.blocks for window in free.windows] == [24] * 4 + [11] * 16
    assert petals_paths(servers, 2).windows != free.windows  # order of joining


def test_too_few_servers_cannot_be_placed() -> None:
    workload = exponential(PoissonArrivals(), 0.1, (2000, 20), 10, 1)
    assert serve_petals(cluster(1, 3), workload, 1) is None
    assert serve_bprr(cluster(0, 4), workload, 0.1) is None


def test_bprr_serves_everything_and_follows_the_seed() -> None:
    servers = cluster(4, 16)
    workload = exponential(PoissonArrivals(), 0.2, (2000, 20), 300, 1)
    first, again = (serve_bprr(servers, workload, 0.2) for _ in range(2))
    assert first is not None
    assert again is not None
    assert len(first.responses_s) == 300
    assert np.array_equal(first.responses_s, again.responses_s)
    # No session is faster than the fastest path through every block could be.
    fastest = 3 * 20 * 0.038 + 70 * 0.109
    assert np.all(first.services_s >= 0.999 * fastest * np.array(workload.sizes))


def test_petals_lets_sessions_wait_for_its_few_slots() -> None:
    servers = cluster(4, 16)
    served = serve_petals(servers, exponential(PoissonArrivals(), 1.0, (2000, 20), 200, 1), 1)
    assert served is not None
    assert served.waits_s.max() > 10


def test_both_ways_of_routing_serve_everything_and_differ() -> None:
    servers = cluster(4, 16)
    workload = exponential(PoissonArrivals(), 0.2, (2000, 20), 300, 1)
    for serve in (
        lambda ends: serve_bprr(servers, workload, 0.2, ends),
        lambda ends: serve_petals(servers, workload, 1, ends),
    ):
        by_true, by_expected = serve("true"), serve("expected")
        assert by_true is not None
        assert by_expected is not None
        assert len(by_expected.responses_s) == len(by_true.responses_s) == 300
        # Sizes are exponential, so that beliefs are wrong, and routes with them.
        assert not np.array_equal(by_expected.responses_s, by_true.responses_s)
