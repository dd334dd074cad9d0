"""The page of metrics: what is counted, by which process, with which labels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from catenary_services.telemetry.metric_table import MetricName, MetricTable, declared_metrics
from catenary_services.telemetry.metrics import Metrics
from docs_build.reference.markdown import code, page, plain, table

_INTRO = """\
Every process with `metrics_port` set shows these at `/metrics` in Prometheus' text format. The
names below are the complete ones: a histogram `x` is read as `x_bucket`, `x_sum` and `x_count`.
Labels are of low cardinality; ids of requests are in traces and logs, not here. A process of
several [scheduler groups](../operations.md#several-schedulers) adds the label `group` to what a
scheduler counts."""

_SECTION = re.compile(r"^# (Gateway|Scheduler|Agent|Every process)\b")


@dataclass(frozen=True, slots=True)
class Shown:
    """A metric in the form that Prometheus shows it."""

    name: str
    kind: str
    metric: MetricName
    section: str


def metrics_page() -> str:
    found = list(shown_metrics())
    sections = []
    for section in dict.fromkeys(each.section for each in found):
        rows = [
            (
                code(each.name),
                each.kind,
                ", ".join(map(code, each.metric.labels)),
                plain(each.metric.help),
            )
            for each in found
            if each.section == section
        ]
        sections.append(f"## {section}\n\n" + table(("metric", "kind", "labels", ""), rows))
    return page("Metrics", _INTRO, *sections)


def shown_metrics() -> Iterator[Shown]:
    """Yields every metric, in the order of the table."""
    kinds = {family.name: family.type for family in Metrics().registry.collect()}
    declared = declared_metrics()
    section = "Every process"
    for line in inspect.getsource(MetricTable).splitlines():
        if (headline := _SECTION.match(line.strip())) is not None:
            section = headline.group(1)
        metric = declared.get(line.partition(" = ")[0].strip())
        if metric is None:
            continue
        full = f"{metric.prefix}_{metric.name}"
        if full.endswith("_info"):
            yield Shown(full, "gauge, always 1", metric, section)
            continue
        kind = kinds.get(full) or kinds.get(full.removesuffix("_total"), "gauge")
        total = "_total" if kind == "counter" and not full.endswith("_total") else ""
        yield Shown(full + total, kind, metric, section)
