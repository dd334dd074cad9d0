from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from catenary_agent.executors.base import Executor
from catenary_agent.executors.device import Device
from catenary_agent.executors.emulated import EmulatedPart
from catenary_agent.executors.loading import load_executor
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.profile import DeviceProfile, ModelProfile
from catenary_services.domain.tensors import TensorSpec
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.models.model_repository import ModelRepository

KEY = ModelKey("net", "1")
MS = 1_000_000


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    """A model of three blocks without any weights; "kept" is made by block 0, used by block 2."""
    kept = TensorSpec("kept", "FP32", (-1, 2, -1))
    boundaries = (
        Boundary((TensorSpec("x", "UINT8", (-1, 4)),), 4),
        Boundary((kept, TensorSpec("a", "FP32", (-1, 5))), 44),
        Boundary((kept, TensorSpec("b", "INT64", (-1,))), 32),
        Boundary((TensorSpec("y", "FP32", (-1, 10)),), 40),
    )
    made = ModelRepository(tmp_path)
    made.write_manifest(ModelManifest(KEY, "onnxruntime_onnx", "model.onnx", 10**9, 8, True))
    table = BlockTable("no file", True, boundaries, (MS, 2 * MS, 4 * MS))
    shapes = (((1, 4),), ((1, 2, 3), (1, 5)), ((1, 2, 3), (1,)), ((1, 10),))
    made.write_block_table(KEY, table, shapes)
    return made


def measure(executor: Executor, max_batch: int) -> tuple[int, ...]:
    assert isinstance(executor, EmulatedPart)
    return executor.times(max_batch)


def load(repository: ModelRepository, first: int, last: int, device: Device) -> Executor:
    return load_executor(
        repository, PartitionKey(KEY, first, last), device=device, float16_boundaries=True
    )


def test_zeros_of_the_right_shapes_after_the_right_time(repository: ModelRepository) -> None:
    executor = load(repository, 0, 1, Device.parse("emulated:p4", slowdown=10))
    started = time.perf_counter_ns()
    kept, a = executor.run([np.ones((3, 4), np.uint8)])
    assert time.perf_counter_ns() - started >= 30 * MS
    assert (kept.shape, kept.dtype) == ((3, 2, 3), np.float16)
    assert (a.shape, a.dtype) == ((3, 5), np.float16)
    assert not kept.any()


def test_tensors_passed_on_keep_their_content(repository: ModelRepository) -> None:
    executor = load(repository, 1, 2, Device.parse("emulated:p4", slowdown=0))
    kept = np.arange(14, dtype=np.float16).reshape(1, 2, 7)
    values = [kept, np.ones((1, 5), np.float16)]
    np.testing.assert_array_equal(executor.run(values)[0], kept)
    assert executor.output_shapes([v.shape for v in values]) == [(1, 2, 7), (1,)]
    buffers = [np.ones((1, 2, 7), np.float16), np.ones(1, np.int64)]
    executor.run(values, buffers)
    np.testing.assert_array_equal(buffers[0], kept)
    assert not buffers[1].any()


