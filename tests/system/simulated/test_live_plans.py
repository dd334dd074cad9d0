"""The default plan of unlike emulated devices and plans by hand, on one set of real processes."""

from __future__ import annotations

import json
import subprocess

import pytest

from cluster_harness import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

KIND = "pools"
SCENARIO = ROOT / "scenarios" / "live-plans.yaml"


def test_the_default_serves_more_than_the_even_split(process: subprocess.Popen[str]) -> None:
    output, complaints = process.communicate(timeout=800)
    assert process.returncode == 0, complaints
    found = json.loads(output)
    plans = {each["by"]: each for each in found["plans"]}
    assert set(plans) == {"default", "even split", "by hand"}
    assert plans["default"]["answers_per_s"] > plans["even split"]["answers_per_s"]
    assert min(plans["default"]["busy"].values()) > 0
    assert "data sheet" in found["explanation"]
    cuts = [each for each in found["screened"] if "), " in each["plan"]]
    assert len(cuts) == 18, "nine places to cut, and either class first"
    assert all(each["answers_per_s"] > 0 for each in cuts)
