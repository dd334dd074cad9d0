"""`catenaryd plan groups` as a script calls it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from catenary_services.errors import InvalidInput, PlanInfeasible
from catenaryd.command_line import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", "groups", *arguments])


def test_it_prints_the_division_with_the_fewest_groups() -> None:
    asked = ("--workers", "41", "--rate", "100", "--scheduler-rate", "30")
    found = json.loads(run(*asked, "--json").output)
    assert [group["workers"] for group in found["groups"]] == [11, 10, 10, 10]
    assert sum(group["arrivals_per_s"] for group in found["groups"]) == pytest.approx(100.0)
    assert (found["least_workers"], found["most_workers"]) == (5, 12)
    assert "4 groups of 10 to 11 workers" in run(*asked).output


def test_the_rate_of_a_scheduler_follows_from_its_decision_time() -> None:
    asked = ("--workers", "40", "--rate", "12000", "--decision-us", "100", "--latency-ms", "5")
    found = json.loads(run(*asked, "--json").output)
    assert len(found["groups"]) == 2
    assert 9_000 < found["scheduler_arrivals_per_s"] < 10_000
    assert "one scheduler" in run("--workers", "40", "--rate", "100").output


def test_what_cannot_be_is_said() -> None:
    slow = run("--workers", "40", "--rate", "100", "--scheduler-rate", "3")
    assert isinstance(slow.exception, PlanInfeasible)
    never = run("--workers", "4", "--rate", "1", "--decision-us", "9000", "--latency-ms", "5")
    assert isinstance(never.exception, InvalidInput)
