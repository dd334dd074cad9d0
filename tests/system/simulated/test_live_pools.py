"""Sixteen emulated GPUs as real processes serve what the simulator says they do."""

from __future__ import annotations

import json
import signal
import subprocess

import psutil
import pytest

from cluster_harness import ROOT, wait_until

pytestmark = pytest.mark.system

KIND = "pools"
SCENARIO = ROOT / "scenarios" / "live-16.yaml"
PROCESSES = 19
"""Redis, scheduler, gateway and 16 agents."""
APART = 0.05
"""The project's own limit, and one step of the search."""


def test_a_live_run_that_is_told_to_stop_leaves_no_process(process: subprocess.Popen[str]) -> None:
    parent = psutil.Process(process.pid)
    wait_until(lambda: len(parent.children()) >= PROCESSES, 60, "the start of all processes")
    children = parent.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    _, left = psutil.wait_procs(children, timeout=5)
    assert left == []


def test_the_live_load_factor_is_the_simulated_one(process: subprocess.Popen[str]) -> None:
    output, complaints = process.communicate(timeout=240)
    assert process.returncode == 0, complaints
    facts = json.loads(output)
    assert facts["agents"] == [16]
    assert facts["processes"] == [PROCESSES]
    mean = next(each for each in facts["load_factors"] if each["model"] == "mean")
    assert mean["simulated"] >= 0.5
    assert abs(mean["live"] - mean["simulated"]) <= APART + 1e-9, facts["runs"]
    for run in facts["runs"]:
        for model in run["models"].values():
            # Nothing vanishes: what is not in time was late, or was told so.
            lost = model["late"] + sum(model["refused"].values())
            assert lost == round((1 - model["attainment"]) * model["requests"])
            assert set(model["refused"]) <= {"SLO_UNATTAINABLE", "DEADLINE_EXCEEDED", "OVERLOADED"}
