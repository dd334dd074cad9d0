"""Sixteen emulated GPUs as real processes serve what the simulator says they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_harness import ROOT, environment

pytestmark = pytest.mark.system

DATA = Path(os.environ.get("CATENARY_DATA", ROOT.parent / "shared" / "data"))
SCENARIO = ROOT / "scenarios" / "live-16.yaml"
APART = 0.05
"""The project's own limit, and one step of the search."""


def test_the_live_load_factor_is_the_simulated_one() -> None:
    if not (DATA / "ppipe" / "instances.json").exists():
        pytest.skip(f"needs the data set ppipe below CATENARY_DATA ({DATA})")
    arguments = ["simulate", "pools", str(SCENARIO), "--live", "--quick", "--json"]
    process = subprocess.run(
        [sys.executable, "-m", "catenaryd", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**environment(), "CATENARY_DATA": str(DATA)},
        check=False,
    )
    assert process.returncode == 0, process.stderr
    facts = json.loads(process.stdout)
    assert facts["agents"] == [16]
    assert facts["processes"] == [19]
    mean = next(each for each in facts["load_factors"] if each["model"] == "mean")
    assert mean["simulated"] >= 0.5
    assert abs(mean["live"] - mean["simulated"]) <= APART + 1e-9, facts["runs"]
    for run in facts["runs"]:
        for model in run["models"].values():
            # Nothing vanishes: what is not in time was late, or was told so.
            lost = model["late"] + sum(model["refused"].values())
            assert lost == round((1 - model["attainment"]) * model["requests"])
            assert set(model["refused"]) <= {"SLO_UNATTAINABLE", "DEADLINE_EXCEEDED", "OVERLOADED"}
