"""A model just large enough that what libraries allocate for it can be told from their own noise."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from catenary_agent.decoders.model_files.sizes import all_tensors, graph_bytes, table_from
from catenary_agent.decoders.onnx.graph_worker import build_graph
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.models.model_repository import ModelRepository
from tiny_language_models import write_folder

LAYERS = 4
HEAD_SIZE = 64
"""Sixteen tokens of a float32 head are a page."""
PRECISIONS = ("fp32", "int8", "int4")


@cache
def measured_model(precision: str) -> tuple[ModelRepository, ModelKey]:
    """Returns a model with the graph of a precision, made once for all tests of this process."""
    repository, key = (
        ModelRepository(_root(), records=False),
        ModelKey(f"measured-{precision}", "1"),
    )
    folder = repository.folder(key)
    folder.parent.mkdir()
    shutil.copytree(_source(), folder)
    build_graph(folder, precision, folder)
    manifest = ModelManifest(
        key, "decoder", "model.safetensors", 10**9, 8, False, precision, session_tokens=512
    )
    repository.write_manifest(manifest)
    table = table_from(
        json.loads((folder / "config.json").read_text()),
        all_tensors(folder),
        model_hash="0" * 64,
        graphs={precision: graph_bytes(folder / f"onnx-{precision}")},
        precision=precision,
    )
    repository.write_decoder_table(key, table)
    return repository, key


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="cat-measured-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def _source() -> Path:
    import torch
    import transformers

    folder = _root() / ".source"
    write_folder(folder, "llama2")  # for its tokenizer
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=HEAD_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    return folder
