"""Names of a vision model's classes: where they are read, and what becomes of bad files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from catenary_gateway.catalog import Catalog
from catenary_gateway.class_names import LONGEST_NAME, ClassNames
from catenary_gateway.generation.text.text_codec import TextCodecs
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import ModelNotFound, Unavailable
from gateway_harness import echo


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "toy" / "1"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def catalog() -> Catalog:
    made = Catalog()
    made.update(scheduler_pb2.ModelTable(models=[echo("toy", ("FP32", -1, 4))]))
    return made


@pytest.fixture
def names(tmp_path: Path, catalog: Catalog) -> ClassNames:
    return ClassNames(catalog, TextCodecs(tmp_path))


async def test_labels_are_one_a_line(folder: Path, names: ClassNames) -> None:
    long = "x" * 1000
    (folder / "labels.txt").write_text(f"tench\n goldfish \n{long}\n")
    assert await names.of("toy", "1") == ("tench", "goldfish", long[:LONGEST_NAME])


async def test_a_hugging_face_model_has_them_in_its_configuration(
    folder: Path, names: ClassNames
) -> None:
    labels = {"1": "goldfish", "0": "tench", "3": "nobody says what 2 is"}
    (folder / "config.json").write_text(json.dumps({"id2label": labels}))
    assert await names.of("toy", "") == ("tench", "goldfish")


@pytest.mark.parametrize("config", [None, "[]", "{}", '{"id2label": 3}'])
async def test_most_models_have_none(folder: Path, names: ClassNames, config: str | None) -> None:
    if config is not None:
        (folder / "config.json").write_text(config)
    assert await names.of("toy", "1") == ()


@pytest.mark.parametrize(
    "labels", [b"\xff\xfe\x00", b"a\n" * (1 << 20)], ids=["no text", "too large"]
)
async def test_a_bad_file_is_an_error_until_it_is_mended(
    folder: Path, names: ClassNames, labels: bytes
) -> None:
    (folder / "labels.txt").write_bytes(labels)
    with pytest.raises(Unavailable, match="cannot be read"):
        await names.of("toy", "1")
    (folder / "labels.txt").write_text("tench")
    assert await names.of("toy", "1") == ("tench",)


async def test_nesting_without_end_is_a_bad_file(folder: Path, names: ClassNames) -> None:
    (folder / "config.json").write_text("[" * 500_000)
    with pytest.raises(Unavailable, match="cannot be read"):
        await names.of("toy", "1")


async def test_files_are_read_once_while_the_model_is_served(
    folder: Path, names: ClassNames, catalog: Catalog
) -> None:
    (folder / "labels.txt").write_text("tench")
    assert await names.of("toy", "1") == ("tench",)
    (folder / "labels.txt").write_text("goldfish")
    assert await names.of("toy", "1") == ("tench",)
    replaced = echo("toy", ("FP32", -1, 4), content_digest="d")
    catalog.update(scheduler_pb2.ModelTable(models=[replaced]))
    assert await names.of("toy", "1") == ("goldfish",)


async def test_files_are_brought_in_before_they_are_read(tmp_path: Path, catalog: Catalog) -> None:
    codecs = TextCodecs(tmp_path)

    def prepare(key: ModelKey) -> None:
        folder = tmp_path / key.name / key.version
        folder.mkdir(parents=True)
        (folder / "labels.txt").write_text("tench")

    codecs.prepare = prepare
    assert await ClassNames(catalog, codecs).of("toy", "1") == ("tench",)


async def test_only_what_is_served_is_read(names: ClassNames) -> None:
    for name, version in (("nobody", ""), ("toy", "2"), ("../toy", "1")):
        with pytest.raises(ModelNotFound):
            await names.of(name, version)
