"""Files of a hub, fetched from a mirror with its layout by the hub's own library."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from catenary_services.errors import (
    CatenaryError,
    ContentMismatch,
    InvalidInput,
    PermissionDenied,
    Unavailable,
)
from catenaryd.sources.downloads import DOWNLOADS_FOLDER, Download
from catenaryd.sources.hub import HubAccess, list_hub
from catenaryd.sources.listing import ListedFile, SourceListing
from catenaryd.sources.source_names import source_of
from shared_helpers.model_mirror import ModelMirror

WEIGHTS = random.Random(1).randbytes(3_000_000)
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS}


def listing(mirror: ModelMirror, revision: str = "", token: str = "") -> SourceListing:
    text = f"hf:org/tiny@{revision}" if revision else "hf:org/tiny"
    return list_hub(source_of(text), HubAccess(mirror.url, token))


def fetched(root: Path, found: SourceListing) -> dict[str, bytes]:
    """Fetches all files, and returns what is in the download afterwards."""
    with Download(root, found).held() as download:
        for file in found.files:
            download.bring(file, lambda *_: None)
        return {each.path: (download.files / each.path).read_bytes() for each in found.files}


def test_files_come_with_the_digests_they_were_listed_with(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    commit = mirror.add("org/tiny", FILES)
    found = listing(mirror)
    assert found.revision == commit
    by_path = {each.path: each for each in found.files}
    assert by_path["model.safetensors"].sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert by_path["config.json"].git_sha1
    assert fetched(tmp_path, found) == FILES


def test_a_token_is_sent_where_it_is_needed_and_a_wrong_one_is_one_sentence(
    mirror: ModelMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.add("org/tiny", FILES)
    mirror.token = "hf_right"
    for wrong in ("", "hf_wrong"):
        with pytest.raises(PermissionDenied, match=r"hf:org/tiny .*HF_TOKEN") as refused:
            listing(mirror, token=wrong)
        assert "\n" not in refused.value.message
        assert "hf_wrong" not in refused.value.message
    assert fetched(tmp_path, listing(mirror, token="hf_right")) == FILES
    assert {each.authorization for each in mirror.of("model.safetensors")} == {"Bearer hf_right"}


def test_a_token_of_this_machine_goes_to_its_own_endpoint_only(
    mirror: ModelMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.add("org/tiny", FILES)
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_machine")
    listing(mirror)  # an endpoint that somebody named
    assert mirror.requests[-1].authorization == ""
    monkeypatch.setenv("HF_ENDPOINT", mirror.url)
    listing(mirror)
    assert mirror.requests[-1].authorization == "Bearer hf_of_this_machine"


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    mirror.add("org/tiny", FILES)
    mirror.breaks["model.safetensors"] = [1_000_000, 700_000]
    assert fetched(tmp_path, listing(mirror)) == FILES
    ranges = [each.range for each in mirror.of("model.safetensors")]
    assert ranges == ["", "bytes=1000000-", "bytes=1700000-"]
    assert mirror.sent["model.safetensors"] == len(WEIGHTS)  # nothing was sent twice


def test_a_second_run_goes_on_where_the_first_was_given_up(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    mirror.add("org/tiny", FILES)
    found = listing(mirror)
    large = next(each for each in found.files if each.path == "model.safetensors")
    mirror.breaks["model.safetensors"] = [1_200_000]

    def down(_: ListedFile, count: int) -> None:
        mirror.down.add("model.safetensors")

    with Download(tmp_path, found).held() as download, pytest.raises(Unavailable, match=r"503"):
        download.bring(large, down)
    assert not list(download.files.rglob("*.safetensors"))  # no half is shown as a file
    assert download.missing_bytes((large,)) == len(WEIGHTS) - 1_200_000
    mirror.down.clear()
    assert fetched(tmp_path, listing(mirror)) == FILES
    assert mirror.of("model.safetensors")[-1].range == "bytes=1200000-"
    assert mirror.sent["model.safetensors"] == len(WEIGHTS)


def test_half_a_file_that_is_of_something_else_is_found_out(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    mirror.add("org/tiny", FILES)
    found = listing(mirror)
    large = next(each for each in found.files if each.path == "model.safetensors")
    with Download(tmp_path, found).held() as download:
        (download.folder / "partial").mkdir()
        (download.folder / "partial" / large.path).write_bytes(b"x" * 500)
        with pytest.raises(ContentMismatch):  # what was there is not the beginning of the file
            download.bring(large, lambda *_: None)
        assert download.bring(large, lambda *_: None).size == large.size


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_with_a_wrong_digest_is_refused_by_its_name_and_thrown_away(
    mirror: ModelMirror, tmp_path: Path, name: str
) -> None:
    mirror.add("org/tiny", FILES)
    mirror.altered[name] = bytes(len(FILES[name]))
    with pytest.raises(ContentMismatch) as refused:
        fetched(tmp_path, listing(mirror))
    message = refused.value.message
    assert message.startswith(f"hf:org/tiny: {name} is not what its source says: ")
    assert "\n" not in message
    kept = [path.name for path in (tmp_path / DOWNLOADS_FOLDER).rglob("*") if path.name == name]
    assert kept == []
    mirror.altered.clear()
    assert fetched(tmp_path, listing(mirror)) == FILES


def test_more_bytes_than_listed_are_not_taken(mirror: ModelMirror, tmp_path: Path) -> None:
    mirror.add("org/tiny", FILES)
    mirror.altered["model.safetensors"] = WEIGHTS + b"more"
    with pytest.raises(ContentMismatch, match=r"model.safetensors has more bytes"):
        fetched(tmp_path, listing(mirror))


def test_revisions_are_branches_tags_and_commits(mirror: ModelMirror, tmp_path: Path) -> None:
    old = mirror.add("org/tiny", {**FILES, "config.json": b"{}"}, "v1")
    new = mirror.add("org/tiny", FILES)
    assert [listing(mirror, each).revision for each in ("v1", "main", old, "")] == [
        old,
        new,
        old,
        new,
    ]
    assert fetched(tmp_path, listing(mirror, "v1"))["config.json"] == b"{}"
    with pytest.raises(InvalidInput, match=r"hf:org/tiny has no revision 'v9'"):
        listing(mirror, "v9")


def test_offline_a_repository_comes_from_the_cache_of_the_library_or_not_at_all(
    mirror: ModelMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, snapshot_download

    commit = mirror.add("org/tiny", FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(mirror.requests)
    with pytest.raises(Unavailable, match=r"hf:org/tiny is neither .* HF_HUB_OFFLINE"):
        listing(mirror)
    assert len(mirror.requests) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot = Path(constants.HF_HUB_CACHE) / "models--org--tiny"
    _fill_cache(snapshot, commit, FILES)
    assert snapshot_download("org/tiny", local_files_only=True).endswith(commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = listing(mirror)
    assert found.revision == commit
    assert fetched(tmp_path, found) == FILES
    assert len(mirror.requests) == asked


def test_what_the_library_has_in_its_cache_is_not_fetched_again(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    commit = mirror.add("org/tiny", FILES)
    _fill_cache(Path(constants.HF_HUB_CACHE) / "models--org--tiny", commit, FILES)
    assert fetched(tmp_path, listing(mirror)) == FILES
    assert not mirror.sent


def _fill_cache(folder: Path, commit: str, files: dict[str, bytes]) -> None:
    """Lays files out as the library keeps what it has downloaded."""
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (folder / "snapshots" / commit / name).symlink_to(f"../../blobs/{blob.name}")


def test_an_unknown_repository_and_a_dead_mirror_are_one_sentence_each(
    mirror: ModelMirror,
) -> None:
    with pytest.raises(PermissionDenied, match=r"hf:org/tiny does not exist, or needs a token"):
        listing(mirror)
    with pytest.raises(Unavailable, match=r"the hub does not answer") as dead:
        list_hub(source_of("hf:org/tiny"), HubAccess("http://127.0.0.1:9"))
    assert "\n" not in dead.value.message


@pytest.mark.parametrize("endpoint", ["ftp://host", "host", "http://me:secret@host"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(CatenaryError, match=r"hub_endpoint: is no http:// or https:// address"):
        list_hub(source_of("hf:org/tiny"), HubAccess(endpoint))


def test_another_process_that_fetches_the_same_is_told_of(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    mirror.add("org/tiny", FILES)
    found = listing(mirror)
    with (
        Download(tmp_path, found).held(),
        pytest.raises(Unavailable, match=r"hf:org/tiny is being fetched by another process"),
        Download(tmp_path, found).held(),
    ):
        pass
