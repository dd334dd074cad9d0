"""Nine emulated agents as real processes serve sessions as fast as the simulator says."""

from __future__ import annotations

import json
import signal
import subprocess

import psutil
import pytest

from cluster_harness import ROOT, wait_until

pytestmark = pytest.mark.system

KIND = "chains"
SCENARIO = ROOT / "scenarios" / "chains" / "table-1-live.yaml"
PROCESSES = 12
"""Redis, scheduler, gateway and nine agents."""
APART = 0.15


def test_live_responses_are_the_simulated_ones_and_nothing_is_lost(
    process: subprocess.Popen[str],
) -> None:
    output, complaints = process.communicate(timeout=180)
    assert process.returncode == 0, complaints
    (run,) = json.loads(output)["live"]
    assert run["processes"] == PROCESSES
    assert (run["lost"], run["problems"], run["moved"]) == (0, [], 0)
    assert (run["left_reservations"], run["left_sessions"]) == (0, 0)
    simulated, live = run["simulated"], run["live"]
    assert live["requests"] == simulated["requests"] == 40
    for figure in ("mean_response_s", "median_s", "p95_s"):
        assert live[figure] == pytest.approx(simulated[figure], rel=APART), figure
    # Passes only ever take longer than emulated; faster ones would be something else's time.
    assert live["mean_service_s"] >= 0.99 * simulated["mean_service_s"]


def test_a_live_run_that_is_told_to_stop_leaves_no_process(process: subprocess.Popen[str]) -> None:
    parent = psutil.Process(process.pid)
    wait_until(lambda: len(parent.children()) >= PROCESSES, 60, "the start of all processes")
    children = parent.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    _, left = psutil.wait_procs(children, timeout=5)
    assert left == []
