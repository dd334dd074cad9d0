"""Pooled pipelines as a kind of scenario files."""

from __future__ import annotations

from catenary_lab.scenarios.kinds import Experiment, Kind, LiveExperiment
from catenary_lab.scenarios.pools import (
    attainment,
    live_plans,
    live_report,
    load_factors,
    planner_scaling,
    sensitivity,
)
from catenary_lab.scenarios.pools.schema import (
    FILES,
    Attainment,
    Live,
    LivePlans,
    LoadFactors,
    PlannerScaling,
    Sensitivity,
    Utilisation,
)

KIND = Kind(
    "pools",
    FILES,
    (
        Experiment(LoadFactors, load_factors.jobs, load_factors.report),
        Experiment(Utilisation, load_factors.jobs, load_factors.utilisation_report),
        Experiment(Attainment, attainment.jobs, attainment.report),
        Experiment(Sensitivity, sensitivity.jobs, sensitivity.report),
        Experiment(PlannerScaling, planner_scaling.jobs, planner_scaling.report, alone=True),
        LiveExperiment(Live, live_report.serve),
        LiveExperiment(LivePlans, live_plans.serve),
    ),
)
