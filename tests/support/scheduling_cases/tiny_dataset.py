"""A data set of two small models on two classes of GPUs, in the format of tests/data/ppipe."""

from __future__ import annotations

import json
from pathlib import Path

BLOCKS = 4
MODELS = ("north", "south")
LEVELS = {"fast": (1, 2), "slow": (1,)}
SLO_US = 40_000
RATES = (300.0, 350.0)


def write_dataset(folder: Path) -> Path:
    """Writes the files, with reference rates but without reference plans; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _csv(folder / "models.csv", "dnn,blocks", [f"{name},{BLOCKS}" for name in MODELS])
    timing = []
    for number, name in enumerate(MODELS):
        for gpu, levels in LEVELS.items():
            for level in levels:
                for block in range(BLOCKS):
                    # Later blocks suit the fast class: cutting pays.
                    base = 1000 * (1 if gpu == "fast" else 1.5 + block) * (1 + 0.1 * number)
                    times = [round(base * level * (0.4 + 0.6 * b)) for b in range(1, 5)]
                    timing.append(f"{name},{gpu},{level},{block}," + ",".join(map(str, times)))
    columns = "dnn,gpu,vgpus_per_gpu,block,us_b1,us_b2,us_b3,us_b4"
    _csv(folder / "block_timing.csv", columns, timing)
    cuts = [f"{name},{cut},{200_000 // cut}" for name in MODELS for cut in range(1, BLOCKS)]
    _csv(folder / "cut_bytes.csv", "dnn,cut_before_block,bytes_per_request", cuts)
    cluster = {
        "high": "fast",
        "low": "slow",
        "gpus": {"fast": 4, "slow": 8},
        "vgpu_levels": {"fast": 2, "slow": 1},
        "gpus_per_server": {"fast": 1, "slow": 1},
        "effective_bandwidth_gbps": 6,
    }
    (folder / "clusters.json").write_text(json.dumps({"tiny": cluster}))
    instance = {
        "id": "set/even/G/tiny",
        "cluster": "tiny",
        "max_partitions": 2,
        "dnns": [
            {
                "dnn": name,
                "weight": weight,
                "slo_us": SLO_US,
                "margin_us": 0.4 * SLO_US,
                "est_xput_rps": 200.0,
                "batch_build_factor": 1.3,
            }
            for name, weight in zip(MODELS, (0.4, 0.6), strict=True)
        ],
        "reference": {"v4": {"objective": 600.0, "xput_rps": RATES}},
    }
    (folder / "instances.json").write_text(json.dumps([instance]))
    return folder


def _csv(path: Path, header: str, lines: list[str]) -> None:
    path.write_text("\n".join([header, *lines]) + "\n")
