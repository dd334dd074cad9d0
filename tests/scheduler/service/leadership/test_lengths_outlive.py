"""What was learned of answer lengths outlives the scheduler that learned it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.settings import SchedulerSettings
from chain_harness import serving
from scheduler_harness import LLM, MS, AgentScript, Crowd, crash, scheduler, until


async def test_a_successor_goes_on_with_what_was_learned_of_answers(
    generating: Callable[..., SchedulerSettings], crowd: Crowd
) -> None:
    async with scheduler(generating(expected_agents=1)) as old:
        gateway, _ = await serving(old, crowd, AgentScript())
        for number in range(3):
            await gateway.submit_session(number)
            await gateway.started(number)
            progress = scheduler_pb2.SessionProgress(
                request_id=number, generated_tokens=7, first_token_ns=MS, decode_ns=6 * MS
            )
            done = scheduler_pb2.RequestFinished(request_id=number, progress=progress)
            await gateway.send(scheduler_pb2.GatewayMessage(finished=done))
        chained = old.leader().dispatcher.chained
        await until(lambda: chained.statistics()["completed_requests"] == 3, "all are done")
        learned = chained.length_predictors()[LLM]
        assert learned.learned == 3
        # The next write after the first is seconds away: a snapshot holds all there is.
        leader = old.leader()
        leader._journal.require_snapshot()
        await leader.write_behind.flush()
        await crash(old)
    async with scheduler(generating(scheduler_id="scheduler-1")) as new:
        await until(lambda: new.leads, "the new scheduler leads")
        restored = new.leader().dispatcher.chained.length_predictors()[LLM]
        assert restored.predict(8) == pytest.approx(learned.predict(8), rel=1e-3)
        assert restored.predict(8) < 100  # far from what is assumed of an unknown model
