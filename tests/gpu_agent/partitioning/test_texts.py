"""ONNX models with texts: prepared, cut and run over arrays of `bytes`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_agent.hosting.canary import part_answer
from catenary_agent.partitioning import jailed
from catenary_agent.preparing import cutting, prepare
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from small_models.jail_here import run_here
from small_models.text_models import WORDS as KEY
from small_models.text_models import write_words

TEXTS = np.array([[b"Cat", b"dog"], ["Übung".encode(), b""], [b"dog", b"a\0b"]], np.object_)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRepository:
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
    for module in (jailed, prepare):
        monkeypatch.setattr(module, "run_jailed", run_here)
    repository = ModelRepository(tmp_path)
    write_words(repository)
    prepare_model(repository, KEY, blocks=4)
    return repository


def part(repository: ModelRepository, first: int, last: int):  # type: ignore[no-untyped-def]
    return load_executor(
        repository,
        PartitionKey(KEY, first, last),
        device=Device.parse("cpu"),
        float16_boundaries=False,
    )


def test_texts_cross_every_cut_as_they_are(repository: ModelRepository) -> None:
    table = repository.block_table(KEY)
    assert table.batched
    assert table.blocks > 1
    assert table.boundaries[0].tensors == (TensorSpec("words", "BYTES", (ANY, 2)),)
    file = repository.model_file(KEY)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    texts = np.array([[word.decode() for word in row] for row in TEXTS], np.object_)
    twice, numbers = session.run(None, {"words": texts})
    for cut in range(1, table.blocks):
        middle = part(repository, 0, cut).run([TEXTS])
        found = part(repository, cut, table.blocks).run(middle)
        assert [[each.decode() for each in row] for row in found[0]] == twice.tolist()
        np.testing.assert_array_equal(found[1], numbers)


def test_results_may_be_written_where_the_caller_wants(repository: ModelRepository) -> None:
    whole = part(repository, 0, repository.block_table(KEY).blocks)
    expected = whole.run([TEXTS])
    buffers = [np.empty_like(each) for each in expected]
    whole.run([TEXTS], buffers)
    for found, each in zip(buffers, expected, strict=True):
        np.testing.assert_array_equal(found, each)


def test_what_is_no_text_is_refused_by_its_place(repository: ModelRepository) -> None:
    words = TEXTS.copy()
    words[1, 0] = b"\xff\xfe"
    with pytest.raises(InvalidInput, match="words: element 2 is not UTF-8"):
        part(repository, 0, 1).run([words])


def test_a_canary_notices_another_text(repository: ModelRepository) -> None:
    whole = part(repository, 0, repository.block_table(KEY).blocks)
    first, again = part_answer(whole), part_answer(whole)
    np.testing.assert_array_equal(first[0], again[0])

    class Other:
        ends = whole.ends

        def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
            texts, numbers = whole.run(inputs)
            return [np.full_like(texts, b"another"), numbers]

    assert not np.allclose(part_answer(Other())[0], first[0], rtol=1e-3)  # type: ignore[arg-type]
