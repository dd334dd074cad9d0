"""`catenaryd plan dataset`: a cluster one may buy, and the models' profiles, as a planning task.

The folder it writes is what `catenaryd plan pools` and `catenaryd simulate pools` read. Times come
from each model's `profile.json`, measured or estimated; bytes of cuts and batch sizes are those of
deployments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from catenary_services.domain.model import ModelManifest
from catenary_services.domain.profile import ModelProfile
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from catenaryd.shared_options import MODEL_REPOSITORY

INSTANCE = "cluster"
"""Id of the folder's only planning task, and of its cluster."""
_NANOSECONDS_PER_MICROSECOND = 1_000
_MICROSECONDS_PER_MILLISECOND = 1_000


@dataclass(frozen=True, slots=True)
class _Served:
    """One model of the planning task."""

    manifest: ModelManifest
    profile: ModelProfile
    share: float
    """Share of the model in all requests."""

    @property
    def name(self) -> str:
        return self.manifest.key.name


@click.command("dataset")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--model",
    "models",
    multiple=True,
    required=True,
    help="Model to serve, NAME or NAME=SHARE of the requests; may be repeated.",
)
@click.option(
    "--gpus",
    multiple=True,
    required=True,
    help="CLASS=COUNT, the fastest class first; may be repeated.",
)
@MODEL_REPOSITORY
@click.option(
    "--slo-ms",
    type=click.FloatRange(min=0, min_open=True),
    help="Deadline of requests of every model; default: as its model.yaml says.",
)
@click.option(
    "--gigabits",
    type=click.FloatRange(min=0, min_open=True),
    default=16.0,
    show_default=True,
    help="Effective rate of a server's link; every GPU counts as a server.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.4,
    show_default=True,
    help="Share of each SLO the plan keeps free, as the setting plan_margin.",
)
def dataset(
    folder: Path,
    models: tuple[str, ...],
    gpus: tuple[str, ...],
    model_repository: Path,
    **rules: Any,
) -> None:
    """Writes a planning task into FOLDER: models with profiles, on GPUs one has or may buy.

    The task is called "cluster". Classes a model's profile does not know are refused: measure them,
    or estimate them with `catenaryd profile MODEL --no-measure --estimate CLASS`.

    Example: catenaryd plan dataset task --model efficientnet-lite0 --gpus L4=2 --gpus P4=3
    """
    counts = {name: _count(name, text) for name, text in map(_pair, gpus)}
    served = _served(ModelRepository(model_repository), models)
    levels = {name: _levels(name, served) for name in counts}
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(folder / "models.csv", "dnn,blocks", _model_rows(served))
    _write_times(folder / "block_timing.csv", served, levels)
    _write_csv(folder / "cut_bytes.csv", "dnn,cut_before_block,bytes_per_request", _cuts(served))
    cluster = {
        "high": next(iter(counts)),
        "gpus": counts,
        "vgpu_levels": levels,
        "gpus_per_server": dict.fromkeys(counts, 1),
        "effective_bandwidth_gbps": rules["gigabits"],
    }
    task = _instance(served, rules["slo_ms"], rules["margin"])
    (folder / "clusters.json").write_text(json.dumps({INSTANCE: cluster}, indent=1))
    (folder / "instances.json").write_text(json.dumps([task], indent=1))
    click.echo(f"task {INSTANCE!r} written to {folder}")
    guessed = _estimated(served, counts)
    if guessed:
        click.echo(f"times of {', '.join(guessed)} are estimates; measure before you rely on them")


def _estimated(served: Iterable[_Served], counts: Mapping[str, int]) -> list[str]:
    devices = [device for each in served for device in each.profile.devices]
    return sorted({d.device_class for d in devices if d.estimated and d.device_class in counts})


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _count(name: str, text: str) -> int:
    if not (name and text.isdigit() and int(text) > 0):
        raise InvalidInput("gpus", f"{name}={text} is not CLASS=COUNT")
    return int(text)


def _served(repository: ModelRepository, models: Iterable[str]) -> list[_Served]:
    found = []
    for reference, share in map(_pair, models):
        key = repository.resolve(reference)
        profile = repository.profile(key)
        if profile is None:
            raise InvalidInput("model", f"{key} has no profile; `catenaryd profile` makes it")
        try:
            weight = float(share or 1.0)
        except ValueError:
            weight = 0.0
        if not 0 < weight < float("inf"):
            raise InvalidInput("model", f"{share!r} is not a share of the requests")
        found.append(_Served(repository.manifest(key), profile, weight))
    return found


def _levels(device_class: str, served: Iterable[_Served]) -> int:
    """Returns how many virtual GPUs a class can be divided into: the levels known without a gap."""
    common: set[int] = set.intersection(
        *(set(each.profile.levels(device_class)) for each in served)
    )
    if 1 not in common:
        names = ", ".join(
            each.name for each in served if 1 not in each.profile.levels(device_class)
        )
        raise InvalidInput("gpus", f"the profile of {names} has no times of {device_class!r}")
    return next(level for level in range(1, len(common) + 2) if level + 1 not in common)


def _model_rows(served: Iterable[_Served]) -> list[str]:
    return [f"{each.name},{each.profile.blocks}" for each in served]


def _write_times(path: Path, served: Sequence[_Served], levels: Mapping[str, int]) -> None:
    most = max(each.manifest.max_batch for each in served)
    rows = []
    for each in served:
        for device_class, highest in levels.items():
            for level, block in product(range(1, highest + 1), range(each.profile.blocks)):
                times = each.profile.compute_ns(device_class, level, block, block + 1)
                cells = [f"{ns / _NANOSECONDS_PER_MICROSECOND:.3f}" for ns in times]
                cells = cells[: each.manifest.max_batch]
                cells += [""] * (most - len(cells))
                rows.append(",".join([each.name, device_class, str(level), str(block), *cells]))
    columns = [f"us_b{batch}" for batch in range(1, most + 1)]
    _write_csv(path, ",".join(["dnn", "gpu", "vgpus_per_gpu", "block", *columns]), rows)


def _cuts(served: Iterable[_Served]) -> list[str]:
    return [
        f"{each.name},{cut},{each.profile.cut_row_bytes[cut]}"
        for each in served
        for cut in range(1, each.profile.blocks)
    ]


def _instance(served: list[_Served], slo_ms: float | None, margin: float) -> dict[str, Any]:
    total = sum(each.share for each in served)
    dnns = []
    for each in served:
        own_us = each.manifest.slo_ns / _NANOSECONDS_PER_MICROSECOND
        slo_us = own_us if slo_ms is None else slo_ms * _MICROSECONDS_PER_MILLISECOND
        dnns.append(
            {
                "dnn": each.name,
                "weight": each.share / total,
                "slo_us": slo_us,
                "margin_us": margin * slo_us,
            }
        )
    return {"id": INSTANCE, "cluster": INSTANCE, "dnns": dnns}


def _write_csv(path: Path, header: str, rows: Iterable[str]) -> None:
    path.write_text("\n".join([header, *rows]) + "\n")
