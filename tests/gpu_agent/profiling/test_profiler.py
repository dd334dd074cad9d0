"""Real blocks in real processes."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from catenary_agent.executors.device import Device
from catenary_agent.profiling import profiler
from catenary_agent.profiling.profiler import ProfileCallbacks, ProfileOrder, profile_model
from catenary_agent.profiling.samples import busy_window
from catenary_agent.profiling.siblings import virtual_gpus
from catenary_agent.profiling.worker import LoadBlock, RunBlock
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.profile import ModelProfile, parse_profile, profile_document
from catenary_services.errors import CatenaryError, InvalidInput, ModelNotFound, Unavailable
from catenary_services.models.model_repository import ModelRepository
from small_models.jail_here import run_here

ONNX, TORCH = ModelKey("small-onnx", "1"), ModelKey("small-torch", "1")
WEIGHT_BYTES = 4 * (24 * 3 * 9 + 3 * 24 * 24 * 9 + 24 * 16 * 16 * 10)
"""Of the four convolutions and the matrix of both models, in float32."""
ORDER = ProfileOrder("cpu", "testbed", levels=(1, 2), batch_sizes=(1, 4), runs=3)


@pytest.fixture(autouse=True)
def _costs_are_counted_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "run_jailed", run_here)


@pytest.mark.parametrize(("key", "levels"), [(ONNX, (1, 2)), (TORCH, (1,))], ids=["onnx", "torch"])
def test_a_profile_has_every_block_batch_and_level(
    repository: ModelRepository, target: Path, key: ModelKey, levels: tuple[int, ...]
) -> None:
    begun: list[int] = []
    steps: list[object] = []
    order = replace(ORDER, levels=levels)
    profile = profile_model(
        repository, key, order, target, ProfileCallbacks(begun.append, steps.append)
    )
    table = repository.block_table(key)
    assert table.blocks == 3
    assert begun == [len(steps)] == [len(levels) * 3 * 2]
    assert profile.model_hash == repository.model_hash(key)
    assert [d.identity for d in profile.devices] == [("testbed", level) for level in levels]
    for device in profile.devices:
        assert not device.estimated
        assert device.source.startswith("measured: ")
        for p50, p95 in zip(device.p50_ns, device.p95_ns, strict=True):
            assert all(0 < a <= b for a, b in zip(p50, p95, strict=True))
    assert ("2 busy processes" in profile.devices[-1].source) == (levels[-1] == 2)
    inner = [boundary.row_bytes // 2 for boundary in table.boundaries[1:-1]]
    assert profile.cut_row_bytes == (0, *inner, 0)
    # Where the cuts are depends on measured times: a block may have no weights, all have them all.
    beside = sum(profile.block_weight_bytes) - WEIGHT_BYTES
    assert 0 < beside < 8192 if key == ONNX else beside == 0, (
        "the graphs of three files, or nothing"
    )
    assert parse_profile(json.loads(target.read_text())) == profile
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_only_what_was_not_measured_with_the_same_settings_is_measured(
    repository: ModelRepository, target: Path
) -> None:
    steps: list[object] = []

    def measure(order: ProfileOrder) -> tuple[int, ModelProfile]:
        steps.clear()
        found = profile_model(repository, ONNX, order, target, ProfileCallbacks(step=steps.append))
        return len(steps), found

    order = ProfileOrder("cpu", levels=(1,), batch_sizes=(1,), runs=2)
    taken, first = measure(order)
    assert taken == 3
    assert measure(order) == (0, first)
    taken, wider = measure(replace(order, batch_sizes=(1, 2)))
    assert taken == 3
    assert [row[0] for row in wider.devices[0].p50_ns] == [r[0] for r in first.devices[0].p50_ns]
    assert measure(replace(order, again=True))[0] == 3
    assert measure(replace(order, runs=3))[0] == 3


class Interrupted(BaseException):
    """Stands for Ctrl-C at a known moment."""


def test_an_interrupted_measurement_goes_on_where_it_was(
    repository: ModelRepository, target: Path
) -> None:
    seen: list[object] = []

    order = replace(ORDER, levels=(2,))

    def stop_after_four(step: object) -> None:
        seen.append(step)
        if len(seen) == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        profile_model(repository, ONNX, order, target, ProfileCallbacks(step=stop_after_four))
    assert not target.exists()
    partial = json.loads(target.with_name("profile.json.partial").read_text())
    kept = dict(next(iter(partial["measured"].values())))
    assert len(kept) == 4
    left: list[object] = []
    profile = profile_model(repository, ONNX, order, target, ProfileCallbacks(step=left.append))
    assert len(left) == 6 - 4
    assert not set(left) & set(seen)
    found = profile.device("testbed", 2)
    assert found is not None
    assert kept["2/0/1"] == [found.p50_ns[0][0], found.p95_ns[0][0]]
    assert not target.with_name("profile.json.partial").exists()


def test_what_was_measured_of_another_model_file_is_not_used(
    repository: ModelRepository, target: Path
) -> None:
    order = ProfileOrder("cpu", batch_sizes=(1,), runs=2)
    other = profile_document(profile_model(repository, ONNX, order, target))
    target.write_text(json.dumps({**other, "model_hash": "of another file"}))
    steps: list[object] = []
    found = profile_model(repository, ONNX, order, target, ProfileCallbacks(step=steps.append))
    assert len(steps) == 3
    assert found.model_hash == repository.model_hash(ONNX)


def test_a_file_that_is_no_profile_is_not_overwritten(
    repository: ModelRepository, target: Path
) -> None:
    target.write_text("precious")
    with pytest.raises(InvalidInput, match=r"profile\.json: is not a profile"):
        profile_model(repository, ONNX, ORDER, target)
    assert target.read_text() == "precious"


def test_all_virtual_gpus_really_run_at_the_same_time(repository: ModelRepository) -> None:
    level = 3
    with virtual_gpus(repository.root, Device("cpu", virtual_level=level)) as siblings:
        assert len({os.getpid(), *siblings.pids}) == level + 1
        siblings.load(LoadBlock(PartitionKey(ONNX, 0, 3), True))
        for _ in range(2):
            found = siblings.run(RunBlock(4, at_least_runs=5, at_least_ns=200_000_000))
            assert len(found) == level
            begin, end = busy_window(found)
            assert end - begin >= 100_000_000
            for runs in found:
                assert sum(begin <= start and done <= end for start, done in runs) >= 2
    for pid in siblings.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_measuring_process_that_dies_ends_the_measurement(repository: ModelRepository) -> None:
    with virtual_gpus(repository.root, Device("cpu", virtual_level=2)) as siblings:
        siblings.load(LoadBlock(PartitionKey(ONNX, 0, 1), True))
        os.kill(siblings.pids[1], signal.SIGKILL)
        with pytest.raises(Unavailable, match="exit code -9"):
            siblings.run(RunBlock(1, at_least_runs=5, at_least_ns=0))


def test_what_a_measuring_process_cannot_do_is_said_by_its_cause(
    repository: ModelRepository,
) -> None:
    device = Device("cpu", virtual_level=2)
    with virtual_gpus(repository.root, device) as siblings, pytest.raises(CatenaryError) as caught:
        siblings.load(LoadBlock(PartitionKey(ONNX, 2, 9), True))
    assert isinstance(caught.value, InvalidInput)
    assert "3 blocks" in caught.value.message


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (ProfileOrder("cpu", runs=0), "runs"),
        (ProfileOrder("cpu", levels=()), "levels"),
        (ProfileOrder("cpu", levels=(9,)), "virtual_level"),
        (ProfileOrder("cpu", batch_sizes=(0, 1)), "batches"),
        (ProfileOrder("emulated:T4"), "device"),
        (ProfileOrder("tpu"), "device"),
        (ProfileOrder(None), "estimate"),
        (ProfileOrder(None, estimates=("K80",)), "device_class"),
        (ProfileOrder(None, estimates=("T4",), precision="fp8"), "precision"),
    ],
)
def test_an_order_that_cannot_be_is_refused(order: ProfileOrder, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        order.checked()
    assert caught.value.field == field


def test_a_model_that_is_not_there_is_said_so(repository: ModelRepository, target: Path) -> None:
    with pytest.raises(ModelNotFound):
        profile_model(repository, ModelKey("nothing", "1"), ORDER, target)
