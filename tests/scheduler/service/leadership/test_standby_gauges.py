"""A scheduler that does not lead any more shows nothing that only a leader knows."""

from __future__ import annotations

from prometheus_client import generate_latest

from catenary_scheduler.runtime.periodic import show_nothing
from catenary_services.telemetry.metrics import Metrics


def test_sums_over_all_schedulers_are_those_of_the_leader() -> None:
    metrics = Metrics()
    metrics.live_reservations.set(2)
    metrics.redis_pending.set(44)
    metrics.queued_requests.labels("paced").set(3)
    metrics.agents.labels("ready").set(4)
    metrics.chain_capacity.labels("paced", "0").set(8)
    metrics.chain_in_flight.labels("paced", "0").set(1)
    metrics.keep_chains({("paced", "0")})

    metrics.impaired_agents.labels("broken").set(1)
    metrics.agent_slowdown.labels("agent-0").set(1.5)
    metrics.stragglers.set(1)
    metrics.fragile_models.set(1)
    metrics.agents_wanted.set(4)

    show_nothing(metrics)

    text = generate_latest(metrics.registry).decode()
    assert "catenary_live_reservations 0.0" in text
    assert "catenary_redis_pending_changes 0.0" in text
    assert 'model="paced"' not in text
    assert 'state="ready"' not in text
    assert 'impairment="broken"' not in text
    assert 'agent="agent-0"' not in text
    for name in ("stragglers", "fragile_models", "agents_wanted"):
        assert f"catenary_{name} 0.0" in text
