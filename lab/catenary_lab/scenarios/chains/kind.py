"""Server chains as a kind of scenario files."""

from __future__ import annotations

from catenary_lab.scenarios.chains import (
    allocation,
    chats,
    live_chains,
    live_chats,
    placement,
    policies,
    serve,
    tuning,
)
from catenary_lab.scenarios.chains.schema import (
    FILES,
    Allocation,
    Chats,
    Placement,
    Policies,
    Serve,
    Tuning,
)
from catenary_lab.scenarios.kinds import Experiment, Kind

KIND = Kind(
    "chains",
    FILES,
    (
        Experiment(Serve, serve.jobs, serve.report, with_live=live_chains.beside),
        Experiment(Policies, policies.jobs, policies.report),
        Experiment(Tuning, tuning.jobs, tuning.report),
        Experiment(Placement, placement.jobs, placement.report),
        Experiment(Allocation, allocation.jobs, allocation.report),
        Experiment(Chats, chats.jobs, chats.report, with_live=live_chats.beside),
    ),
)
