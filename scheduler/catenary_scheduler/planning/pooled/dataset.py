"""Data sets of planning instances in the format of the PPipe reference data.

`models.csv`, `block_timing.csv`, `cut_bytes.csv`, `clusters.json` and `instances.json` are
required; `reference_plans.json` is optional. Problems are built on demand, one per instance id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catenary_scheduler.planning.pooled.dataset_files import (
    CUT_COLUMNS,
    TIMING_COLUMNS,
    ReadText,
    block_times,
    csv_rows,
    cut_bytes_of,
    entry_of,
    json_of,
    parse_json,
    reading,
)
from catenary_scheduler.planning.pooled.problem import (
    BlockTimes,
    Device,
    GpuClass,
    PooledModel,
    PoolingProblem,
)
from catenary_services.errors import InvalidInput

DEFAULT_MAX_PARTITIONS = 3
"""Length of the longest pipeline in our own plans. The reference's instances say 2 or 3
(`PlanningInstance.max_partitions`)."""


@dataclass(frozen=True, slots=True)
class PlanningInstance:
    """One planning task as the data set states it."""

    instance_id: str
    cluster: str
    max_partitions: int
    """Length of the longest pipeline in the reference's plans."""
    dnns: tuple[Mapping[str, Any], ...]
    reference: Mapping[str, Mapping[str, Any]]
    """Results of the reference by scheduler; empty if the file has none."""
    best_known: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PlanningDataset:
    """Parsed contents of one data set folder, as made by `load_dataset`."""

    latency_us: Mapping[str, Mapping[Device, BlockTimes]]
    cut_bytes: Mapping[str, tuple[int, ...]]
    clusters: Mapping[str, Mapping[str, Any]]
    instances: Mapping[str, PlanningInstance]
    plans: Mapping[tuple[str, str], Mapping[str, Any]]
    """Reference plans by instance id and scheduler."""

    def instance(self, instance_id: str) -> PlanningInstance:
        """Returns an instance by its id.

        Raises InvalidInput for an unknown id, and names those that come close.
        """
        found = self.instances.get(instance_id)
        if found is None:
            raise InvalidInput("instance", _no_such(instance_id, self.instances))
        return found

    def problem(self, instance_id: str, max_partitions: int | None = None) -> PoolingProblem:
        """Returns the planning task of an instance.

        Args:
            instance_id: Id of the instance in `instances.json`.
            max_partitions: Length of the longest pipeline; 3 if None. For the reference's rules
                pass `instance(instance_id).max_partitions`.
        """
        instance = self.instance(instance_id)
        with reading("clusters.json"):
            classes = _gpu_classes(instance.cluster, self.clusters)
        with reading("instances.json"):
            models = tuple(self._model(dnn) for dnn in instance.dnns)
        if max_partitions is None:
            max_partitions = DEFAULT_MAX_PARTITIONS
        return PoolingProblem(classes, models, max_partitions)

    def _model(self, dnn: Mapping[str, Any]) -> PooledModel:
        name = str(entry_of(dnn, "dnn", "instances.json"))
        if not self.latency_us.get(name):
            raise InvalidInput("block_timing.csv", f"has nothing on {name}")
        if name not in self.cut_bytes:
            raise InvalidInput("cut_bytes.csv", f"lacks cuts of {name}")
        cuts = self.cut_bytes[name]
        rate = float(dnn.get("est_xput_rps") or 0.0)
        factor = float(dnn.get("batch_build_factor") or 0.0)
        return PooledModel(
            name=name,
            blocks=len(cuts) - 1,
            latency_us=self.latency_us[name],
            cut_bytes=cuts,
            slo_us=float(entry_of(dnn, "slo_us", "instances.json")),
            margin_us=float(dnn.get("margin_us") or 0.0),
            weight=float(dnn.get("weight") or 1.0),
            batch_build_us_per_row=factor * 1e6 / rate if rate > 0 else 0.0,
        )


def load_dataset(directory: Path) -> PlanningDataset:
    """Reads a data set folder; InvalidInput names the file that is missing or wrong."""

    def read_text(name: str) -> str | None:
        try:
            return (directory / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    if not directory.is_dir():
        raise InvalidInput("dataset", f"{directory} is not a folder")
    return parse_dataset(read_text)


def parse_dataset(read_text: ReadText) -> PlanningDataset:
    """Builds a `PlanningDataset` from the texts that `read_text` returns by file name."""
    with reading("models.csv"):
        rows = csv_rows(read_text, "models.csv", ("dnn", "blocks"))
        blocks = {row["dnn"]: int(row["blocks"]) for row in rows}
    with reading("block_timing.csv"):
        latency_us = block_times(csv_rows(read_text, "block_timing.csv", TIMING_COLUMNS), blocks)
    with reading("cut_bytes.csv"):
        cut_bytes = cut_bytes_of(csv_rows(read_text, "cut_bytes.csv", CUT_COLUMNS), blocks)
    with reading("clusters.json"):
        clusters = dict(json_of(read_text, "clusters.json"))
    with reading("instances.json"):
        instances = [_instance(entry) for entry in json_of(read_text, "instances.json")]
    with reading("reference_plans.json"):
        text = read_text("reference_plans.json")
        plans = parse_json("reference_plans.json", text) if text else []
        by_scheduler = {(plan["id"], plan["scheduler"]): plan for plan in plans}
    return PlanningDataset(
        latency_us=latency_us,
        cut_bytes=cut_bytes,
        clusters=clusters,
        instances={instance.instance_id: instance for instance in instances},
        plans=by_scheduler,
    )


def _gpu_classes(
    cluster_name: str, clusters: Mapping[str, Mapping[str, Any]]
) -> tuple[GpuClass, ...]:
    cluster = clusters.get(cluster_name)
    if cluster is None:
        raise InvalidInput("cluster", _no_such(cluster_name, clusters))
    counts = entry_of(cluster, "gpus", "clusters.json")
    levels = cluster.get("vgpu_levels", {})
    per_server = cluster.get("gpus_per_server", {})
    gigabits = float(entry_of(cluster, "effective_bandwidth_gbps", "clusters.json"))
    # The high class comes first, as the reference orders its slots. The others keep their order.
    names = sorted(counts, key=lambda name: name != cluster.get("high"))
    return tuple(
        GpuClass(
            name=name,
            count=int(counts[name]),
            levels=tuple(range(1, int(levels.get(name, 1)) + 1)),
            gpus_per_server=int(per_server.get(name, 1)),
            server_bits_per_second=gigabits * 1e9,
        )
        for name in names
    )


def _instance(entry: Mapping[str, Any]) -> PlanningInstance:
    where = "instances.json"
    return PlanningInstance(
        instance_id=str(entry_of(entry, "id", where)),
        cluster=str(entry_of(entry, "cluster", where)),
        max_partitions=int(entry.get("max_partitions", DEFAULT_MAX_PARTITIONS)),
        dnns=tuple(entry_of(entry, "dnns", where)),
        reference=entry.get("reference", {}),
        best_known=entry.get("best_known", {}),
    )


def _no_such(name: str, known: Mapping[str, Any]) -> str:
    parts = set(name.split("/"))
    close = sorted(known, key=lambda other: (-len(parts & set(other.split("/"))), other))[:3]
    return f"{name!r} is not in the data set; the closest are {', '.join(close) or 'none'}"
