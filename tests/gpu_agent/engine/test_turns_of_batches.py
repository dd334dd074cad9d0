"""A batch is timed from its turn on, not from when it could have begun."""

from __future__ import annotations

import threading
import time

from catenary_agent.engine.computing.feeder import ComputeJob, run_job
from catenary_agent.supervision.steps import RunningSteps, StepKind

LONGEST_S = 60.0


def test_a_job_begins_when_the_step_that_has_the_device_is_over() -> None:
    steps, seen = RunningSteps(), []
    job = ComputeJob(lambda: seen.append(time.monotonic_ns()) or 0, done=None)
    with steps.turns:
        thread = threading.Thread(target=run_job, args=(job, steps))
        thread.start()
        while not steps.turns.waiting:
            assert thread.is_alive()
        # It waits, and does not count as a step that runs: nobody takes it for stuck.
        assert (seen, steps.in_hand()) == ([], [])
        released_ns = time.monotonic_ns()
    thread.join(LONGEST_S)
    assert len(seen) == 1
    assert seen[0] >= released_ns


def test_what_fails_in_its_turn_gives_it_on() -> None:
    steps = RunningSteps()

    def broken() -> int:
        raise ValueError("broken")

    job = ComputeJob(broken, done=None)
    run_job(job, steps)
    assert isinstance(job.error, ValueError)
    with steps.turns:
        assert steps.run(lambda: 7, StepKind.GENERATION) == 7
