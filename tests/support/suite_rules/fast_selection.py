"""What `make test FAST=1` runs: files whose tests start no process, load no model, take no time.

Everything that decides it is here, and `conftest.py` fails a fast test that starts a process or
imports a runtime of models, so that a file which slips through is noticed by its own test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]

SLOW_FOLDERS = (
    "benchmarks",
    "build",
    "catenaryd",
    "cluster",
    "compose",
    "deploy",
    "docs",
    "ecosystem",
    "gateway/constrained",
    "gateway/texts",
    "gpu_agent/decoders",
    "gpu_agent/encoders",
    "gpu_agent/engines",
    "gpu_agent/executors",
    "gpu_agent/kv",
    "gpu_agent/partitioning",
    "gpu_agent/process",
    "gpu_agent/profiling",
    "lab",
    "scheduler/service",
    "scheduler/storage",
    "services/jail",
    "services/redis",
    "services/transport",
    "system",
)
"""Folders whose tests make models, or start Redis, agents, engines, clusters or what tries out
grammars."""

RUNTIMES = ("onnxruntime", "onnxruntime_genai", "torch", "transformers", "ctranslate2")
"""Libraries that run models: importing one takes seconds."""

_STARTS = (
    *RUNTIMES,
    "EmbeddedRedis",
    "ProcessPoolExecutor",
    "create_subprocess_exec",
    "language_model",
    "load_decoder",
    "multiprocessing",
    "pty",
    "redis_servers",
    "spawn",
    "subprocess",
)
_NAMED = re.compile(rf"\b({'|'.join(_STARTS)})\b")


def is_fast(path: Path) -> bool:
    """True if the tests of a file or a folder run with `FAST=1`."""
    place = path.resolve().relative_to(TESTS)
    if any(place.is_relative_to(folder) for folder in SLOW_FOLDERS):
        return False
    return path.is_dir() or not _NAMED.search(path.read_text())


def fast_files() -> Iterator[Path]:
    """Yields the files of tests that run with `FAST=1`."""
    return (path for path in sorted(TESTS.rglob("test_*.py")) if is_fast(path))
