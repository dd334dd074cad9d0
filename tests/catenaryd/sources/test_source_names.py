from __future__ import annotations

from pathlib import Path

import pytest

from catenary.rpc.importing import is_source
from catenary_services.errors import InvalidInput
from catenaryd.sources.source_names import ModelSource, SourceKind, source_of


def test_a_repository_of_a_hub_with_file_and_revision() -> None:
    assert source_of("hf:org/name") == ModelSource(SourceKind.HUB, "org/name")
    assert source_of("hf://org/name@v1.0") == ModelSource(SourceKind.HUB, "org/name", "v1.0")
    found = source_of("hf:org/name/onnx/model.onnx@refs/pr/1")
    assert found == ModelSource(SourceKind.HUB, "org/name", "refs/pr/1", "onnx/model.onnx")
    assert (found.text, found.model_name) == ("hf:org/name", "name")


def test_urls_keep_what_is_secret_out_of_their_text() -> None:
    found = source_of("https://models.example/a/tiny.gguf?signature=secret")
    assert found.place.endswith("secret")
    assert (found.text, found.model_name) == ("https://models.example/a/tiny.gguf", "tiny")
    assert source_of("s3://bucket/models/llama").model_name == "llama"


def test_paths_are_absolute_and_name_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = source_of("./my model.onnx")
    assert (found.kind, found.place) == (SourceKind.FILE, str(tmp_path / "my model.onnx"))
    assert found.model_name == "my-model"
    assert source_of("file:///srv/llama").place == "/srv/llama"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "source: is empty"),
        ("hf:nobody", "is not hf:organisation/name"),
        ("hf:org/name@../x", "no branch, tag or commit"),
        ("s3://", "names no file or folder"),
        ("https://me:secret@host/x.onnx", "has a password"),
        ("ftp://host/x.onnx", "begins with none of hf, s3, gs, http, https, file"),
        ("file://elsewhere/x", "is not file:// and an absolute path"),
        ("hf:org/na\nme", "not printable"),
    ],
)
def test_what_names_no_source_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as refused:
        source_of(text)
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smollm2-135m", False),
        ("net:2", False),
        ("hf:org/name", True),
        ("./net", True),
        ("folder/net", True),
        ("net.onnx", True),
        ("s3://bucket/net", True),
    ],
)
def test_a_name_of_the_repository_is_no_source(text: str, expected: bool) -> None:
    assert is_source(text) is expected
