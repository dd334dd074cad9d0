"""Limits of control groups, read from files laid out as the kernel does."""

from __future__ import annotations

from pathlib import Path

import pytest

from catenary_agent.devices.container_limits import core_limit, memory_limit_bytes


def lay(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("files", "memory", "cores"),
    [
        ({"memory.max": "3221225472\n", "cpu.max": "150000 100000\n"}, 3 << 30, 1.5),
        ({"memory.max": "max\n", "cpu.max": "max 100000\n"}, None, None),
        (
            {
                "memory/memory.limit_in_bytes": "1073741824\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1 << 30,
            2.0,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
            None,
        ),
        ({}, None, None),
    ],
    ids=["version 2", "version 2 without", "version 1", "version 1 without", "no groups"],
)
def test_limits_of_what_is_mounted(
    tmp_path: Path, files: dict[str, str], memory: int | None, cores: float | None
) -> None:
    lay(tmp_path, files)
    own = tmp_path / "own"
    assert memory_limit_bytes(tmp_path, own) == memory
    assert core_limit(tmp_path, own) == cores


def test_the_tightest_of_own_group_and_root_counts(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "memory.max": "8589934592",
            "machine/pod/memory.max": "2147483648",
            "cpu.max": "400000 100000",
            "machine/pod/cpu.max": "50000 100000",
            "own": "0::/machine/pod\n",
        },
    )
    assert memory_limit_bytes(tmp_path, tmp_path / "own") == 2 << 30
    assert core_limit(tmp_path, tmp_path / "own") == 0.5


def test_part_of_a_core_still_gives_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from catenary_agent.devices import device, processor

    monkeypatch.setattr(processor, "core_limit", lambda: 0.5)
    assert processor.host_cores() == 1
    monkeypatch.setattr(processor, "memory_limit_bytes", lambda: 2 << 30)
    assert device.default_memory_bytes("cpu") == 1 << 30
