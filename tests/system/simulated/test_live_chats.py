"""Chats over two unlike emulated agents as real processes: all are answered, and both agents work."""

from __future__ import annotations

import json
import subprocess

import pytest

from cluster_harness import ROOT

pytestmark = pytest.mark.system

KIND = "chains"
SCENARIO = ROOT / "scenarios" / "chains" / "unlike-chats-live.yaml"
PROCESSES = 5
"""Redis, scheduler, gateway and two agents."""


def test_chats_are_answered_by_both_agents(process: subprocess.Popen[str]) -> None:
    output, complaints = process.communicate(timeout=400)
    assert process.returncode == 0, complaints
    found = json.loads(output)
    (run,) = found["live"]
    assert run["processes"] == PROCESSES
    assert (run["refused"], run["problems"]) == (0, {})
    assert run["requests"] == found["policies"][0]["requests"] == run["good"] + run["late"] > 0
    assert run["busy_0"] > 0
    assert run["busy_1"] > 0
