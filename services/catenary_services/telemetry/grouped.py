"""One page of metrics for several registries, which a label tells apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector


class _Grouped(Collector):
    """A collector that shows every metric of several registries once, with the samples of all."""

    def __init__(self, label: str, registries: Mapping[str, CollectorRegistry]) -> None:
        self._label = label
        self._registries = registries

    def describe(self) -> list[Metric]:
        """Returns nothing, because the metrics follow from the registries."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields every metric, with one more label on each sample."""
        found: dict[str, Metric] = {}
        for value, registry in self._registries.items():
            for metric in registry.collect():
                joint = found.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
                )
                joint.samples += [
                    sample._replace(labels={**sample.labels, self._label: value})
                    for sample in metric.samples
                ]
        yield from found.values()


def grouped(label: str, registries: Mapping[str, CollectorRegistry]) -> CollectorRegistry:
    """Returns a registry that shows the given ones, each with its key as one more label."""
    joint = CollectorRegistry()
    joint.register(_Grouped(label, registries))
    return joint
