"""ONNX Runtime on CUDA, as far as a CPU can tell: what is asked for, and device buffers on "cpu"."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from catenary_agent.executors import onnx_device
from catenary_agent.executors.device import Device
from catenary_agent.executors.onnx_device import (
    CPU,
    CUDA,
    TENSORRT,
    DeviceRuns,
    choose_providers,
    preload_libraries,
)
from catenary_services.errors import NotSupported

GPU = Device("cuda", 1)
EVERYTHING = [TENSORRT, CUDA, CPU]


def test_tensorrt_is_used_only_with_a_folder_for_its_engines(tmp_path: Path) -> None:
    without = choose_providers(GPU, 0, None, EVERYTHING)
    assert without == [(CUDA, {"device_id": "1", "cudnn_conv_algo_search": "HEURISTIC"}), CPU]
    trt, cuda, last = choose_providers(GPU, 0, tmp_path, EVERYTHING)
    assert trt[0] == TENSORRT
    assert trt[1] == {
        "device_id": "1",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(tmp_path),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(tmp_path),
    }
    assert (cuda, last) == (without[0], CPU)
    # A folder alone installs nothing.
    assert choose_providers(GPU, 0, tmp_path, [CUDA, CPU]) == without


def test_a_share_of_a_gpu_is_capped_beside_what_is_tuned() -> None:
    (_, options), _ = choose_providers(Device("cuda", 0, virtual_level=2), 100, None, [CUDA, CPU])
    assert options == {
        "device_id": "0",
        "gpu_mem_limit": "50",
        "cudnn_conv_algo_search": "HEURISTIC",
    }


def test_the_wheel_for_cpus_is_refused_on_a_gpu() -> None:
    with pytest.raises(NotSupported, match="onnxruntime-gpu"):
        choose_providers(GPU, 0, None, [CPU])
    assert choose_providers(Device("cpu"), 0, None, EVERYTHING) == [CPU]


def test_libraries_are_preloaded_once_where_there_is_a_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: calls.append(None), raising=False)
    preload_libraries.cache_clear()
    preload_libraries()
    preload_libraries()
    assert len(calls) == 1
    monkeypatch.delattr(onnxruntime, "preload_dlls")
    preload_libraries.cache_clear()
    preload_libraries()
    assert len(calls) == 1
    preload_libraries.cache_clear()


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    """y = x + x, and the places of x that are not zero, of which no shape can be told."""
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "x"], ["y"]),
            helper.make_node("NonZero", ["x"], ["places"]),
        ],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("places", TensorProto.INT64, [2, "m"]),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnxruntime.InferenceSession(
        onnx.ModelProto.SerializeToString(made), providers=["CPUExecutionProvider"]
    )


def read_only(rows: int, seed: int) -> np.ndarray:
    array = np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32)
    array[0, seed % 3] = 0
    array.setflags(write=False)  # as frames are
    return array


def test_runs_through_kept_buffers_give_what_each_call_was_given(
    session: onnxruntime.InferenceSession,
) -> None:
    runs = DeviceRuns(session, "cpu", 0, keep=True)
    results = []
    for seed, rows in enumerate([2, 4, 2, 4, 2]):
        array = read_only(rows, seed)
        (made,) = runs.run({"x": array}, ["y"])
        results.append((array, made))
    for array, made in results:  # results are the caller's: a later run changes none of them
        np.testing.assert_array_equal(made, 2 * array)


def test_outputs_whose_size_depends_on_the_data_are_not_kept(
    session: onnxruntime.InferenceSession,
) -> None:
    runs = DeviceRuns(session, "cpu", 0, keep=False)
    dense = np.ones((2, 3), np.float32)
    sparse = np.array([[0, 1, 0], [0, 0, 0]], np.float32)
    for array in (dense, sparse, dense):
        _, places = runs.run({"x": array}, ["y", "places"])
        np.testing.assert_array_equal(places, np.stack(np.nonzero(array)))


def test_only_so_many_sets_of_buffers_are_kept(
    session: onnxruntime.InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_device, "_SHAPES_KEPT", 3)
    runs = DeviceRuns(session, "cpu", 0, keep=True)
    for rows in (1, 2, 3, 4, 1, 5):
        array = read_only(rows, rows)
        np.testing.assert_array_equal(runs.run({"x": array}, ["y"])[0], 2 * array)
    assert len(runs._bindings) == 3
