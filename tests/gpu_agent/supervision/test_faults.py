"""Faults on purpose: read anew before each step, gone when their file is."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from catenary_agent.settings import AgentSettings
from catenary_agent.supervision.faults import LOADING, Faults
from catenary_agent.supervision.steps import StepKind, StepsInHand


@pytest.fixture
def say(tmp_path) -> Callable[..., None]:
    def write(**fault: object) -> None:
        fresh = tmp_path / "faults.new"
        fresh.write_text(json.dumps(fault))
        fresh.replace(tmp_path / "faults.json")

    return write


@pytest.fixture
def faults(tmp_path) -> Faults:
    return Faults(tmp_path / "faults.json")


def test_without_a_file_steps_are_as_they_are(faults: Faults) -> None:
    assert faults.run(lambda: 7) == 7
    assert Faults(None).run(lambda: 7) == 7


def test_steps_fail_as_often_as_is_said(faults: Faults, say: Callable[..., None]) -> None:
    say(fail="CUDA error", count=2, after=1)
    assert faults.run(lambda: 7) == 7
    for _ in range(2):
        with pytest.raises(RuntimeError, match="CUDA error"):
            faults.run(lambda: 7)
    assert faults.run(lambda: 7) == 7
    say(fail="again")
    with pytest.raises(RuntimeError, match="again"):
        faults.run(lambda: 7)


def test_loading_fails_only_where_that_is_said(faults: Faults, say: Callable[..., None]) -> None:
    say(fail="no", during=LOADING)
    assert faults.run(lambda: 7) == 7
    with pytest.raises(RuntimeError):
        faults.run(lambda: 7, LOADING)


def test_what_is_once_is_gone_for_the_next_process(
    tmp_path, faults: Faults, say: Callable[..., None]
) -> None:
    say(fail="no", once=True)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            faults.run(lambda: 7)
    assert not (tmp_path / "faults.json").exists()
    assert Faults(tmp_path / "faults.json").run(lambda: 7) == 7


def test_a_step_that_hangs_is_in_hand_until_its_file_goes(
    tmp_path, faults: Faults, say: Callable[..., None]
) -> None:
    say(hang=True)
    steps = StepsInHand(faults)
    results: list[int] = []
    begun = threading.Event()

    def work() -> None:
        begun.set()
        results.append(steps.run(lambda: 7, StepKind.BATCH, None, 5))

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while not steps.in_hand():
        pass
    [step] = steps.in_hand()
    assert (step.kind, step.booked_ns) == (StepKind.BATCH, 5)
    assert results == []
    (tmp_path / "faults.json").unlink()
    thread.join(20)
    assert results == [7]
    assert steps.in_hand() == []


def test_what_cannot_be_read_is_no_fault(tmp_path, faults: Faults) -> None:
    (tmp_path / "faults.json").write_text('{"hang"')
    assert faults.run(lambda: 7) == 7
    (tmp_path / "faults.json").write_text('{"unknown": 1}')
    assert faults.run(lambda: 7) == 7


def test_a_file_of_faults_is_refused_unless_it_is_a_test(tmp_path) -> None:
    file = tmp_path / "faults.json"
    with pytest.raises(ValueError, match="faults_file"):
        AgentSettings(agent_id="a", insecure=True, faults_file=file)
    AgentSettings(agent_id="a", insecure=True, faults_file=file, allow_faults=True)
