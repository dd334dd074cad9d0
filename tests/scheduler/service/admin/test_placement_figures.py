"""What placement under objectives counts is shown to operators."""

from __future__ import annotations

from collections.abc import Callable

from catenary_scheduler.settings import SchedulerSettings
from chain_harness import serving
from scheduler_harness import MS, AgentScript, Crowd, scheduler, until


async def test_placements_are_counted_by_what_became_of_them(
    generating: Callable[..., SchedulerSettings], crowd: Crowd
) -> None:
    values = generating(expected_agents=1, chain_policy="slo", rebalance=True)
    async with scheduler(values) as process:
        gateway, _ = await serving(process, crowd, AgentScript())
        slos = {"first_token_slo_ns": 5_000 * MS, "per_token_slo_ns": 1_000 * MS}
        for number in range(3):
            await gateway.submit_session(number, **slos)
            await gateway.started(number)
            await gateway.finished(number)  # whoever generates might keep the next one waiting
        await gateway.submit_session(3)  # without objectives it is served, and not counted
        await gateway.started(3)

        def figure(outcome: str) -> float | None:
            labels = {"outcome": outcome}
            return process._metrics.registry.get_sample_value("catenary_placements_total", labels)

        await until(lambda: figure("placed") == 3, "the metric")
        assert [figure(each) for each in ("forced", "inadmissible", "rebalanced")] == [0, 0, 0]
        theta = process._metrics.registry.get_sample_value("catenary_placement_theta_ratio")
        assert theta == 1
