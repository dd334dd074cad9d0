"""The order in which files of tests are given to the processes of `make test`.

A file runs in one process. Were a long one among the last, the other processes would wait for it.
"""

from __future__ import annotations

import pytest

LONGEST = (
    "tests/gpu_agent/encoders/test_encoders.py",
    "tests/gpu_agent/profiling/test_profiler.py",
    "tests/benchmarks/test_gpu_day.py",
    "tests/gpu_agent/partitioning/test_exactness.py",
    "tests/gpu_agent/executors/test_efficientnet.py",
    "tests/cluster/texts/test_text_paths.py",
    "tests/cluster/test_model_store.py",
    "tests/cluster/test_chat.py",
    "tests/gpu_agent/decoders/model_files/test_families.py",
    "tests/gpu_agent/partitioning/test_compared_graphs.py",
    "tests/catenaryd/sources/test_served_answer.py",
    "tests/gpu_agent/decoders/transfers/test_lent_memory.py",
    "tests/catenaryd/test_command_line.py",
    "tests/gpu_agent/decoders/model_files/test_sizes.py",
    "tests/services/transport/test_conformance.py",
    "tests/gpu_agent/partitioning/test_pytorch_exports.py",
    "tests/cluster/texts/test_texts.py",
    "tests/gpu_agent/decoders/importing/test_importing.py",
    "tests/gpu_agent/partitioning/test_torch_vetting.py",
    "tests/scheduler/storage/test_tables.py",
    "tests/services/rules/test_walking.py",
    "tests/cluster/test_chats_share_agents.py",
    "tests/services/jail/test_jail.py",
    "tests/cluster/test_sdk_and_health.py",
    "tests/cluster/test_session_stories.py",
    "tests/cluster/test_path_budget.py",
    "tests/catenaryd/sources/test_bringing.py",
    "tests/cluster/test_tritonclient.py",
    "tests/gpu_agent/test_device_check.py",
    "tests/gpu_agent/decoders/importing/test_importing_for_gpus.py",
    "tests/gpu_agent/decoders/sampling/test_sampling.py",
    "tests/gpu_agent/partitioning/test_fetched_weights.py",
    "tests/cluster/test_traces.py",
    "tests/gpu_agent/process/test_process.py",
    "tests/docs/test_truth.py",
    "tests/gpu_agent/executors/test_torch_part.py",
    "tests/gateway/generation/test_sessions.py",
    "tests/catenaryd/commands/test_profile_command.py",
)
"""Files that took more than 40 s on a busy machine, the longest first (`pytest --durations=0`)."""


def longest_first(items: list[pytest.Item]) -> None:
    """Puts the tests of the longest files first; the others keep their order."""
    place = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
