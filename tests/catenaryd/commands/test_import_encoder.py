"""`catenaryd import-encoder`, and what `catenaryd prepare` says of inputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from catenary_agent.encoders import importing
from catenary_agent.preparing import cutting, prepare
from catenaryd.command_line import main
from small_models.jail_here import run_here
from small_models.text_models import write_encoder

for _module in ("torch", "transformers", "onnxscript"):
    pytest.importorskip(_module, reason="what encoders are imported with is not installed")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["catenaryd", *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_folder_becomes_a_model_that_is_given_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
    for module in (prepare, importing):
        monkeypatch.setattr(module, "run_jailed", run_here)
    folder, models = write_encoder(tmp_path / "source"), tmp_path / "models"
    capfd.readouterr()
    options = ("--name", "tiny", "--blocks", 3, "--model-repository", models, "--json")
    assert run(monkeypatch, "import-encoder", folder, *options) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == {
        "model": "tiny:1",
        "blocks": 3,
        "text_tokens": 24,
        "output": "sentence_embedding",
        "shape": [-1, 32],
    }
    assert run(monkeypatch, "prepare", "tiny", "--model-repository", models) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "input input_ids: INT64 [-1, -1]; -1 is free, measured with [1, 24]"


def test_a_source_that_is_none_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "nowhere"
    options = ("--name", "x", "--model-repository", tmp_path / "m")
    assert run(monkeypatch, "import-encoder", nowhere, *options) == 1
    assert capfd.readouterr().err.strip() == f"source: {nowhere} is no folder with a config.json"
