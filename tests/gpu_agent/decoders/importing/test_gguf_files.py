"""GGUF files are imported as llama.cpp reads them, or refused by what is special of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf", reason="the extra [generation] is not installed")

import torch

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import CatenaryError, InvalidInput
from catenary_services.models.model_repository import ModelRepository
from compared_models.decoders import compared_logits
from compared_models.gguf_files import CASES, GRAPHS, KEPT, REFUSED, random_model, write_gguf
from compared_models.page import Row, check_refused, check_written
from small_models.tiny_decoders import LAYERS
from tiny_language_models import worker_in_this_process

KEY = ModelKey("model", "1")


@pytest.fixture(autouse=True)
def worker() -> Iterator[None]:
    with worker_in_this_process():
        yield


def as_converted(model: Any, precision: str) -> None:
    """Rounds what is no code of four bits to float16, as the import for PyTorch agents does."""
    with torch.no_grad():
        for name, numbers in model.named_parameters():
            if numbers.ndim == 2 and (precision == "fp32" or ".layers." not in name):
                numbers.copy_(numbers.half().float())


def compare(
    folder: Path, case: tuple[str, str], library: str, options: ImportOptions
) -> tuple[float, ModelRepository]:
    """Imports a file, and returns how far two agents are from its numbers, as converted."""
    file, repository = folder / "model.gguf", ModelRepository(folder / "models")
    model = random_model(CASES[case].family, CASES[case].values)
    write_gguf(file, model, CASES[case].kind)
    import_decoder(repository, file, KEY, options)
    if options.target == "gpu":
        as_converted(model, CASES[case].precision)
    ends = [
        load_decoder(
            repository,
            PartitionKey(KEY, first, last),
            Device("cpu"),
            CacheLayout(2 * LAYERS, 64, (first,)),
            library=library,
        )
        for first, last in pairwise((0, 1, LAYERS))
    ]
    for end in ends:
        for session in (0, 1):
            end.open_session(session, end.key.first_block)
    found = compared_logits(ends, model)
    assert found.tokens == found.expected_tokens
    return found.difference, repository


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_pytorch_agents_compute_with_the_numbers_of_the_file(
    case: tuple[str, str], tmp_path: Path
) -> None:
    options = ImportOptions(precision=CASES[case].precision, target="gpu")
    difference, repository = compare(tmp_path, case, "torch", options)
    against = "`transformers`" + (", in float16" if CASES[case].kind not in KEPT else "")
    check_written(Row(*case, "PyTorch"), against, difference)
    said = json.loads((repository.folder(KEY) / "config.json").read_text())
    assert ("quantization_config" in said) is (CASES[case].kind in KEPT)


@pytest.mark.parametrize(
    "case",
    [GRAPHS[0], *(pytest.param(case, marks=pytest.mark.nightly) for case in GRAPHS[1:])],
    ids=" ".join,
)
def test_graphs_compute_with_the_numbers_of_the_file(case: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    difference, _ = compare(tmp_path, case, "onnx", ImportOptions(target="cpu"))
    check_written(Row(*case, "ONNX Runtime"), "`transformers`", difference)


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_wrong_is_refused_with_a_sentence(what: str, tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path / "models")
    write_gguf(tmp_path / "model.gguf", random_model("llama", {}), "F32", REFUSED[what])
    with pytest.raises(CatenaryError) as refused:
        import_decoder(repository, tmp_path / "model.gguf", KEY, ImportOptions(target="gpu"))
    check_refused("GGUF", what, refused.value.message)
    assert list(repository.root.iterdir()) == []


def test_a_file_without_codes_to_keep_is_not_imported_as_int4(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_model("llama", {}), "Q8_0")
    options = ImportOptions(precision="int4", target="gpu")
    with pytest.raises(InvalidInput, match="has no matrix of Q4_0, Q4_1, Q4_K"):
        import_decoder(ModelRepository(tmp_path / "models"), tmp_path / "model.gguf", KEY, options)


def test_texts_end_at_every_token_at_which_llama_cpp_ends_them(tmp_path: Path) -> None:
    def turn(writer: Any) -> None:
        writer.add_eot_token_id(5)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 6)

    write_gguf(tmp_path / "model.gguf", random_model("llama", {}), "F32", turn)
    repository = ModelRepository(tmp_path / "models")
    options = ImportOptions(target="gpu")
    table = import_decoder(repository, tmp_path / "model.gguf", KEY, options)
    assert table.end_token_ids == (2, 5, 6)
