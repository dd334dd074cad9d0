"""Targets: files of models, most of which come from strangers and are read in the jail."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

import jinja2
import numpy as np

from catenary_agent.decoders.importing.import_worker import ImportOptions, check_config
from catenary_agent.decoders.model_files.checkpoint import Checkpoint
from catenary_agent.decoders.model_files.gguf_weights import plain_reader, write_model
from catenary_agent.decoders.model_files.weights import INDEX_FILE, WEIGHTS_FILE, header_bytes
from catenary_agent.partitioning.onnx_graph import load_onnx
from catenary_gateway.generation.text.jailed.chat_template import ChatTemplate
from catenary_gateway.generation.text.jailed.model_text import ModelText
from catenary_gateway.generation.text.jailed.orders import EncodeOrder, Encodings, TextFiles
from catenary_gateway.generation.text.token_table import TokenTable
from catenary_services.content.record import decode as decode_record
from catenary_services.content.record import encode as encode_record
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import CatenaryError, InvalidInput
from catenary_services.models.model_repository import ModelRepository
from catenary_services.models.source_record import decode_source
from parser_fuzzing.scratch import scratch_file, scratch_folder
from parser_fuzzing.target import BrokenPromise, FuzzTarget
from small_models.tiny_tokenizer import TEMPLATE, tiny_tokenizer

# ---- safetensors ----


def _read_safetensors(data: bytes) -> None:
    """Reads a checkpoint, alone or with its index; its tensors lie within its files."""
    folder = scratch_folder() / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    size = int.from_bytes(data[:2], "little")
    if size:
        (folder / INDEX_FILE).write_bytes(data[2 : 2 + size])
        (folder / "a.safetensors").write_bytes(data[2 + size :])
    else:
        (folder / WEIGHTS_FILE).write_bytes(data[2:])
    checkpoint = Checkpoint.of(folder)
    for name, (file, tensor) in checkpoint.tensors.items():
        if tensor.offset + tensor.nbytes > file.stat().st_size:
            raise BrokenPromise(f"{name} ends behind its file")


def _safetensors() -> Iterator[bytes]:
    tensors = {"a": ("F32", (2, 3), 24), "b": ("BF16", (0,), 0)}
    whole = header_bytes(tensors) + bytes(24)
    yield b"\0\0" + whole
    yield b"\0\0" + struct.pack("<Q", 2) + b"{}"
    index = json.dumps(
        {"metadata": {}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    ).encode()
    yield len(index).to_bytes(2, "little") + index + whole


# ---- GGUF ----


def _read_gguf(data: bytes) -> None:
    file = scratch_file("model.gguf", data[1:])
    out = scratch_folder() / "converted"
    out.mkdir(exist_ok=True)
    keep = bool(data and data[0] & 1)
    write_model(plain_reader(file), out, keep=keep, dtype="float16", tell=lambda _: None)


def _gguf(kind: str, family: str) -> bytes:
    """Returns a model of one layer, with matrices of one type."""
    import gguf
    from gguf.quants import quantize

    path = scratch_folder() / "made.gguf"
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    type_ = getattr(gguf.GGMLQuantizationType, kind)
    matrix = np.ones((32, 32), np.float32)
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(32, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", quantize(matrix, type_), raw_dtype=type_)
    if family == "qwen2":
        for name in ("attn_q", "attn_k", "attn_v"):
            writer.add_tensor(f"blk.0.{name}.bias", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _ggufs() -> Iterator[bytes]:
    yield b"\1" + _gguf("Q4_0", "llama")
    yield b"\0" + _gguf("Q8_0", "qwen2")


# ---- ONNX ----


def _read_onnx(data: bytes) -> None:
    (scratch_folder() / "graph").mkdir(exist_ok=True)
    load_onnx(scratch_file("graph/model.onnx", data))


def _onnx() -> Iterator[bytes]:
    import onnx_ir as ir

    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 4]))
    weight = ir.Value(name="w", const_value=ir.tensor(np.ones((4, 4), np.float32), name="w"))
    product = ir.node("MatMul", [x, weight])
    constant = ir.node("Constant", [], attributes={"value": ir.tensor(np.ones(4, np.float32))})
    added = ir.node("Add", [product.outputs[0], constant.outputs[0]])
    out = added.outputs[0]
    out.name, out.type, out.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["n", 4])
    graph = ir.Graph(
        [x],
        [out],
        nodes=[product, constant, added],
        initializers=[weight],
        opset_imports={"": 18},
        name="g",
    )
    yield ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString()
    external = ir.ExternalTensor(
        "data.bin", 0, 64, ir.DataType.FLOAT, shape=ir.Shape([4, 4]), name="w"
    )
    weight.const_value = external
    yield ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString()


# ---- configuration, manifests, tables, records ----


def _read_config(data: bytes) -> None:
    target = ("gpu", "both", "cpu")[data[0] % 3 if data else 0]
    folder = scratch_file("config/config.json", data[1:]).parent
    check_config(folder, ImportOptions(target=target))


def _configs() -> Iterator[bytes]:
    usual = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    more: dict[str, Any] = {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "dtype": "bfloat16",
        "eos_token_id": [1, 2],
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32},
    }
    from catenary_agent.decoders.model_files.families import FAMILIES

    for at, family in enumerate(sorted(FAMILIES)):
        said = usual | {"model_type": family}
        yield bytes((at % 3,)) + json.dumps(said).encode()
        yield bytes((at % 3,)) + json.dumps(said | more).encode()
    for name, value in more.items():
        said = usual | {"model_type": "qwen3", name: value}
        yield b"\0" + json.dumps(said).encode()


_KEY = ModelKey("m", "1")


@cache
def _repository() -> ModelRepository:
    made = ModelRepository(scratch_folder() / "repository", records=False)
    made.folder(_KEY).mkdir(parents=True, exist_ok=True)
    return made


def _read_document(data: bytes) -> object:
    """Reads one of the documents that the repository has of a version."""
    repository = _repository()
    folder = repository.folder(_KEY)
    kind, content = data[0] % 5 if data else 0, data[1:]
    for name in ("model.yaml", "blocks.json", "decoder.json"):
        (folder / name).unlink(missing_ok=True)
    if kind == 0:
        (folder / "model.yaml").write_bytes(content)
        return repository.manifest(_KEY)
    if kind == 1:
        (folder / "blocks.json").write_bytes(content)
        (folder / "model.yaml").write_text("platform: onnxruntime_onnx\nfile: model.onnx\n")
        repository.block_table(_KEY)
        return repository.example_shapes(_KEY)
    if kind == 2:
        (folder / "decoder.json").write_bytes(content)
        return repository.decoder_table(_KEY)
    if kind == 3:
        return decode_record(content, "content.json")
    return decode_source(content)


def _documents() -> Iterator[bytes]:
    from catenary_services.content.record import ContentRecord, FileRecord
    from catenary_services.domain.model import BlockTable, Boundary
    from catenary_services.domain.tensors import TensorSpec
    from catenary_services.models.block_document import document_of_table

    yield b"\0platform: onnxruntime_onnx\nfile: model.onnx\nslo_ms: 100\nmax_batch: 8\n"
    yield (
        b"\0platform: decoder\nfile: model.safetensors\nprecision: int8\nsession_tokens: 64\n"
        b"tool_parser: none\ndimensions: {n: 4}\n"
    )
    ends = Boundary(16, (TensorSpec("x", "FP32", (-1, 4)),))
    table = BlockTable(model_hash="0" * 64, boundaries=(ends, ends), compute_ns=(5,), batched=True)  # type: ignore[call-arg]
    yield b"\1" + json.dumps(document_of_table(table)).encode()
    yield b"\2" + json.dumps({"version": 1, "blocks": 2, "forms": {}}).encode()
    record = ContentRecord(1, {"model.onnx": FileRecord(4, "0" * 64)})
    yield b"\3" + encode_record(record)
    yield b'\4{"format": 1, "source": "hf:a/b", "revision": "c", "files": {}}'


# ---- texts ----


def _read_template(data: bytes) -> str:
    """Compiles a template, which is what a worker does before it has any conversation."""
    source = data.decode("utf-8", "replace")
    return ChatTemplate(source, {"bos_token": "<s>"}).source


def _templates() -> Iterator[bytes]:
    yield TEMPLATE.encode()
    yield b"{% generation %}{{ tools|tojson(indent=2) }}{% endgeneration %}"
    yield b"{% set ns = namespace(a=1) %}{% for x in range(3) %}{% break %}{% endfor %}{{ ns.a }}"
    yield b"{{ raise_exception('no') }}{% if a is defined and b[0].c() %}{{ strftime_now('%Y') }}{% endif %}"
    yield b"{% macro m(a, b=2) -%}{{ caller() }}{%- endmacro %}{% call m(1) %}x{% endcall %}"


def _read_tokenizer(data: bytes) -> None:
    """Reads a tokenizer as a worker does, and the table of its tokens as the gateway does."""
    text = ModelText.load(TextFiles(data))
    TokenTable(text.description())
    try:
        found = text.answer(EncodeOrder(["the cat <|im_end|> é"], special_tokens=True))
    except Exception as error:  # of the library; the worker answers that the model is unusable
        raise ValueError from error
    assert isinstance(found, Encodings)


def _tokenizers() -> Iterator[bytes]:
    whole = json.loads(tiny_tokenizer().to_str())
    whole["model"]["vocab"] = {"<|im_start|>": 0, "<|im_end|>": 1, "t": 2, "h": 3, "th": 4}
    whole["model"]["merges"] = [["t", "h"]]
    for at in range(3):
        made = json.loads(json.dumps(whole))
        made["added_tokens"] = whole["added_tokens"][:2]
        if at == 1:
            made["normalizer"] = {
                "type": "Sequence",
                "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}],
            }
            made["pre_tokenizer"] = {
                "type": "Split",
                "pattern": {"Regex": "[a-z]+"},
                "behavior": "Isolated",
                "invert": False,
            }
        if at == 2:
            made["model"] = {
                "type": "WordLevel",
                "vocab": {"the": 0, "[UNK]": 1},
                "unk_token": "[UNK]",
            }
            made["post_processor"] = {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "a", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
            }
        yield json.dumps(made).encode()


_JINJA = (b"{%", b"%}", b"{{", b"}}", b"{#", b"#}", b"for ", b"endfor", b"if ", b"endif", b"macro ")
TARGETS = (
    FuzzTarget("model_files/safetensors", _read_safetensors, (InvalidInput,), _safetensors, 2048),
    FuzzTarget("model_files/gguf", _read_gguf, (InvalidInput,), _ggufs, 16384),
    FuzzTarget("model_files/onnx", _read_onnx, (InvalidInput,), _onnx, 2048),
    FuzzTarget("model_files/config", _read_config, (InvalidInput,), _configs, 2048),
    FuzzTarget("model_files/documents", _read_document, (CatenaryError,), _documents, 2048),
    FuzzTarget(
        "model_files/template",
        _read_template,
        (InvalidInput, jinja2.TemplateSyntaxError),
        _templates,
        2048,
        _JINJA,
    ),
    FuzzTarget("model_files/tokenizer", _read_tokenizer, (ValueError,), _tokenizers, 4096),
)
