"""What `model.yaml` says for engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from catenary_services.domain.decoder import DecoderRuntime, form_of, serves_whole, why_not_loaded
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository

KEY = ModelKey("m", "1")
VLLM, LLAMA = DecoderRuntime.VLLM, DecoderRuntime.LLAMA_SERVER


def manifest(root: Path, text: str):
    folder = root / "m" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.yaml").write_text(text)
    return ModelRepository(root).manifest(KEY)


def test_a_model_of_an_engine_alone(tmp_path: Path) -> None:
    text = (
        "platform: llama_server\nfile: model.gguf\nengine_arguments: [n_ubatch=64]\n"
        "min_version: '2026.1'\nsession_tokens: 128\n"
    )
    made = manifest(tmp_path, text)
    assert made.generates_text
    assert not made.has_blocks
    assert made.engines == {LLAMA}
    assert (made.engine_arguments, made.min_version) == (("n_ubatch=64",), "2026.1")
    ModelRepository(tmp_path).write_manifest(made)
    assert ModelRepository(tmp_path).manifest(KEY) == made


def test_adapters_and_their_folders(tmp_path: Path) -> None:
    text = "platform: vllm\nfile: model.safetensors\nadapters: {terse: adapters/terse, b: c.d}\n"
    made = manifest(tmp_path, text)
    assert made.adapters == (("terse", "adapters/terse"), ("b", "c.d"))
    ModelRepository(tmp_path).write_manifest(made)
    assert ModelRepository(tmp_path).manifest(KEY) == made


def test_a_model_with_blocks_says_which_engines_read_it(tmp_path: Path) -> None:
    plain = manifest(tmp_path, "platform: decoder\nfile: model.safetensors\n")
    assert (plain.engines, plain.has_blocks) == ({VLLM}, True)
    both = manifest(
        tmp_path, "platform: decoder\nfile: model.safetensors\nengine_file: model.gguf\n"
    )
    assert both.engines == {VLLM, LLAMA}
    image = manifest(tmp_path, "platform: onnxruntime_onnx\nfile: model.onnx\n")
    assert not image.engines
    assert not image.generates_text


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("platform: llama_server\nfile: model.safetensors\n", "file"),
        ("platform: vllm\nfile: model.safetensors\nengine_file: a.gguf\n", "engine_file"),
        ("platform: decoder\nfile: m.safetensors\nengine_file: ../a.gguf\n", "engine_file"),
        ("platform: decoder\nfile: m.safetensors\nengine_file: a.bin\n", "engine_file"),
        ("platform: onnxruntime_onnx\nfile: m.onnx\nmin_version: '1'\n", "min_version"),
        ("platform: vllm\nfile: m.safetensors\nmin_version: newest\n", "min_version"),
        ("platform: vllm\nfile: m.safetensors\nengine_arguments: ['']\n", "engine_arguments"),
        ('platform: vllm\nfile: m.safetensors\nengine_arguments: ["a\\nb"]\n', "engine_arguments"),
        ("platform: vllm\nfile: m.safetensors\nengine_arguments: --x\n", "engine_arguments"),
        ("platform: sglang\nfile: m.safetensors\n", "platform"),
        ("platform: decoder\nfile: m.safetensors\nadapters: {a: b}\n", "adapters"),
        ("platform: llama_server\nfile: m.gguf\nadapters: {a: b}\n", "adapters"),
        ("platform: onnxruntime_onnx\nfile: m.onnx\nadapters: {a: b}\n", "adapters"),
        ("platform: vllm\nfile: m.safetensors\nadapters: {a: ../b}\n", "adapters"),
        ("platform: vllm\nfile: m.safetensors\nadapters: {a: /b}\n", "adapters"),
        ("platform: vllm\nfile: m.safetensors\nadapters: {'2': b}\n", "adapters"),
        ("platform: vllm\nfile: m.safetensors\nadapters: {a/b: b}\n", "adapters"),
    ],
)
def test_what_no_engine_understands_is_refused_by_its_field(
    tmp_path: Path, text: str, field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        manifest(tmp_path, text)
    assert field in caught.value.field


def test_who_may_load_what() -> None:
    assert serves_whole(VLLM)
    assert not serves_whole("onnx")
    assert form_of(VLLM, "fp32") == "vllm"
    assert why_not_loaded(VLLM, "both", {VLLM}) == ""
    assert "GGUF" in why_not_loaded(LLAMA, "both", {VLLM})
    assert "no such engine" in why_not_loaded("onnx", "both", {VLLM}, has_blocks=False)
    assert why_not_loaded("", "both", {VLLM}, has_blocks=False) == ""  # an emulated device
    assert "imported for GPUs" in why_not_loaded("onnx", "gpu", {VLLM})
