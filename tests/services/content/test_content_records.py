"""What the files of a version are: recorded once, the same everywhere, compared byte for byte."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catenary_services.content import hashing, keeping, reading, record
from catenary_services.content.hashing import digests
from catenary_services.content.record import RECORD_FILE, decode, encode
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import CatenaryError, ContentMismatch, ModelNotFound
from catenary_services.models.model_repository import ModelRepository

KEY = ModelKey("net", "1")
CHUNK = 1024
WEIGHTS = bytes(range(256)) * 17
OFTEN = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (record, hashing, reading):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


def version(root: Path, slo_ms: int = 200, compute_ns: int = 5, rows: int = 4) -> ModelRepository:
    """A version with weights of several chunks, and files beside them."""
    repository = ModelRepository(root)
    folder = repository.folder(KEY)
    repository.write_manifest(
        ModelManifest(KEY, "onnxruntime_onnx", "model.onnx", slo_ms * 1_000_000, 4, True)
    )
    (folder / "model.onnx").write_bytes(WEIGHTS)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "onnx-fp32").mkdir(exist_ok=True)
    (folder / "onnx-fp32" / "model.onnx.data").write_bytes(WEIGHTS[:CHUNK] * 3)
    boundary = Boundary((TensorSpec("x", "FP32", (ANY, rows)),), 4 * rows)
    table = BlockTable(repository.model_hash(KEY), True, (boundary, boundary), (compute_ns,))
    repository.write_block_table(KEY, table)
    return repository


def read_everything(repository: ModelRepository) -> None:
    """Reads a version as processes do: tables, then the rest as somebody loads it."""
    repository.manifest(KEY)
    repository.block_table(KEY)
    with repository.reading(KEY) as files:
        for name in files.names():
            files.begin(repository.folder(KEY) / name)


def test_the_first_look_records_every_file_that_is_loaded(tmp_path: Path) -> None:
    repository = version(tmp_path)
    (repository.folder(KEY) / "README.md").write_text("words")
    (repository.folder(KEY) / "profile.json.partial").write_text("measured later")
    (repository.folder(KEY) / ".parts").mkdir()
    (repository.folder(KEY) / ".parts" / "cached").write_text("derived")
    content = repository.content(KEY)
    assert content is not None
    assert sorted(content.files) == [
        "blocks.json",
        "model.onnx",
        "model.yaml",
        "onnx-fp32/model.onnx.data",
        "tokenizer.json",
    ]
    assert len(content.files["model.onnx"].chunks) == 5
    assert ModelRepository(tmp_path).content(KEY) == content
    said = json.loads((repository.folder(KEY) / RECORD_FILE).read_bytes())
    assert said["digest"] == content.digest == repository.content_digest(KEY)
    read_everything(repository)


def test_a_version_without_its_model_file_has_no_content(tmp_path: Path) -> None:
    repository = version(tmp_path)
    (repository.folder(KEY) / "model.onnx").unlink()
    assert repository.content_digest(KEY) == ""
    assert not (repository.folder(KEY) / RECORD_FILE).exists()


@OFTEN
@given(data=st.data())
def test_a_version_with_any_byte_altered_is_never_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("altered")
    repository = version(root)
    names = sorted(repository.record_content(KEY).files)
    name = data.draw(st.sampled_from([*names, RECORD_FILE]))
    path = repository.folder(KEY) / name
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    for reader in (repository, ModelRepository(root)):
        with pytest.raises(ContentMismatch, match=name.replace(".", "[.]")):
            read_everything(reader)


@OFTEN
@given(
    place=st.integers(0, len(WEIGHTS) - 1),
    ranges=st.lists(st.tuples(st.integers(0, len(WEIGHTS)), st.integers(0, 3000)), max_size=4),
)
def test_only_chunks_of_what_is_read_are_compared(
    tmp_path_factory: pytest.TempPathFactory, place: int, ranges: list[tuple[int, int]]
) -> None:
    repository = version(tmp_path_factory.mktemp("ranges"))
    repository.record_content(KEY)
    path = repository.folder(KEY) / "model.onnx"
    content = bytearray(WEIGHTS)
    content[place] ^= 1
    path.write_bytes(content)
    chunk = place // CHUNK
    touched = any(
        length and offset < (chunk + 1) * CHUNK and offset + length > chunk * CHUNK
        for offset, length in ranges
    )
    files = repository.reading(KEY)
    if not touched:
        files.begin(path, ranges)
        files.finish()
        return
    with pytest.raises(ContentMismatch, match=f"bytes from {chunk * CHUNK} on") as raised:
        files.begin(path, ranges)  # a small file is compared at once
    assert record.machine() in raised.value.message


@pytest.mark.parametrize("change", ["truncated", "longer", "missing", "a folder"])
def test_a_file_of_another_shape_is_refused(tmp_path: Path, change: str) -> None:
    repository = version(tmp_path)
    repository.record_content(KEY)
    path = repository.folder(KEY) / "model.onnx"
    if change == "truncated":
        path.write_bytes(WEIGHTS[:-1])
    elif change == "longer":
        path.write_bytes(WEIGHTS + b"x")
    else:
        path.unlink()
    if change == "a folder":
        path.mkdir()
    with pytest.raises(CatenaryError, match=r"net:1/model\.onnx"):
        read_everything(repository)


def test_a_file_that_was_added_later_is_refused(tmp_path: Path) -> None:
    repository = version(tmp_path)
    repository.record_content(KEY)
    (repository.folder(KEY) / "chat_template.jinja").write_text("{{ lies }}")
    files = repository.reading(KEY)
    with pytest.raises(ContentMismatch, match="added later"):
        files.content("chat_template.jinja", 100)
    with pytest.raises(FileNotFoundError):
        files.content("tokenizer_config.json", 100)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    repository = version(tmp_path)
    path = repository.folder(KEY) / "model.onnx"
    with (  # noqa: PT012
        pytest.raises(ContentMismatch, match="changed while"),
        repository.reading(KEY) as files,
    ):
        files.begin(path, first=True)
        path.write_bytes(WEIGHTS[::-1])


def test_the_cause_is_told_where_loading_fails_for_it(tmp_path: Path) -> None:
    repository = version(tmp_path)
    repository.record_content(KEY)
    path = repository.folder(KEY) / "onnx-fp32" / "model.onnx.data"
    path.write_bytes(bytes(3 * CHUNK))
    with pytest.raises(ContentMismatch), repository.reading(KEY) as files:  # noqa: PT012
        files.begin(path)
        raise ValueError("the library says something strange")


def test_the_digest_is_that_of_what_is_computed(tmp_path: Path) -> None:
    digest = version(tmp_path / "a").content_digest(KEY)
    assert version(tmp_path / "b", slo_ms=999, compute_ns=77).content_digest(KEY) == digest
    assert version(tmp_path / "c", rows=5).content_digest(KEY) != digest
    other = version(tmp_path / "d")
    (other.folder(KEY) / "tokenizer.json").write_text("[]")
    assert other.content_digest(KEY) != digest
    shutil.copytree(tmp_path / "a", tmp_path / "e", ignore=shutil.ignore_patterns(RECORD_FILE))
    assert ModelRepository(tmp_path / "e").content_digest(KEY) == digest


def test_what_the_repository_writes_it_records(tmp_path: Path) -> None:
    repository = version(tmp_path)
    before = repository.content_digest(KEY)
    version(tmp_path, slo_ms=300, compute_ns=9)
    assert repository.content_digest(KEY) == before
    read_everything(repository)


def test_graphs_made_here_are_compared_but_are_not_what_makes_versions_alike(
    tmp_path: Path,
) -> None:
    repository = version(tmp_path)
    before = repository.content_digest(KEY)
    made = repository.folder(KEY) / "onnx-int8"
    made.mkdir()
    (made / "model.onnx").write_text("graph")
    repository.enter_derived(KEY, "onnx-int8")
    assert repository.content_digest(KEY) == before
    assert repository.record_content(KEY).digest == before
    (made / "model.onnx").write_text("gra_h")
    with pytest.raises(ContentMismatch, match="onnx-int8"):
        read_everything(repository)


def test_all_who_record_at_once_agree(tmp_path: Path) -> None:
    version(tmp_path)
    together = threading.Barrier(6, timeout=20)
    found: list[str] = []

    def look() -> None:
        together.wait()
        found.append(ModelRepository(tmp_path).content_digest(KEY))

    threads = [threading.Thread(target=look) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 6
    assert len(set(found)) == 1
    assert [path.name for path in (tmp_path / "net" / "1").glob(".*")] == []


def test_a_repository_that_cannot_be_written_is_recorded_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = version(tmp_path)

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(keeping, "write_durably", refuse)
    digest = repository.content_digest(KEY)
    assert digest
    assert not (repository.folder(KEY) / RECORD_FILE).exists()
    (repository.folder(KEY) / "model.onnx").write_bytes(WEIGHTS[::-1])
    with pytest.raises(ContentMismatch, match=r"model\.onnx"):
        read_everything(repository)
    assert repository.content_digest(KEY) == digest


@pytest.fixture
def _times_count_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hashing, "_SETTLED_NS", -1)
    return None


@pytest.mark.usefixtures("_times_count_at_once")
def test_what_was_compared_is_not_read_again(tmp_path: Path) -> None:
    repository = version(tmp_path)
    repository.record_content(KEY)
    read_everything(repository)
    before = digests().hashed_bytes
    read_everything(repository)
    assert digests().hashed_bytes == before


def test_a_file_changed_a_moment_ago_is_read_again(tmp_path: Path) -> None:
    repository = version(tmp_path)
    repository.record_content(KEY)
    before = digests().hashed_bytes
    read_everything(repository)
    assert digests().hashed_bytes > before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "not json",
        '{"format": 1}',
        "[" * 5000,
        '{"format": 2, "digest": "' + "0" * 64 + '", "checksum": "' + "0" * 64 + '", "files": {}}',
    ],
)
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ContentMismatch, match=r"net:1/content\.json"):
        decode(text.encode(), "net:1/content.json")


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", "", "a//b", "."])
def test_a_record_names_files_of_its_folder_only(tmp_path: Path, path: str) -> None:
    content = version(tmp_path).record_content(KEY)
    moved = record.ContentRecord(1, {path: content.files["tokenizer.json"]})
    with pytest.raises(ContentMismatch, match="is not a path"):
        decode(encode(moved), "net:1/content.json")


def test_a_version_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        ModelRepository(tmp_path).record_content(KEY)
