"""Splitting a model changes nothing: every offered cut of real graphs against the whole model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_agent.executors.onnx_part import OnnxOptions, load_onnx_part
from catenary_agent.partitioning import jailed
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.models.model_repository import ModelRepository
from small_models.jail_here import run_here

CPU = Device.parse("cpu")
LIGHT = (
    "light_resnet50",
    "light_densenet121",
    "light_inception_v1",
    "light_inception_v2",
    "light_squeezenet",
    "light_shufflenet",
    "light_vgg19",
)
OCR = (
    "PP-OCRv6_det_small",
    "PP-OCRv6_rec_small",
    "ch_ppocr_mobile_v2.0_cls_mobile",
)
ALL = (*LIGHT, *OCR)
EVERY = {"light_vgg19": 8}
"""The default suite tries one cut in so many, of others one in five; a run of one takes seconds."""
SHAPES = {
    "PP-OCRv6_det_small": (1, 3, 160, 256),
    "PP-OCRv6_rec_small": (2, 3, 48, 160),
    "ch_ppocr_mobile_v2.0_cls_mobile": (2, 3, 48, 192),
}
"""Heights, widths and batches the models were not probed with: they must stay dynamic."""

RealModel = Callable[[str], tuple[ModelRepository, ModelKey]]


@pytest.fixture(autouse=True)
def _parts_are_written_in_this_process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spares the default suite a process of the jail for each of hundreds of parts."""
    if not {"nightly", "system"} & set(request.keywords):
        monkeypatch.setattr(jailed, "run_jailed", run_here)


def picture(name: str) -> np.ndarray:
    """A photograph or printed page in the model's shape, values in [-1, 1]."""
    skimage = pytest.importorskip("skimage", reason="the wheel holds the photographs")
    from PIL import Image

    rows, _, height, width = SHAPES.get(name, (1, 3, 224, 224))
    file = "chelsea.png" if name in LIGHT else "page.png"
    with Image.open(Path(skimage.__file__).parent / "data" / file) as image:
        pixels = image.convert("RGB").crop((0, 0, width, height * rows))
        stacked = np.asarray(pixels, np.float32).reshape(rows, height, width, 3)
    return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2) / 127.5 - 1)


def whole(path: Path, value: np.ndarray, optimise: bool = True) -> np.ndarray:
    """The unsplit model file as it is, run by ONNX Runtime itself."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: value})[0]


@functools.cache
def answer_of_whole(name: str, path: Path, optimise: bool = True) -> np.ndarray:
    """What the unsplit model makes of its picture, for all tests of it; none may write to it."""
    answer = whole(path, picture(name), optimise)
    answer.flags.writeable = False
    return answer


class Parts:
    """A model's parts between chosen cuts, run one after the other."""

    def __init__(
        self,
        repository: ModelRepository,
        key: ModelKey,
        cuts: Sequence[int],
        *,
        float16: bool = False,
        optimise: bool = True,
    ) -> None:
        edges = [0, *cuts, repository.block_table(key).blocks]
        self.executors = [
            load_onnx_part(
                repository, PartitionKey(key, first, last), float16, OnnxOptions(CPU, 1, optimise)
            )
            for first, last in itertools.pairwise(edges)
        ]

    def run(self, value: np.ndarray, rounded: bool = False) -> np.ndarray:
        values = [value]
        for index, executor in enumerate(self.executors):
            if rounded and index:
                values = [v.astype(np.float16).astype(v.dtype) for v in values]
            values = executor.run(values)
        return values[0]


def assert_same_decision(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    """Top-1 of each row or time step; for the text detector the mask of text."""
    assert got.dtype == expected.dtype
    assert np.isfinite(got).all()
    if "det" in name:
        assert 0.02 < (expected > 0.3).mean() < 0.98
        assert ((got > 0.3) == (expected > 0.3)).mean() > 0.998
        return
    classes = got.size // got.shape[0] if name in LIGHT else got.shape[-1]
    np.testing.assert_array_equal(
        got.reshape(-1, classes).argmax(1), expected.reshape(-1, classes).argmax(1)
    )


def triples(blocks: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(1, blocks), 2))


