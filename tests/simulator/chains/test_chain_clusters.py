"""Places, servers and recorded requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import PoissonArrivals
from catenary_simulator.chains.anchors import NetworkAnchor, distance_km, read_anchors, rtt_ms
from catenary_simulator.chains.cluster import (
    CommunicationCost,
    DecoderModel,
    GpuSlice,
    ServerSite,
    cluster_of,
    random_places,
)
from catenary_simulator.chains.workload import exponential, read_trace, with_tokens_of
from reference_data import reference

BLOOM = DecoderModel("BLOOM", 70, 1.32, 0.11, 14336, 2466437120, 112, 112, 5.0)
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,4808,10\r
2023-11-16 18:17:04.9799601,3180,8\r
2023-11-16 18:18:03.9799600,110,27"""


def test_round_trips_follow_medians_and_the_great_circle() -> None:
    madrid = NetworkAnchor("m", 20.0, 40.4168, -3.7038)
    berlin = NetworkAnchor("b", 30.0, 52.52, 13.405)
    assert distance_km(madrid, berlin) == pytest.approx(1869, rel=0.01)
    assert rtt_ms(madrid, berlin) == pytest.approx(15.0 + 0.01 * distance_km(madrid, berlin))
    assert rtt_ms(madrid, berlin) == rtt_ms(berlin, madrid)
    assert rtt_ms(madrid, madrid) == 0.0


def test_computation_times_of_the_paper_come_out_of_its_formula() -> None:
    big = GpuSlice("3g.40gb", 40, tflops=120, bandwidth_gb_per_ms=1.02)
    small = GpuSlice("2g.20gb", 20, tflops=80, bandwidth_gb_per_ms=0.51)
    servers = cluster_of(
        BLOOM, [ServerSite("a", big, 10), ServerSite("b", small, 10)], CommunicationCost()
    )
    planned = servers.task(0.2).servers
    assert float(planned[0].block_s) == pytest.approx(0.109, abs=2e-4)
    assert float(planned[1].block_s) == pytest.approx(0.175, abs=5e-4)
    assert float(planned[0].communication_s) == pytest.approx(20 * 0.028)


def test_a_given_computation_time_holds_for_the_mean_session() -> None:
    gpu = GpuSlice("gpu", 40, tflops=120, bandwidth_gb_per_ms=1.02, block_ms=200)
    speed = (
        cluster_of(BLOOM, [ServerSite("a", gpu, 10)], CommunicationCost("session")).servers[0].speed
    )
    assert speed.block_s(2000, 20) == pytest.approx(0.2)
    assert speed.communication_s(20) == speed.communication_s(1) == pytest.approx(0.028)


def test_random_places_have_the_share_of_big_gpus_and_follow_the_seed() -> None:
    anchors = [
        NetworkAnchor(str(number), 10.0 + number, 40.0 + number, 5.0) for number in range(30)
    ]
    gpus = (GpuSlice("big", 40, 1, 1), GpuSlice("small", 20, 1, 1))

    def draw(seed: int) -> tuple[list[ServerSite], list[list[float]]]:
        return random_places(anchors, gpus, 20, 0.2, np.random.default_rng(seed))

    places, between = draw(1)
    assert sum(place.gpu.name == "big" for place in places) == 4
    assert len(places) == len(between) == 20
    assert all(between[number][number] == 0.0 for number in range(20))
    assert draw(1) == (places, between)
    assert draw(2) != (places, between)
    with pytest.raises(InvalidInput, match="orchestrator"):
        random_places(anchors[:20], gpus, 20, 0.2, np.random.default_rng(1))


def test_a_trace_is_read_with_seven_decimals_and_replayed_faster(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE, newline="")
    trace = read_trace(file)
    assert trace.seconds.tolist() == pytest.approx([0.0, 1.0000001, 60.0], abs=1e-6)
    part = trace.part(1, 2, speed=2.0)
    assert part.arrived_ns == pytest.approx([0, 29_500_000_000], abs=2000)
    assert (part.inputs, part.outputs) == ([3180.0, 110.0], [8.0, 27.0])
    assert part.rate_per_s == pytest.approx(1 / 29.5, rel=1e-6)
    with pytest.raises(InvalidInput, match="3 requests"):
        trace.part(2, 2)


def test_tokens_of_a_trace_can_come_at_other_moments(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE, newline="")
    moved = with_tokens_of(read_trace(file), PoissonArrivals(), 5.0, (0, 3), seed=1)
    assert moved.outputs == [10.0, 8.0, 27.0]
    assert moved.arrived_ns[-1] < 60 * 10**9


@pytest.mark.parametrize("text", ["seconds\n1\n2\n", "TIMESTAMP,ContextTokens\n", ""])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(InvalidInput, match="trace"):
        read_trace(file)


def test_exponential_sizes_have_mean_one_and_arrivals_the_rate() -> None:
    workload = exponential(PoissonArrivals(), 4.0, (2000, 20), 20_000, seed=3)
    assert len(workload) == 20_000
    assert np.mean(workload.sizes) == pytest.approx(1.0, abs=0.03)
    assert workload.rate_per_s == pytest.approx(4.0, rel=0.03)


def test_the_anchors_of_the_data_set_are_read() -> None:
    anchors = read_anchors(reference("chain/ripe_anchors_eu.csv"))
    assert len(anchors) == 320
    assert 0 < rtt_ms(anchors[0], anchors[1]) < 100


def test_a_missing_file_of_anchors_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"anchors.*none\.csv"):
        read_anchors(tmp_path / "none.csv")
