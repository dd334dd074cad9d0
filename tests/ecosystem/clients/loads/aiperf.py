"""NVIDIA's AIPerf, a generator of load: short runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from features import API_KEY, BASE_URL, CHAT_MODEL, EMBEDDING_MODEL, TOKENIZER, feature, report

REQUESTS = 4
ENVIRONMENT = os.environ | {"AIPERF_DATASET_MMAP_BASE_PATH": str(Path.cwd())}
"""It leaves a folder behind, here instead of among the machine's temporary files."""
ENVIRONMENT.pop("HF_HUB_OFFLINE", None)  # told to stay offline, it takes no folder of a tokenizer


def profile(kind: str, model: str, *options: str) -> dict[str, object]:
    """Runs a load, and returns what was measured."""
    folder = Path(kind)
    command = ["aiperf", "profile", "--model", model, "--url", BASE_URL, "--endpoint-type", kind]
    command += ["--api-key", API_KEY, "--tokenizer", TOKENIZER, "--ui", "none"]
    command += ["--request-count", str(REQUESTS), "--concurrency", "2", "--isl", "8"]
    command += ["--random-seed", "1"]
    command += ["--workers-max", "1", "--record-processors", "1", "--artifact-dir", str(folder)]
    command += ["--no-server-metrics", "--no-gpu-telemetry", *options]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    (told,) = folder.rglob("profile_export_aiperf.json")
    measured: dict[str, object] = json.loads(told.read_text())
    assert not measured["error_summary"], measured["error_summary"]
    assert measured["request_count"]["avg"] == REQUESTS, measured  # type: ignore[index]
    return measured


@feature("a load of streamed chats: time to the first token, time between tokens")
def chats() -> None:
    told = profile("chat", CHAT_MODEL, "--streaming", "--osl", "8")
    assert {"time_to_first_token", "inter_token_latency"} <= told.keys()


@feature("a load of Anthropic's messages")
def messages() -> None:
    assert "request_latency" in profile("messages", CHAT_MODEL, "--osl", "8")


@feature("a load of embeddings")
def embeddings() -> None:
    assert "request_latency" in profile("embeddings", EMBEDDING_MODEL)


report("aiperf")
