from __future__ import annotations

import pytest

from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_services.telemetry import names
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.tracing import Tracer


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def requests(metrics: Metrics) -> RequestMetrics:
    return RequestMetrics("gateway-0", metrics, Tracer("t", "t"))


def test_attainment_is_of_recent_requests_only(metrics: Metrics, requests: RequestMetrics) -> None:
    for _ in range(1000):
        requests.observe_arrival("m", names.LATE)
    for _ in range(750):
        requests.observe_arrival("m", names.GOOD)
    requests.observe_arrival("other", names.GOOD)
    sample = metrics.registry.get_sample_value
    assert sample("catenary_slo_attainment_ratio", {"model": "m"}) == 0.75
    assert sample("catenary_slo_attainment_ratio", {"model": "other"}) == 1.0
    assert sample("catenary_slo_requests_total", {"model": "m", "met": "false"}) == 1000


def test_what_was_refused_counts_and_clients_own_mistakes_do_not(
    metrics: Metrics, requests: RequestMetrics
) -> None:
    sample = metrics.registry.get_sample_value
    for kind in (names.GOOD, names.GOOD, names.GOOD, names.REFUSED):
        requests.observe_arrival("m", kind)
    for _ in range(5):
        requests.observe_arrival("m", names.CLIENT)
        requests.observe_arrival("", names.REFUSED)
    assert sample("catenary_slo_attainment_ratio", {"model": "m"}) == 0.75
    assert sample("catenary_slo_requests_total", {"model": "m", "met": "false"}) == 1
    counted = {"good": 3, "refused": 1, "client": 5}
    for kind, times in counted.items():
        assert sample("catenary_arrivals_total", {"model": "m", "kind": kind}) == times
    assert sample("catenary_arrivals_total", {"model": "", "kind": "refused"}) == 5
    # A share of requests whose model nobody knew would be no model's.
    assert sample("catenary_slo_attainment_ratio", {"model": ""}) is None
