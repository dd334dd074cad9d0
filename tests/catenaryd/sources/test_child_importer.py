"""Imports for a scheduler: real child processes, against a mirror."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import psutil
import pytest

from catenary.rpc.importing import ImportOrder, import_request
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.errors import (
    InvalidInput,
    Overloaded,
    PermissionDenied,
)
from catenaryd.sources.child_importer import ChildImporter
from catenaryd.sources.downloads import DOWNLOADS_FOLDER
from shared_helpers.model_mirror import ModelMirror
from source_roots import IMPORT_PATH

KINDS = ("hf", "file")
FILES = {"a.gguf": bytes(3_000_000)}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def order(
    mirror: ModelMirror, source: str = "hf:org/tiny", **more: str
) -> admin_pb2.ImportModelRequest:
    return admin_pb2.ImportModelRequest(
        source=source, hub_endpoint=mirror.url, target="gpu", **more
    )


def children() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if each.is_running() and "pull" in each.cmdline()
    ]


async def test_an_import_whose_caller_goes_away_ends_and_keeps_what_came(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    mirror.add("org/tiny", FILES)
    mirror.breaks["a.gguf"] = [100_000, 1_000_000]  # the first bytes show how fast it is
    mirror.stalls.add("a.gguf")
    importer = ChildImporter(tmp_path / "models", KINDS)

    def partial() -> list[Path]:
        return list((tmp_path / "models" / DOWNLOADS_FOLDER).rglob("a.gguf"))

    async with contextlib.aclosing(importer.bring(order(mirror))) as steps:
        seen = asyncio.ensure_future(anext(steps))
        async with asyncio.timeout(120):
            while not any(path.stat().st_size for path in partial()):
                await asyncio.sleep(0.05)
        assert len(children()) == 1
        with pytest.raises(Overloaded, match=r"hf:org/tiny is being imported"):
            await anext(importer.bring(order(mirror)))
        seen.cancel()
        await asyncio.gather(seen, return_exceptions=True)
    assert children() == []
    (kept,) = partial()
    assert 0 < kept.stat().st_size <= 100_000
    assert kept.parent.name == "partial"


async def test_the_error_of_a_child_is_raised_as_what_it_is(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    mirror.add("org/tiny", {"README.md": b""})
    importer = ChildImporter(tmp_path / "models", KINDS)
    with pytest.raises(InvalidInput, match=r"source: hf:org/tiny has no config.json") as refused:
        [step async for step in importer.bring(order(mirror))]
    assert refused.value.details["field"] == "source"
    mirror.token = "hf_right"
    with pytest.raises(PermissionDenied, match=r"needs a token"):
        [step async for step in importer.bring(order(mirror))]
    with pytest.raises(InvalidInput, match=r"no config.json"):
        [step async for step in importer.bring(order(mirror, hub_token="hf_right"))]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", "fp64"),
        ("target", "tpu"),
        ("engine", "none"),
        ("session_tokens", 1),
        ("slo_ns", 1000),
    ],
)
async def test_an_option_that_is_none_is_refused_by_its_name(
    mirror: ModelMirror, tmp_path: Path, field: str, value: object
) -> None:
    request = order(mirror)
    setattr(request, field, value)
    with pytest.raises(InvalidInput, match=rf"^{field}: "):
        await anext(ChildImporter(tmp_path / "models", KINDS).bring(request))


async def test_what_an_engine_is_to_serve_is_said_to_the_child(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    mirror.add("org/tiny", FILES)
    importer = ChildImporter(tmp_path / "models", KINDS)
    with pytest.raises(InvalidInput, match=r"engine: vllm reads safetensors, and a.gguf is gguf"):
        [step async for step in importer.bring(order(mirror, engine="vllm"))]
    assert "--keep-gguf" in importer._arguments(
        admin_pb2.ImportModelRequest(source="a.gguf", keep_gguf=True)
    )


async def test_a_token_is_not_among_the_arguments(mirror: ModelMirror, tmp_path: Path) -> None:
    importer = ChildImporter(tmp_path, KINDS)
    arguments = importer._arguments(order(mirror, hub_token="hf_secret"))
    assert not any("hf_secret" in each for each in arguments)


async def test_kinds_of_sources_that_are_not_allowed_are_refused(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    importer = ChildImporter(tmp_path / "models", ("hf",))
    with pytest.raises(PermissionDenied, match=r"'file' are not imported here.* are hf"):
        await anext(importer.bring(order(mirror, source=str(tmp_path))))


async def test_a_path_of_another_machine_is_refused_before_anything_is_started(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    importer = ChildImporter(tmp_path / "models", KINDS)
    request = import_request(ImportOrder(str(tmp_path / "net.onnx")))
    assert request.source == str(tmp_path / "net.onnx")
    elsewhere = admin_pb2.ImportModelRequest()
    elsewhere.CopyFrom(request)
    elsewhere.path_identity.number += 1
    with pytest.raises(
        InvalidInput, match=r"net.onnx is of your machine, and the repository is on"
    ):
        await anext(importer.bring(elsewhere))
    os.unlink(tmp_path / "net.onnx")
    with pytest.raises(InvalidInput, match=r"is of your machine"):
        await anext(importer.bring(request))


async def test_a_child_that_says_nothing_sensible_is_an_error_of_one_line(
    mirror: ModelMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    importer = ChildImporter(tmp_path / "models", KINDS)
    with pytest.raises(
        Exception, match=r"the import of hf:org/tiny ended with exit code 1"
    ) as said:
        [step async for step in importer.bring(order(mirror))]
    assert "\n" not in str(said.value)
