"""Packing as a kind of scenario files."""

from __future__ import annotations

from catenary_lab.scenarios.kinds import Experiment, Kind, LiveExperiment
from catenary_lab.scenarios.packing import fleet, live_moves, over_time, serving, targets
from catenary_lab.scenarios.packing.live_schema import LiveMoves
from catenary_lab.scenarios.packing.schema import FILES, Fleet, OverTime, Serving, Targets
from catenary_lab.scenarios.packing.settings import jobs_of

KIND = Kind(
    "packing",
    FILES,
    (
        Experiment(Fleet, fleet.jobs, fleet.report),
        Experiment(OverTime, jobs_of, over_time.report),
        Experiment(Serving, jobs_of, serving.report),
        Experiment(Targets, jobs_of, targets.report),
        LiveExperiment(LiveMoves, live_moves.serve),
    ),
)