def test_a_slowdown_of_zero_does_not_sleep(
    repository: ModelRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept {seconds}"))
    executor = load(repository, 0, 3, Device.parse("emulated:p4", slowdown=0))
    assert executor.run([np.ones((8, 4), np.uint8)])[0].shape == (8, 10)
    assert measure(executor, 2) == (0, 0)


def test_without_a_profile_the_table_counts_per_row(repository: ModelRepository) -> None:
    executor = load(repository, 1, 3, Device.parse("emulated:p4", slowdown=0.5))
    assert measure(executor, 3) == (3 * MS, 6 * MS, 9 * MS)


def test_a_profile_names_partitions_or_blocks(repository: ModelRepository, tmp_path: Path) -> None:
    profile = tmp_path / "p4.json"
    times = {"0": [10, 15], "1": [20], "2": [5, 6], "0-2": [28, 30]}
    profile.write_text(json.dumps({"net": times}))
    device = Device.parse("emulated:p4", slowdown=2, profile=profile)
    assert measure(load(repository, 0, 2, device), 3) == (56, 60, 64)
    assert measure(load(repository, 1, 3, device), 3) == (50, 92, 134)
    profile.write_text(json.dumps({"other": times}))
    assert measure(load(repository, 0, 1, device), 1) == (2 * MS,)


@pytest.mark.parametrize(
    "text", ["no json", "[]", '{"net": 1}', '{"net": {"0": []}}', '{"net": {"0": [-1]}}']
)
def test_a_bad_profile_is_refused(repository: ModelRepository, tmp_path: Path, text: str) -> None:
    profile = tmp_path / "bad.json"
    profile.write_text(text)
    with pytest.raises(InvalidInput, match=r"bad\.json"):
        load(repository, 0, 1, Device.parse("emulated:p4", profile=profile))


def test_inputs_are_checked_like_anywhere_else(repository: ModelRepository) -> None:
    executor = load(repository, 1, 2, Device.parse("emulated:p4", slowdown=0))
    with pytest.raises(InvalidInput) as caught:
        executor.run([np.ones((2, 2, 3), np.float16), np.ones((1, 5), np.float16)])
    assert caught.value.field == "a"


def test_devices_are_parsed() -> None:
    assert Device.parse("cpu") == Device("cpu")
    assert Device.parse("cuda").index == 0
    assert (Device.parse("cuda:3").kind, Device.parse("cuda:3").index) == ("cuda", 3)
    assert Device.parse("emulated:p4").device_class == "p4"
    assert [str(Device.parse(t)) for t in ("cpu", "cuda:1", "emulated:v100")] == [
        "cpu",
        "cuda:1",
        "emulated:v100",
    ]


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:x", "emulated", "emulated:", "cpu:0"])
def test_unknown_devices_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="device"):
        Device.parse(text)


def test_a_negative_slowdown_is_refused() -> None:
    for slowdown in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="slowdown"):
            Device.parse("emulated:p4", slowdown=slowdown)


def device_profile(name: str, level: int, scale: int) -> DeviceProfile:
    times = tuple((scale * each, scale * each * 3 // 2) for each in (10, 20, 40))
    return DeviceProfile(name, level, True, "made up", (1, 3), times, times)


@pytest.fixture
def profiled(repository: ModelRepository) -> ModelRepository:
    """The same model with a profile: T4 whole and halved, L4 only halved."""
    devices = (device_profile("T4", 1, 1), device_profile("T4", 2, 3), device_profile("L4", 2, 5))
    repository.write_profile(
        KEY, ModelProfile(KEY, "no file", 3, (0, 26, 20, 0), (100, 200, 300), devices)
    )
    return repository


def test_the_models_profile_gives_the_times_of_class_and_level(profiled: ModelRepository) -> None:
    assert measure(load(profiled, 0, 2, Device.parse("emulated:T4")), 3) == (30, 38, 45)
    half = Device.parse("emulated:T4", virtual_level=2, slowdown=2)
    assert measure(load(profiled, 0, 2, half), 4) == (180, 226, 270, 314)


def test_an_emulated_part_is_as_heavy_as_the_profile_says(profiled: ModelRepository) -> None:
    assert load(profiled, 1, 3, Device.parse("emulated:T4")).memory_bytes == 500


def test_a_class_the_profile_does_not_have_takes_the_tables_times(
    profiled: ModelRepository,
) -> None:
    assert measure(load(profiled, 0, 1, Device.parse("emulated:P4")), 2) == (MS, 2 * MS)


def test_a_level_the_profile_does_not_have_is_refused(profiled: ModelRepository) -> None:
    for device in (Device.parse("emulated:L4"), Device.parse("emulated:T4", virtual_level=4)):
        with pytest.raises(NotSupported, match="virtual GPUs per device"):
            load(profiled, 0, 1, device)


def test_a_file_of_times_counts_before_the_profile(
    profiled: ModelRepository, tmp_path: Path
) -> None:
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"net": {"0": [7]}}))
    assert measure(load(profiled, 0, 1, Device.parse("emulated:L4", profile=file)), 1) == (7,)


@pytest.mark.parametrize("level", [0, 9])
def test_a_level_beyond_what_a_device_can_be_divided_into_is_refused(level: int) -> None:
    with pytest.raises(InvalidInput, match="virtual_level"):
        Device.parse("cpu", virtual_level=level)
