"""Models that engines serve, from a source to a version of the repository: only headers are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the extra [generation] is not installed")

from catenary_services.domain.decoder import DecoderForm, DecoderRuntime
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from catenaryd.sources.bringing import PulledModel, bring
from catenaryd.sources.source_names import source_of
from catenaryd.sources.versions import PullOptions
from compared_models.gguf_files import random_model, write_gguf
from engines.engine_models import write_adapter
from tiny_language_models import worker_in_this_process, write_folder

VLLM, LLAMA = DecoderRuntime.VLLM, DecoderRuntime.LLAMA_SERVER


def take(repository: ModelRepository, source: Path, **options: object) -> PulledModel:
    wanted = PullOptions(session_tokens=48, **options)  # type: ignore[arg-type]
    with worker_in_this_process():
        return bring(repository, source_of(str(source)), wanted, lambda _: None)


def test_a_folder_for_vllm_has_its_files_and_sizes_and_no_graph(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "tiny", "llama3")
    repository, key = ModelRepository(tmp_path / "models"), ModelKey("tiny", "1")
    with pytest.raises(InvalidInput, match=r"^engine: llama_server reads gguf, .* is safetensors"):
        take(repository, tmp_path / "tiny", engine="llama_server")
    with pytest.raises(InvalidInput, match=r"^keep_gguf: config.json is no GGUF file"):
        take(repository, tmp_path / "tiny", keeps_gguf=True)
    assert repository.list() == []
    assert take(repository, tmp_path / "tiny", engine="vllm", target="gpu").key == key
    manifest, table = repository.manifest(key), repository.decoder_table(key)
    assert (manifest.platform, manifest.engines, manifest.has_blocks) == ("vllm", {VLLM}, False)
    assert manifest.session_tokens == 48
    assert table.blocks == model.config.num_hidden_layers
    assert table.vocabulary_size == model.config.vocab_size
    names = set(os.listdir(repository.folder(key)))
    assert {"config.json", "tokenizer.json", "model.safetensors", "content.json"} <= names
    assert not any(name.endswith(".onnx") for name in names)
    held = table.held(DecoderForm.VLLM)
    assert held.weight_bytes(0, table.blocks) >= sum(p.nbytes for p in model.parameters())
    assert take(repository, tmp_path / "tiny", engine="vllm").known
    assert take(repository, tmp_path / "tiny").known  # whoever names no engine takes what is there


def test_adapters_lie_beside_their_model_and_are_counted(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny", "llama3")
    write_adapter(tmp_path / "terse", rank=4)
    write_adapter(tmp_path / "slow", rank=16)
    adapters = {"terse": tmp_path / "terse", "slow": tmp_path / "slow"}
    repository = ModelRepository(tmp_path / "models")
    with pytest.raises(InvalidInput, match=r"^adapters: .*--engine vllm"):
        take(repository, tmp_path / "tiny", adapters=adapters)
    with pytest.raises(InvalidInput, match="adapters"):
        take(repository, tmp_path / "tiny", engine="vllm", adapters={"7": tmp_path / "terse"})
    with pytest.raises(InvalidInput, match=r"has no adapter_model\.safetensors"):
        take(repository, tmp_path / "tiny", engine="vllm", adapters={"a": tmp_path / "tiny"})
    assert repository.list() == []
    plain = take(repository, tmp_path / "tiny", name="plain", engine="vllm").key
    key = take(repository, tmp_path / "tiny", engine="vllm", adapters=adapters).key
    assert repository.manifest(key).adapters == (
        *(("terse", "adapters/terse"), ("slow", "adapters/slow")),
    )
    with repository.reading(key) as reading:
        assert "adapters/slow/adapter_model.safetensors" in reading.names()
    weights = [
        repository.decoder_table(each).held(DecoderForm.VLLM).weight_bytes(0, 1)
        for each in (plain, key)
    ]
    # Each adapter has the room of the largest one, and this model more than one block.
    files = (tmp_path / "slow" / "adapter_model.safetensors").stat().st_size * (1 + 16 // 4)
    blocks = repository.decoder_table(key).blocks
    assert weights[1] - weights[0] == -(-files // blocks)
    assert take(repository, tmp_path / "tiny", engine="vllm", adapters=adapters).known
    with pytest.raises(InvalidInput, match="is there with slow, terse"):
        take(repository, tmp_path / "tiny", engine="vllm", adapters={"terse": tmp_path / "terse"})


def test_a_gguf_file_is_for_llama_server_alone_or_beside_blocks(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, random_model("llama", {}), "F32")
    repository = ModelRepository(tmp_path / "models")
    alone = take(repository, file, name="alone", engine="llama_server").key
    manifest = repository.manifest(alone)
    assert (manifest.platform, manifest.engines) == ("llama_server", {LLAMA})
    assert (repository.folder(alone) / manifest.file).read_bytes() == file.read_bytes()
    assert (repository.folder(alone) / "tokenizer.json").exists()
    beside = take(repository, file, name="beside", target="gpu", keeps_gguf=True).key
    manifest, table = repository.manifest(beside), repository.decoder_table(beside)
    assert manifest.has_blocks
    assert manifest.engines == {VLLM, LLAMA}
    assert (repository.folder(beside) / manifest.engine_file).read_bytes() == file.read_bytes()
    whole = table.held(DecoderForm.LLAMA_SERVER).weight_bytes(0, table.blocks)
    assert whole >= file.stat().st_size
    with pytest.raises(InvalidInput, match=r"^engine: beside:1 is there with decoder"):
        take(repository, file, name="beside", engine="llama_server")
