"""`catenaryd prepare` of an encoder that `catenaryd pull` brought."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from catenary_agent.encoders import importing
from catenary_agent.preparing import cutting, prepare
from small_models.jail_here import run_here
from small_models.text_models import write_encoder

for _module in ("torch", "transformers", "onnxscript"):
    pytest.importorskip(_module, reason="what encoders are imported with is not installed")

Run = Callable[..., int]


def test_it_says_of_inputs_what_is_free_and_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Run
) -> None:
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
    for module in (prepare, importing):
        monkeypatch.setattr(module, "run_jailed", run_here)
    folder, models = write_encoder(tmp_path / "source"), tmp_path / "models"
    capfd.readouterr()
    options = ("--name", "tiny", "--model-repository", models, "--json")
    assert run("pull", folder, *options) == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (facts["model"], facts["version"], facts["known"]) == ("tiny", "1", False)
    assert run("prepare", "tiny", "--model-repository", models) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "input input_ids: INT64 [-1, -1]; -1 is free, measured with [1, 24]"
    assert "batches are counted in units of 16 tokens" in said
