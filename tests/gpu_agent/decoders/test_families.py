"""Every family that is let in computes what `transformers` does; every other one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from gpu_agent.decoders.base import CacheLayout, StepItem
from gpu_agent.decoders.families import FAMILIES, GRAPH_FAMILIES, why_not
from gpu_agent.decoders.torch_executor import TorchDecoder
from gpu_agent.executors.device import Device
from services.domain.ids import PartitionKey
from services.errors import NotSupported
from tiny_decoders import LAYERS, VOCABULARY, make_tiny_decoder, reference_model

_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "rope_parameters": _YARN},
    "phi3": {"sliding_window": 11},
    "olmo2": {},
    "starcoder2": {"sliding_window": None, "use_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "ministral": {
        "head_dim": 16, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "seed_oss": {"head_dim": 16, "attention_bias": True},
    "granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "cohere": {"logit_scale": 0.25, "use_qk_norm": False},
    "cohere2": {
        "logit_scale": 0.5, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip


def test_every_family_is_compared() -> None:
    assert set(TINY) == set(FAMILIES)
    assert len(FAMILIES) >= 12
    assert set(GRAPH_FAMILIES) <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    repository, key = make_tiny_decoder(tmp_path, family, values=TINY[family])
    model = reference_model(repository, key)
    _unlike_ones(model)
    model.save_pretrained(repository.folder(key))
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, VOCABULARY, size) for size in (30, 17)]
    cut = 1
    ends = [_open(repository, PartitionKey(key, *span)) for span in ((0, cut), (cut, LAYERS))]
    at = [0, 0]
    # Prompts in chunks and single tokens, mixed, over two agents.
    for sizes in ((12, 3), (1, 10), (16, 1), (1, 3)):
        parts = [text[a : a + n] for text, a, n in zip(texts, at, sizes, strict=True)]
        items = [StepItem(s, at[s], part, "hidden") for s, part in enumerate(parts)]
        hidden = ends[0].step(items)
        items = [StepItem(s, at[s], _array(row), "logits") for s, row in enumerate(hidden)]
        found = ends[1].step(items)
        at = [a + n for a, n in zip(at, sizes, strict=True)]
        for s, text in enumerate(texts):
            with torch.inference_mode():
                whole = model(torch.from_numpy(text[None, : at[s]])).logits[0, -1]
            expected = whole.float().numpy()
            assert np.abs(expected).max() > 0.1  # a comparison with nothing says nothing
            np.testing.assert_allclose(_array(found[s]), expected, atol=1e-4)
    assert at == [30, 17]
    for end in ends:
        _, first, last = end.key
        assert end.memory_bytes == end.sizes.weight_bytes(first, last)


def _unlike_ones(model: Any) -> None:
    """Gives norms and biases random values: nobody would notice them missing."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)


def _open(repository: Any, key: PartitionKey) -> TorchDecoder:
    layout = CacheLayout(20, 64, (key.first_block,))
    made = TorchDecoder(repository, key, Device("cpu"), layout, 1)
    for session in (0, 1):
        made.open_session(session, key.first_block)
    return made


def _array(rows: np.ndarray | None) -> np.ndarray:
    assert rows is not None
    return rows


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is none of llama"),
        ({"model_type": "gpt_oss"}, "sinks"),
        ({"model_type": "gpt_oss", "num_local_experts": 32}, "mixtures of experts"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "'mixtral' with 8 experts"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "mixtures of experts"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "mixtures of experts"),
        ({"model_type": "gemma2"}, "capped"),
        ({}, "None is none of"),
    ],
)
def test_what_would_be_wrong_is_refused_with_a_reason(config: dict[str, Any], reason: str) -> None:
    said = why_not(config)
    assert said is not None
    assert reason in said


def test_graphs_are_made_of_fewer_families() -> None:
    said = why_not({"model_type": "phi3"}, GRAPH_FAMILIES)
    assert said is not None
    assert "which agents on a CPU run" in said
    assert why_not({"model_type": "qwen3"}, GRAPH_FAMILIES) is None


def test_rotary_embeddings_that_depend_on_the_longest_session_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    repository, key = make_tiny_decoder(tmp_path, "llama", values={"rope_parameters": rope})
    with pytest.raises(NotSupported, match="'dynamic'"):
        _open(repository, PartitionKey(key, 0, LAYERS))
