"""Placement under objectives as a kind of scenario files."""

from __future__ import annotations

from catenary_lab.scenarios.kinds import Experiment, Kind, LiveExperiment
from catenary_lab.scenarios.placement import by_load, chats, fewest, live_steps, scaling
from catenary_lab.scenarios.placement.live_schema import LiveSteps
from catenary_lab.scenarios.placement.schema import (
    FILES,
    Attainment,
    Demand,
    Fewest,
    Overhead,
    Scaling,
    SharedBeginnings,
)

KIND = Kind(
    "placement",
    FILES,
    (
        Experiment(Fewest, fewest.jobs, fewest.report),
        Experiment(Attainment, by_load.jobs, by_load.report),
        Experiment(Demand, by_load.jobs, by_load.report),
        Experiment(Overhead, by_load.jobs, by_load.report),
        Experiment(Scaling, scaling.jobs, scaling.report),
        Experiment(SharedBeginnings, chats.jobs, chats.report),
        LiveExperiment(LiveSteps, live_steps.serve),
    ),
)
