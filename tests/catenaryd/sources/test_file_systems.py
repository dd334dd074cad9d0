"""Files of web servers and buckets, by fsspec: real HTTP, and a bucket in memory."""

from __future__ import annotations

import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from catenary_services.errors import CatenaryError, InvalidInput, NotSupported, Unavailable
from catenaryd.sources import file_systems
from catenaryd.sources.choosing import choose
from catenaryd.sources.downloads import Download
from catenaryd.sources.file_systems import list_file_system
from catenaryd.sources.listing import revision_of
from catenaryd.sources.source_names import source_of
from shared_helpers.model_mirror import ModelMirror

CONTENT = bytes(range(256)) * 4096


class Bucket(MemoryFileSystem):
    """A bucket in memory, in place of one of S3."""

    protocol = ("s3",)
    store: ClassVar[dict[str, object]] = {}
    reads: ClassVar[list[tuple[int, int]]] = []
    fails_at: ClassVar[int | None] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("s3://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object):
        assert start is not None
        assert end is not None
        if self.fails_at is not None and start >= self.fails_at:
            raise ConnectionResetError("reset by peer")
        self.reads.append((start, end))
        return super().cat_file(path, start=start, end=end)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    fsspec.register_implementation("s3", Bucket, clobber=True)
    monkeypatch.setattr(Bucket, "store", {})
    monkeypatch.setattr(Bucket, "reads", [])
    monkeypatch.setattr(Bucket, "fails_at", None)
    made = fsspec.filesystem("s3", skip_instance_cache=True)
    yield made
    sys.modules["fsspec.registry"]._registry.pop("s3", None)  # fsspec.registry is what is in it


def test_a_bucket_is_listed_and_its_model_is_fetched(bucket: Bucket, tmp_path: Path) -> None:
    bucket.pipe({"/models/net/model.onnx": CONTENT, "/models/net/README.md": b"words"})
    found = list_file_system(source_of("s3://models/net"))
    chosen = choose(found.files, "", found.source.text)
    assert [(each.path, each.size) for each in chosen.files] == [("model.onnx", len(CONTENT))]
    with Download(tmp_path, found).held() as download:
        download.bring(chosen.files[0], lambda *_: None)
        assert (download.files / "model.onnx").read_bytes() == CONTENT


def test_a_bucket_that_breaks_off_is_taken_up_where_it_broke(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_systems, "_PIECE_BYTES", 1 << 18)
    monkeypatch.setattr(Bucket, "fails_at", 3 << 18)
    bucket.pipe({"/models/net/model.onnx": CONTENT})
    found = list_file_system(source_of("s3://models/net/model.onnx"))
    assert found.source.file == "model.onnx"
    (file,) = (each for each in found.files if each.path == "model.onnx")
    with (
        Download(tmp_path, found).held() as download,
        pytest.raises(Unavailable, match=r"model.onnx did not come: reset by peer"),
    ):
        download.bring(file, lambda *_: None)
    monkeypatch.setattr(Bucket, "fails_at", None)
    with Download(tmp_path, found).held() as download:
        download.bring(file, lambda *_: None)
        assert (download.files / "model.onnx").read_bytes() == CONTENT
    assert Bucket.reads == [(n << 18, n + 1 << 18) for n in range(4)]


def test_what_changed_in_a_bucket_is_another_revision(bucket: Bucket) -> None:
    bucket.pipe({"/models/net/model.onnx": CONTENT})
    before = revision_of(list_file_system(source_of("s3://models/net")).files)
    bucket.pipe({"/models/net/model.onnx": CONTENT[:-1]})
    assert revision_of(list_file_system(source_of("s3://models/net")).files) != before


def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for library in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(NotSupported, match=r"needs the library s3fs.*'catenary\[s3\]'"):
        list_file_system(source_of("s3://models/net"))
    with pytest.raises(NotSupported, match=r"needs the library gcsfs.*'catenary\[gcs\]'"):
        list_file_system(source_of("gs://models/net"))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A plain web server."""
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "tiny.onnx").write_bytes(CONTENT)
    handler = functools.partial(_Quiet, directory=str(tmp_path / "web"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_one_file_of_a_web_server_is_fetched_by_ranges(mirror: ModelMirror, tmp_path: Path) -> None:
    commit = mirror.add("org/net", {"tiny.onnx": CONTENT})
    found = list_file_system(source_of(f"{mirror.url}/org/net/resolve/{commit}/tiny.onnx"))
    assert [(each.path, each.size) for each in found.files] == [("tiny.onnx", len(CONTENT))]
    assert found.files[0].stamp  # its ETag
    with Download(tmp_path, found).held() as download:
        download.bring(found.files[0], lambda *_: None)
        assert (download.files / "tiny.onnx").read_bytes() == CONTENT
    assert mirror.of("tiny.onnx")[-1].range == f"bytes=0-{len(CONTENT) - 1}"


def test_what_a_web_server_does_not_have_is_one_sentence(web: str) -> None:
    with pytest.raises(InvalidInput, match=r"none.onnx does not exist"):
        list_file_system(source_of(f"{web}/none.onnx"))
    with pytest.raises(CatenaryError, match=r"did not come") as dead:
        list_file_system(source_of("http://127.0.0.1:9/net.onnx"))
    assert "\n" not in dead.value.message
