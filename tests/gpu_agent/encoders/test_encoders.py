"""Imported encoders compute what their own library does, in parts as well."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from catenary_agent.encoders import importing
from catenary_agent.encoders.export_worker import EncoderAnswer, head_of
from catenary_agent.encoders.importing import EncoderOptions, import_encoder
from catenary_agent.partitioning import jailed
from catenary_agent.preparing import cutting, prepare
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import TokenUnits
from catenary_services.domain.tensors import ANY
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from compared_models.encoders import CASES, REFUSED, expected, tokens_of
from compared_models.graphs import parts
from compared_models.page import Row, check_refused, check_written, largest_difference
from small_models.jail_here import run_here
from small_models.text_models import minilm_folder, write_encoder

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX with it")

KEY = ModelKey("sentences", "1")
TEXTS = ["the cat sat on a mat.", "a dog", "the the the unknown cat . . on"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (jailed, prepare, importing):
        monkeypatch.setattr(module, "run_jailed", run_here)


def in_parts(repository: ModelRepository, tokens: dict[str, Any], cuts: Sequence[int]) -> Any:
    arrays = {name: np.asarray(values) for name, values in tokens.items()}
    return parts(repository, cuts, arrays, KEY)[0]


def inputs_of(repository: ModelRepository) -> list[str]:
    return [spec.name for spec in repository.block_table(KEY).boundaries[0].tensors]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if case.is_slow else [])
        for name, case in CASES.items()
    ],
)
def test_every_family_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    folder = write_encoder(tmp_path / "source", case.family, **case.options)
    repository = ModelRepository(tmp_path / "models")
    table = import_encoder(repository, folder, KEY, EncoderOptions(blocks=4))
    assert table.batched
    assert table.blocks == 4
    assert {spec.datatype for end in table.boundaries[1:-1] for spec in end.tensors} <= {
        "FP32",
        "INT64",  # the mask, which the last block needs
        "BOOL",
    }
    answer = ("sentence_embedding", (ANY, 32)) if case.pooling else ("logits", (ANY, 3))
    assert [(spec.name, spec.shape) for spec in table.boundaries[-1].tensors] == [answer]
    tokens = tokens_of(folder, TEXTS, inputs_of(repository))
    said = expected(folder, tokens, case)
    found = [
        largest_difference(in_parts(repository, tokens, cuts), said)
        for cuts in ((), (1,), tuple(range(1, table.blocks)))
    ]
    check_written(Row("encoder", name, "ONNX Runtime"), "`transformers`", max(found))
    manifest = repository.manifest(KEY)
    assert manifest.text_tokens == 24
    assert not manifest.float16_boundaries
    assert table.units == repository.block_table(KEY).units == TokenUnits(16, 24)


@pytest.mark.usefixtures("in_this_process")
def test_zeros_behind_a_text_change_nothing(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "source", **CASES["bert, mean"].options)
    repository = ModelRepository(tmp_path / "models")
    import_encoder(repository, folder, KEY, EncoderOptions(blocks=2))
    alone = tokens_of(folder, TEXTS[1:2], inputs_of(repository))
    longer = {name: torch.nn.functional.pad(each, (0, 9)) for name, each in alone.items()}
    np.testing.assert_allclose(
        in_parts(repository, longer, ()), in_parts(repository, alone, ()), atol=1e-6
    )


def test_the_jail_makes_the_graph(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "source", **CASES["bert, mean"].options)
    repository = ModelRepository(tmp_path / "models")
    import_encoder(repository, folder, KEY, EncoderOptions(blocks=3))
    record = repository.content(KEY)
    assert record is not None
    assert {"model.onnx", "model.onnx.data", "tokenizer.json", "model.yaml"} < record.files.keys()
    tokens = tokens_of(folder, TEXTS, inputs_of(repository))
    np.testing.assert_allclose(
        in_parts(repository, tokens, (1,)),
        expected(folder, tokens, CASES["bert, mean"]),
        atol=1e-5,
    )


def pooling(**modes: object) -> dict[str, object]:
    return {"1_Pooling/config.json": modes}


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling"} for kind in kinds]


USUAL = modules("Transformer", "Pooling")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, EncoderAnswer()),
        (
            {"modules.json": USUAL, **pooling(pooling_mode_cls_token=True)},
            EncoderAnswer(pooling="cls"),
        ),
        (
            {
                "modules.json": modules("Transformer", "Pooling", "Normalize"),
                **pooling(pooling_mode_max_tokens=True, include_prompt=True),
            },
            EncoderAnswer(pooling="max", normalises=True),
        ),
        (
            {"modules.json": USUAL, **pooling(pooling_mode="mean")},
            EncoderAnswer(pooling="mean"),
        ),
        ({"modules.json": {"a": 1}}, "modules.json"),
        ({"modules.json": "[[[["}, "modules.json"),
    ],
)
def test_what_the_files_say_is_done_or_refused_by_name(
    tmp_path: Path, files: dict[str, object], said: EncoderAnswer | str
) -> None:
    for name, document in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = document if isinstance(document, str) else json.dumps(document)
        (tmp_path / name).write_text(text)
    if isinstance(said, EncoderAnswer):
        assert head_of(tmp_path, {}) == said
    else:
        with pytest.raises(InvalidInput, match=said):
            head_of(tmp_path, {})


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_wrong_is_refused_with_a_sentence(tmp_path: Path, what: str) -> None:
    folder = write_encoder(tmp_path / "source")
    REFUSED[what](folder)
    with pytest.raises(InvalidInput) as refused:
        import_encoder(ModelRepository(tmp_path / "models"), folder, KEY)
    check_refused("encoder", what, refused.value.message)
    assert not (tmp_path / "models" / KEY.name).exists()


@pytest.mark.usefixtures("in_this_process")
def test_minilm_computes_the_embeddings_of_its_own_library(tmp_path: Path) -> None:
    folder = minilm_folder()
    repository = ModelRepository(tmp_path / "models")
    table = import_encoder(repository, folder, KEY, EncoderOptions(blocks=6))
    assert repository.manifest(KEY).text_tokens == 256
    assert table.blocks == 6
    texts = ["A cat sits on the mat.", "Feline, resting.", "GPU prices rose " * 30]
    tokens = tokens_of(folder, texts, inputs_of(repository))
    want = expected(folder, tokens, CASES["bert, mean"])
    for cuts in ((), tuple(range(1, table.blocks))):
        np.testing.assert_allclose(in_parts(repository, tokens, cuts), want, atol=1e-5)
    assert want[0] @ want[1] > want[0] @ want[2]
