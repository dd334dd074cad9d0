"""`profile.json` beside the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.profile import DeviceProfile, ModelProfile, tensors_at_cuts
from catenary_services.domain.tensors import TensorSpec
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository

KEY = ModelKey("net", "1")


def table(*names: str) -> BlockTable:
    specs = [TensorSpec(name, "FP32", (-1, 4)) for name in names]
    return BlockTable(
        "abc", True, tuple(Boundary((s,), 16) for s in specs), (1,) * (len(names) - 1)
    )


def profile_of(cut: BlockTable) -> ModelProfile:
    times = ((5,),) * cut.blocks
    device = DeviceProfile("cpu", 1, False, "made up", (1,), times, times)
    inner = (8,) * (cut.blocks - 1)
    return ModelProfile(
        KEY,
        cut.model_hash,
        cut.blocks,
        (0, *inner, 0),
        (1,) * cut.blocks,
        (device,),
        tensors_at_cuts(cut),
    )


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    made = ModelRepository(tmp_path)
    made.write_manifest(ModelManifest(KEY, "onnxruntime_onnx", "model.onnx", 10**9, 8, True))
    made.write_block_table(KEY, table("x", "a", "y"))
    return made


def test_a_written_profile_is_read_back(repository: ModelRepository) -> None:
    assert repository.profile(KEY) is None
    repository.write_profile(KEY, profile_of(table("x", "a", "y")))
    assert repository.profile(KEY) == profile_of(table("x", "a", "y"))


def test_a_profile_of_another_model_file_is_refused(repository: ModelRepository) -> None:
    other = replace(profile_of(table("x", "a", "y")), model_hash="other")
    repository.write_profile(KEY, other)
    with pytest.raises(InvalidInput, match=r"net:1/profile\.json\.model_hash: .*profile the model"):
        repository.profile(KEY)


@pytest.mark.parametrize("names", [("x", "b", "y"), ("x", "a", "b", "y")])
def test_a_profile_of_other_cuts_is_refused(
    repository: ModelRepository, names: tuple[str, ...]
) -> None:
    repository.write_profile(KEY, profile_of(table(*names)))
    with pytest.raises(InvalidInput, match=r"net:1/profile\.json\.blocks"):
        repository.profile(KEY)


def test_a_profile_without_names_of_tensors_counts_by_its_number_of_blocks(
    repository: ModelRepository,
) -> None:
    plain = replace(profile_of(table("x", "b", "y")), cut_tensors=())
    repository.write_profile(KEY, plain)
    assert repository.profile(KEY) == plain


@pytest.mark.parametrize("text", ["no json", "[]", "{}"])
def test_what_is_no_profile_is_refused_by_file(repository: ModelRepository, text: str) -> None:
    (repository.folder(KEY) / "profile.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"net:1/profile\.json"):
        repository.profile(KEY)


def test_bytes_on_the_wire_halve_with_float16() -> None:
    boundary = Boundary(
        (TensorSpec("a", "FP32", (-1, 3, -1)), TensorSpec("b", "INT64", (-1, 3))), 36
    )
    assert boundary.wire_row_bytes(float16=False) == 36
    assert boundary.wire_row_bytes(float16=True) == 30
