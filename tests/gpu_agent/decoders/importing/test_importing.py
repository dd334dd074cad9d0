"""Language models of every family come into the repository and answer as `transformers` does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.importing import importing
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.decoders.onnx import building
from catenary_agent.decoders.onnx.building import ensure_graph
from catenary_agent.decoders.onnx.onnx_executor import OnnxDecoder
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import InvalidInput
from catenary_services.jail.run import JailedWork, run_jailed
from catenary_services.models.model_repository import ModelRepository
from small_models.decoder_ring import DecoderRing
from small_models.jail_here import run_here
from tiny_language_models import (
    FAMILIES,
    LAYERS,
    VOCABULARY,
    greedy,
    worker_in_this_process,
    write_folder,
)

for _module in ("torch", "transformers", "onnxruntime_genai"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

REAL_JAIL = run_jailed
PROMPTS = {1: [5, 9, 77, 30, 4, 151, 8], 2: [90, 3], 3: [*range(20, 45)]}


@pytest.fixture(autouse=True)
def worker() -> Iterator[None]:
    with worker_in_this_process():
        yield


def ring(repository: ModelRepository, key: ModelKey, *cuts: int) -> DecoderRing:
    edges = [0, *cuts, LAYERS]
    return DecoderRing(
        [
            OnnxDecoder(repository, PartitionKey(key, a, b), CacheLayout((b - a) * 3, 64, (a,)))
            for a, b in pairwise(edges)
        ]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_what_transformers_does(family: str, tmp_path: Path) -> None:
    model = write_folder(tmp_path / "source", family)
    repository, key = ModelRepository(tmp_path / "models"), ModelKey(family, "1")
    table = import_decoder(repository, tmp_path / "source", key)
    assert (table.blocks, table.vocabulary_size, table.end_token_ids) == (LAYERS, VOCABULARY, (2,))
    expected = {session: greedy(model, prompt, 12) for session, prompt in PROMPTS.items()}
    assert ring(repository, key, 1, 4).generate(PROMPTS, 12, chunk=6) == expected


def test_shards_in_bfloat16_are_joined_and_kept_as_they_are(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "source", "llama3", dtype="bfloat16", shards=True)
    assert not (tmp_path / "source" / "model.safetensors").exists()
    repository, key = ModelRepository(tmp_path / "models"), ModelKey("sharded", "1")
    table = import_decoder(repository, tmp_path / "source", key)
    assert table.embedding_bytes == VOCABULARY * 64 * 2
    expected = {session: greedy(model, prompt, 8) for session, prompt in PROMPTS.items()}
    assert ring(repository, key).generate(PROMPTS, 8) == expected


def test_tables_describe_one_block_per_layer(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "qwen2")
    repository, key = ModelRepository(tmp_path / "models"), ModelKey("tables", "1")
    made = import_decoder(repository, tmp_path / "source", key, ImportOptions(session_tokens=4096))
    manifest, blocks = repository.manifest(key), repository.block_table(key)
    assert manifest.platform == "decoder"
    assert manifest.session_tokens == 128  # the model's context
    assert blocks.blocks == LAYERS
    assert blocks.model_hash == made.model_hash == repository.model_hash(key)
    assert [b.tensors[0].datatype for b in blocks.boundaries] == ["INT64", *["FP32"] * LAYERS]
    assert blocks.boundaries[1].row_bytes == 4 * 64
    assert all(ns > 0 for ns in blocks.compute_ns)
    # q and k biases and two norms beside the matrices of a layer
    assert made.block_bytes >= 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)


def test_another_family_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    repository = ModelRepository(tmp_path / "models")
    with pytest.raises(InvalidInput, match="'gpt2' is none of"):
        import_decoder(repository, source, ModelKey("other", "1"))
    assert list(repository.root.iterdir()) == []


def test_damaged_weights_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_folder(source, "llama2")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    repository = ModelRepository(tmp_path / "models")
    with pytest.raises(InvalidInput, match="ends within"):
        import_decoder(repository, source, ModelKey("damaged", "1"))
    assert list(repository.root.iterdir()) == []


def test_what_is_there_is_not_imported_again(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", "llama2")
    repository, key = ModelRepository(tmp_path / "models"), ModelKey("twice", "1")
    first = import_decoder(repository, tmp_path / "source", key)
    assert import_decoder(repository, tmp_path / "nowhere", key) == first


def test_agents_that_ask_at_once_build_a_graph_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "source", "llama2")
    repository, key = ModelRepository(tmp_path / "models"), ModelKey("shared", "1")
    import_decoder(repository, tmp_path / "source", key)
    build, builds = run_here, list[bytes]()

    def counted(work: JailedWork, into: Path | None = None) -> bytes:
        builds.append(work.job)
        return build(work, into)

    monkeypatch.setattr(building, "run_jailed", counted)
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: ensure_graph(repository, key, "int4"), range(3)))
    assert builds == [b"int4"]
    assert {folder.name for folder in folders} == {"onnx-int4"}
    # Sizes are those of the precision the manifest names, which is still fp32.
    assert repository.decoder_table(key).head_bytes >= 4 * VOCABULARY * 64


def test_a_reader_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "run_jailed", REAL_JAIL)
    (tmp_path / "empty.gguf").touch()
    repository = ModelRepository(tmp_path / "models")
    with pytest.raises(InvalidInput, match=r"empty\.gguf: is not a GGUF file"):
        import_decoder(repository, tmp_path / "empty.gguf", ModelKey("empty", "1"))
    assert list(repository.root.iterdir()) == []


def test_the_jail_makes_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "source", "llama2")
    repository, told = ModelRepository(tmp_path / "models"), list[str]()
    here = import_decoder(repository, tmp_path / "source", ModelKey("here", "1"))
    monkeypatch.setattr(importing, "run_jailed", REAL_JAIL)
    key = ModelKey("jailed", "1")
    assert import_decoder(repository, tmp_path / "source", key, progress=told.append) == here
    assert told[0] == "checking the weights"
    for file in ("model.safetensors", "onnx-fp32/model.onnx.data", "tokenizer.json"):
        made = [repository.folder(each) / file for each in (key, ModelKey("here", "1"))]
        assert made[0].read_bytes() == made[1].read_bytes()
        assert made[0].stat().st_mode & 0o777 == 0o644
        assert made[0].stat().st_uid == os.geteuid()
