"""Every stage of the GPU day, with tiny models on a CPU: what it measures there is real, and small."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.gpu import check, platform, speed
from benchmarks.gpu.program import Stage
from benchmarks.gpu.stage import Context, Row

HERE = [*check.STAGES, *speed.STAGES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one call's stages share."""
    return tmp_path_factory.mktemp("g")


def rows_of(stage: Stage, folder: Path) -> list[Row]:
    """Runs a stage in this process: importing PyTorch once for all of them."""
    here = Context(folder, tiny=True)
    module, _, function = stage.target.partition(":")
    getattr(importlib.import_module(module), function)(here)
    return here.rows


@pytest.mark.parametrize("stage", HERE, ids=lambda stage: stage.target.partition(".gpu.")[2])
def test_a_stage_runs_on_a_cpu_and_keeps_its_promises(stage: Stage, folder: Path) -> None:
    rows = rows_of(stage, folder)
    assert rows
    assert [row.text() for row in rows if row.ok is False] == []


@pytest.mark.timeout(1500)
def test_a_whole_cluster_streams_moves_and_survives(folder: Path) -> None:
    rows = {row.name: row for row in rows_of(platform.STAGES[0], folder)}
    assert [row.text() for row in rows.values() if row.ok is False] == []
    assert {
        "first: answers lost",
        "OpenAI: first token, median",
        "moves: answers equal",
        "kill -9: the agent is back after",
        "drain: answers equal",
    } <= set(rows)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stage", platform.STAGES[1:], ids=lambda stage: stage.name)
def test_other_clusters_say_the_same(stage: Stage, folder: Path) -> None:
    rows = rows_of(stage, folder)
    assert [row.text() for row in rows if row.ok is False] == []
    assert any(row.name == f"{stage.name}: answers equal" for row in rows)


def test_the_most_time_a_program_takes_is_less_than_a_call_may() -> None:
    """Ten minutes a call: limits of stages may add up to more, the most important ones not."""
    for stages, limit_s in ((check.STAGES, 470), (speed.STAGES, 560), (platform.STAGES, 470)):
        assert len({stage.name for stage in stages}) == len(stages)
        assert sum(stage.limit_s for stage in stages[:5]) <= limit_s
        for stage in stages:
            module, _, function = stage.target.partition(":")
            assert callable(getattr(importlib.import_module(module), function))
