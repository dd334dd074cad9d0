from __future__ import annotations

from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.tracing import Tracer


def test_attainment_is_of_recent_requests_only() -> None:
    metrics = Metrics()
    request_metrics = RequestMetrics("gateway-0", metrics, Tracer("t", "t"))
    for _ in range(1000):
        request_metrics.observe_slo("m", False)
    for _ in range(750):
        request_metrics.observe_slo("m", True)
    request_metrics.observe_slo("other", True)
    sample = metrics.registry.get_sample_value
    assert sample("catenary_slo_attainment_ratio", {"model": "m"}) == 0.75
    assert sample("catenary_slo_attainment_ratio", {"model": "other"}) == 1.0
    assert sample("catenary_slo_requests_total", {"model": "m", "met": "false"}) == 1000
