"""Adding workers helps: what best fit alone does not give (specification, section 3)."""

from __future__ import annotations

from catenary_lab.policies import seeded
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_simulator.arrivals import PoissonArrivals
from catenary_simulator.placement.serve import PlacementRun, WorkerKind, serve_placement
from catenary_simulator.placement.workload import drawn_workload, lognormal_lengths

KIND = WorkerKind(
    LatencyLines(0.124329e6, 13.8998e6, 450.755, 0.0755764e6, 22.5126e6, 23.0817e6), 65_881.0
)
OBJECTIVES = TokenObjectives(600_000_000, 30_000_000)


def test_more_workers_attain_no_less_and_never_less_than_the_shortest_queue() -> None:
    lengths = lognormal_lengths((80.0, 1.0), (150.0, 1.0), 500, 1)
    work = drawn_workload(lengths, PoissonArrivals(), 8.0, 12.0, 2)
    found: dict[str, list[float]] = {}
    for policy in ("slo", "fewest-sessions"):
        runs = (PlacementRun(KIND, count, seeded(policy, 2), OBJECTIVES) for count in (1, 2, 3, 5))
        found[policy] = [serve_placement(run, work).attainment for run in runs]
    assert found["slo"] == sorted(found["slo"])
    assert found["slo"][0] < 0.9 < found["slo"][2]
    assert all(mine >= theirs for mine, theirs in zip(*found.values(), strict=True))
