from __future__ import annotations

import re
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from catenary_services.errors import Unavailable
from catenary_services.telemetry import names
from catenary_services.telemetry.metric_table import declared_metrics
from catenary_services.telemetry.metrics import Metrics, start_metrics_server


def test_every_name_becomes_a_metric_of_good_form() -> None:
    metrics = Metrics()
    declared = declared_metrics().values()
    families = {family.name: family for family in metrics.registry.collect()}
    assert len(families) == len(declared)
    for metric in declared:
        family = families[f"{metric.prefix}_{metric.name}"]
        assert family.documentation == metric.help
        assert re.fullmatch(r"[a-z_]+", metric.name)
        assert metric.prefix in ("catenary", "gen_ai")
        assert metric.help.endswith(".")
        assert not metric.name.endswith("_total")  # the client library adds it to counters
    labels = {label for metric in declared for label in metric.labels}
    assert not labels & {"request_id", "batch_id", "trace_id"}


def test_attainment_is_of_recent_requests_only() -> None:
    metrics = Metrics()
    for _ in range(1000):
        metrics.observe_arrival("m", names.LATE)
    for _ in range(750):
        metrics.observe_arrival("m", names.GOOD)
    metrics.observe_arrival("other", names.GOOD)
    sample = metrics.registry.get_sample_value
    assert sample("catenary_slo_attainment_ratio", {"model": "m"}) == 0.75
    assert sample("catenary_slo_attainment_ratio", {"model": "other"}) == 1.0
    assert sample("catenary_slo_requests_total", {"model": "m", "met": "false"}) == 1000


def test_what_was_refused_counts_and_clients_own_mistakes_do_not() -> None:
    metrics = Metrics()
    sample = metrics.registry.get_sample_value
    for kind in (names.GOOD, names.GOOD, names.GOOD, names.REFUSED):
        metrics.observe_arrival("m", kind)
    for _ in range(5):
        metrics.observe_arrival("m", names.CLIENT)
        metrics.observe_arrival("", names.REFUSED)
    assert sample("catenary_slo_attainment_ratio", {"model": "m"}) == 0.75
    assert sample("catenary_slo_requests_total", {"model": "m", "met": "false"}) == 1
    counted = {"good": 3, "refused": 1, "client": 5}
    for kind, times in counted.items():
        assert sample("catenary_arrivals_total", {"model": "m", "kind": kind}) == times
    assert sample("catenary_arrivals_total", {"model": "", "kind": "refused"}) == 5
    # A share of requests whose model nobody knew would be no model's.
    assert sample("catenary_slo_attainment_ratio", {"model": ""}) is None


def test_one_plan_is_active_at_a_time() -> None:
    metrics = Metrics()
    metrics.set_active_plan("plan-1")
    metrics.set_active_plan("plan-2")
    sample = metrics.registry.get_sample_value
    assert sample("catenary_plan_active_info", {"plan_id": "plan-2"}) == 1
    assert sample("catenary_plan_active_info", {"plan_id": "plan-1"}) is None
    metrics.set_active_plan("")
    assert sample("catenary_plan_active_info", {"plan_id": "plan-2"}) is None


def test_page_is_served_until_stopped() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.requests.labels("m", "OK").inc(3)
    port, stop = start_metrics_server("127.0.0.1", 0, metrics.registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["catenary_requests_total", (("model", "m"), ("outcome", "OK"))] == 3
    with pytest.raises(Unavailable):
        start_metrics_server("127.0.0.1", port, metrics.registry)
    stop()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_registry_holds_nothing_of_this_python_process() -> None:
    assert b"python_info" not in generate_latest(Metrics().registry)
