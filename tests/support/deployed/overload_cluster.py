"""Clusters of emulated devices with a capacity that two cores are far from, and figures of a load."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer, models

from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.models.model_repository import ModelRepository, write_file
from catenary_services.security.key_file import add_key
from cluster_harness import RunningCluster, environment, running_cluster

FEATURES = 16
PACED = ModelKey("paced", "1")
SPEAKER = ModelKey("speaker", "1")
SLO_MS = 1_500
BATCH = 8
ROW_MS, BATCH_MS = 20, 80
"""A stage takes 80 ms and 20 more per row: 240 ms for a full batch, so 33 rows per second."""
ROWS_PER_S = BATCH / (BATCH_MS + BATCH * ROW_MS) * 1e3
SESSIONS = 4
"""Of each of two chains."""
_PATIENT = {"heartbeat_s": 2.0, "silence_s": 20.0}
_VOCABULARY = 256
_HIDDEN = 8
_MEBIBYTE = 1024 * 1024


@contextmanager
def paced_cluster(folder: Path, keys: Mapping[str, Mapping[str, Any]]) -> Iterator[Loaded]:
    """Two emulated devices behind each other serve one model of two blocks in batches."""
    repository = ModelRepository(folder / "models")
    ends = (
        TensorSpec("input", "FP32", (ANY, FEATURES)),
        TensorSpec("cut", "FP32", (ANY, 8)),
        TensorSpec("output", "FP32", (ANY, FEATURES)),
    )
    table = BlockTable(
        "0" * 64, True, tuple(Boundary((end,), 64) for end in ends), (50_000_000, 50_000_000)
    )
    repository.write_manifest(
        ModelManifest(
            key=PACED,
            platform="onnxruntime_onnx",
            file="model.onnx",
            slo_ns=SLO_MS * 1_000_000,
            max_batch=BATCH,
            float16_boundaries=False,
        )
    )
    repository.write_block_table(PACED, table)
    times = [(BATCH_MS + ROW_MS * rows) * 1_000_000 for rows in range(1, BATCH + 1)]
    profile = folder / "times.json"
    profile.write_text(json.dumps({PACED.name: {"0": times, "1": times}}))
    stages = [{"blocks": [at, at + 1], "agents": [f"agent-{at}"]} for at in (0, 1)]
    placement = {
        "models": [
            {
                "name": PACED.name,
                "slo_ms": SLO_MS,
                "pipelines": [{"batch": BATCH, "partitions": stages}],
            },
        ]
    }
    with _loaded(folder, PACED, placement, profile, keys) as loaded:
        yield loaded


@contextmanager
def speaking_cluster(folder: Path, keys: Mapping[str, Mapping[str, Any]]) -> Iterator[Loaded]:
    """Two emulated devices, a chain each, generate for a few sessions at a time."""
    repository = ModelRepository(folder / "models")
    blocks = 2
    repository.write_manifest(
        ModelManifest(
            key=SPEAKER,
            platform="decoder",
            file="model.safetensors",
            slo_ns=10**10,
            max_batch=SESSIONS,
            float16_boundaries=False,
            session_tokens=128,
        )
    )
    repository.write_decoder_table(
        SPEAKER,
        DecoderTable(
            model_hash="0" * 64,
            blocks=blocks,
            hidden_size=_HIDDEN,
            attention_heads=1,
            key_value_heads=1,
            head_size=_HIDDEN,
            vocabulary_size=_VOCABULARY,
            context_tokens=128,
            end_token_ids=(0,),
            block_bytes=1_000_000,
            embedding_bytes=0,
            head_bytes=0,
            cache_bytes_per_token=64,
        ),
    )
    edges = {
        0: TensorSpec("tokens", "INT64", (ANY, 1)),
        blocks: TensorSpec("logits", "FP32", (ANY, _VOCABULARY)),
    }
    between = TensorSpec("hidden", "FP32", (ANY, _HIDDEN))
    cuts = tuple(Boundary((edges.get(cut, between),), 4 * _HIDDEN) for cut in range(blocks + 1))
    repository.write_block_table(SPEAKER, BlockTable("0" * 64, True, cuts, (1,) * blocks))
    words = {str(number): number for number in range(_VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    write_file(repository.folder(SPEAKER) / "tokenizer.json", tokenizer.to_str())
    profile = folder / "times.json"
    profile.write_text(
        json.dumps(
            {
                SPEAKER.name: {
                    "prefill_ns": 10_000_000,
                    "prefill_token_ns": 200_000,
                    "decode_ns": 10_000_000,
                    "decode_session_ns": 500_000,
                }
            }
        )
    )
    placement = {
        "models": [
            {
                "name": SPEAKER.name,
                "session_tokens": 128,
                "slo_ms": 10_000,
                "chains": [
                    {
                        "capacity": SESSIONS,
                        "hops": [{"agent": f"agent-{at}", "blocks": [0, blocks]}],
                    }
                    for at in (0, 1)
                ],
            },
        ]
    }
    with _loaded(folder, SPEAKER, placement, profile, keys) as loaded:
        yield loaded


@contextmanager
def _loaded(
    folder: Path,
    model: ModelKey,
    placement: dict[str, Any],
    profile: Path,
    keys: Mapping[str, Mapping[str, Any]],
) -> Iterator[Loaded]:
    file = folder / "keys.json"
    secrets = {name: add_key(file, name, ["infer"], limits) for name, limits in keys.items()}
    config = {
        "gateway": {"api_keys_file": str(file)},
        "agent": {"emulated_profile": str(profile), **_PATIENT},
        "scheduler": dict(_PATIENT),
    }
    with running_cluster(
        folder,
        models=(model.name,),
        placement=placement,
        config=config,
        agents=2,
        device="emulated:any",
    ) as cluster:
        yield Loaded(cluster, folder, secrets)


@dataclass(slots=True)
class Answers:
    """What became of the requests of one phase."""

    sent: list[dict[str, Any]]
    seconds: float
    probes_s: list[float] = field(default_factory=list)
    """How long calls took meanwhile that cost a server next to nothing."""

    def of(self, key: str) -> Answers:
        return Answers([each for each in self.sent if each["key"] == key], self.seconds)

    def after(self, due_s: float) -> Answers:
        later = [each for each in self.sent if each["due_s"] >= due_s]
        return Answers(later, self.seconds - due_s)

    def good(self, deadline_s: float) -> list[dict[str, Any]]:
        return [each for each in self.sent if not each["error"] and each["took_s"] <= deadline_s]

    def goodput(self, deadline_s: float, since_s: float = 0.0) -> float:
        """Returns how many answers per second came within the deadline and within the phase.

        What is unanswered at the end of a phase takes the devices longer than the phase lasts. It
        would raise the rate of a short phase, in which many wait, above what they can do. With
        `since_s` the answers of the first seconds do not count either, as the devices had not begun
        then.
        """
        came = (each["due_s"] + each["took_s"] for each in self.good(deadline_s))
        return sum(since_s < at_s <= self.seconds for at_s in came) / (self.seconds - since_s)

    @property
    def refused(self) -> list[dict[str, Any]]:
        return [each for each in self.sent if each["error"]]

    @property
    def reasons(self) -> dict[str, int]:
        names = [each["error"] for each in self.refused]
        return {name: names.count(name) for name in sorted(set(names))}

    def refusal_s(self, percent: float) -> float:
        return float(np.percentile([each["took_s"] for each in self.refused], percent))

    def answer_s(self, percent: float) -> float:
        return float(
            np.percentile([each["took_s"] for each in self.sent if not each["error"]], percent)
        )

    def probe_s(self, percent: float) -> float:
        return float(np.percentile(self.probes_s, percent))

    def lag_s(self, percent: float) -> float:
        return float(np.percentile([each["lag_s"] for each in self.sent], percent))


@dataclass(slots=True)
class Loaded:
    """A running cluster, its API keys, and the memory its processes use."""

    cluster: RunningCluster
    folder: Path
    keys: dict[str, str]
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)

    def load(self, phases: list[dict[str, Any]], **order: Any) -> dict[str, Answers]:
        """Runs the generator through all phases and returns what came of each."""
        file, answer = self.folder / "order.json", self.folder / "answer.json"
        document = {"target": self.cluster.grpc, "keys": self.keys, "phases": phases, **order}
        file.write_text(json.dumps(document))
        seconds = sum(phase["seconds"] for phase in phases)
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,))
        watch.start()
        try:
            subprocess.run(
                [
                    sys.executable,
                    str(Path(__file__).with_name("overload_load.py")),
                    str(file),
                    str(answer),
                ],
                env=environment(),
                check=True,
                timeout=2 * seconds + 60,
            )
        finally:
            over.set()
            watch.join()
        found = json.loads(answer.read_text())
        self.started = found["started"]
        return {
            phase["name"]: Answers(
                [each for each in found["sent"] if each["phase"] == phase["name"]],
                phase["seconds"],
                [each["took_s"] for each in found["probes"] if each["phase"] == phase["name"]],
            )
            for phase in phases
        }

    def growth_mebibytes(self, phase: str, first_s: float, last_s: float) -> dict[str, float]:
        """Returns how much the memory of each process grew between two moments of a phase."""
        start = self.started[phase]
        inside = [usage for at, usage in self.memory if first_s <= at - start <= last_s]
        tenth = max(1, len(inside) // 10)
        return {
            name: (
                float(np.median([usage[name] for usage in inside[-tenth:]]))
                - float(np.median([usage[name] for usage in inside[:tenth]]))
            )
            / _MEBIBYTE
            for name in inside[0]
        }

    def _watch(self, over: threading.Event) -> None:
        watched = {
            name: psutil.Process(int(pid))
            for name, pid in self.cluster.facts["pids"].items()
            if name.startswith(("gateway", "scheduler"))
        }
        while not over.wait(0.5):
            usage = {name: process.memory_info().rss for name, process in watched.items()}
            self.memory.append((time.time(), usage))
