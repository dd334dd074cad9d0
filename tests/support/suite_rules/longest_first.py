"""The order in which files of tests are given to the processes of `make test`.

A file runs in one process. Were a long one among the last, the other processes would wait for it.
"""

from __future__ import annotations

import pytest

LONGEST = (
    "tests/gpu_agent/partitioning/test_compared_graphs.py",
    "tests/gpu_agent/partitioning/test_exactness.py",
    "tests/gpu_agent/decoders/sampling/test_sampler_sizes.py",
    "tests/gpu_agent/decoders/model_files/test_sizes.py",
    "tests/benchmarks/test_gpu_day.py",
    "tests/gpu_agent/executors/test_efficientnet.py",
    "tests/gpu_agent/profiling/test_profiler.py",
    "tests/services/transport/test_conformance.py",
    "tests/gpu_agent/partitioning/test_torch_vetting.py",
    "tests/scheduler/storage/test_tables.py",
    "tests/services/rules/test_walking.py",
    "tests/catenaryd/test_command_line.py",
    "tests/services/jail/test_jail.py",
    "tests/gpu_agent/decoders/importing/test_importing.py",
    "tests/gpu_agent/decoders/importing/test_importing_for_gpus.py",
    "tests/gpu_agent/decoders/sampling/test_sampling.py",
    "tests/gpu_agent/test_device_check.py",
    "tests/gpu_agent/process/test_process.py",
    "tests/gpu_agent/decoders/torch/test_quantised.py",
    "tests/gpu_agent/decoders/test_decoder_conformance.py",
    "tests/gpu_agent/decoders/onnx/test_onnx_executor.py",
    "tests/gpu_agent/decoders/torch/test_torch_executor.py",
)
"""Files that take more than about seven seconds of a core, the longest first."""


def longest_first(items: list[pytest.Item]) -> None:
    """Puts the tests of the longest files first; the others keep their order."""
    place = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