@pytest.mark.parametrize("name", ALL)
def test_two_parts_equal_the_whole_at_some_cuts(name: str, real_model: RealModel) -> None:
    check_cuts(name, real_model, every=EVERY.get(name, 5))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALL)
def test_two_parts_equal_the_whole_at_every_offered_cut(name: str, real_model: RealModel) -> None:
    check_cuts(name, real_model, every=1)


def check_cuts(name: str, real_model: RealModel, every: int) -> None:
    repository, key = real_model(name)
    value = picture(name)
    expected = answer_of_whole(name, repository.model_file(key))
    assert np.isfinite(expected).all()
    assert expected.std() > 0, "degenerate weights would make every comparison pass"
    blocks = repository.block_table(key).blocks
    assert blocks >= 5
    for cut in range(1, blocks, every):
        parts = Parts(repository, key, [cut])
        np.testing.assert_allclose(parts.run(value), expected, rtol=1e-4, atol=1e-5)
        assert_same_decision(name, parts.run(value, rounded=True), expected)


@pytest.mark.parametrize("every", [36, pytest.param(12, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ALL)
def test_three_parts_with_float16_boundaries_keep_the_decision(
    name: str, every: int, real_model: RealModel
) -> None:
    repository, key = real_model(name)
    value = picture(name)
    expected = answer_of_whole(name, repository.model_file(key))
    pairs = triples(repository.block_table(key).blocks)
    for cuts in (pairs[len(pairs) // 2],) if "vgg" in name else pairs[5::every]:
        np.testing.assert_allclose(
            Parts(repository, key, cuts).run(value), expected, rtol=1e-4, atol=1e-5
        )
        halved = Parts(repository, key, cuts, float16=True)
        assert any(spec.datatype == "FP16" for spec in halved.executors[1].inputs)
        assert_same_decision(name, halved.run(value), expected)


@pytest.mark.parametrize("name", ALL)
def test_parts_are_bitwise_equal_without_graph_optimisation(
    name: str, real_model: RealModel
) -> None:
    repository, key = real_model(name)
    value = picture(name)
    expected = answer_of_whole(name, repository.model_file(key), optimise=False)
    middle = repository.block_table(key).blocks // 2
    for cuts in ([middle], [middle - 2, middle + 1]):
        got = Parts(repository, key, cuts, optimise=False).run(value)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.system
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ALL)
def test_every_split_into_two_and_three_parts(name: str, real_model: RealModel) -> None:
    repository, key = real_model(name)
    value = picture(name)
    expected = answer_of_whole(name, repository.model_file(key))
    exact = answer_of_whole(name, repository.model_file(key), optimise=False)
    blocks = repository.block_table(key).blocks
    # VGG's 550 MB of weights take seconds to load each time: a sample of its triples.
    some = triples(blocks)[:: 6 if "vgg" in name else 1]
    for cuts in [*((cut,) for cut in range(1, blocks)), *some]:
        got = Parts(repository, key, cuts).run(value)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        assert_same_decision(name, Parts(repository, key, cuts, float16=True).run(value), expected)
        bitwise = Parts(repository, key, cuts, optimise=False).run(value)
        np.testing.assert_array_equal(bitwise, exact)


def test_tensors_needed_further_down_pass_through_a_part_that_ignores_them(
    real_model: RealModel,
) -> None:
    repository, key = real_model("PP-OCRv6_det_small")
    table = repository.block_table(key)
    carried = [
        (block, tensor.name)
        for block in range(1, table.blocks - 1)
        for tensor in table.boundaries[block].tensors
        if tensor in table.boundaries[block + 1].tensors
    ]
    assert carried, "the detector's skip connections must cross several cuts"
    block, name = carried[0]
    executor = load_executor(
        repository, PartitionKey(key, block, block + 1), device=CPU, float16_boundaries=True
    )
    inputs = executor.ends.example_arrays(1)
    entered = inputs[[spec.name for spec in executor.inputs].index(name)]
    position = [spec.name for spec in executor.outputs].index(name)
    np.testing.assert_array_equal(executor.run(inputs)[position], entered)
    shapes = executor.output_shapes([array.shape for array in inputs])
    assert shapes is not None
    buffers = [np.full(shape, 7, np.float16) for shape in shapes]
    executor.run(inputs, buffers)
    np.testing.assert_array_equal(buffers[position], entered)
