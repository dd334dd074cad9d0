"""Every family that is let in computes what `transformers` does; every other one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.model_files.families import FAMILIES, GRAPH_FAMILIES, why_not
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import NotSupported
from small_models.tiny_decoders import (
    EVERY_FAMILY,
    LAYERS,
    VOCABULARY,
    make_tiny_decoder,
    reference_model,
    unlike_ones,
)


def test_every_family_is_compared() -> None:
    assert set(EVERY_FAMILY) == set(FAMILIES)
    assert len(FAMILIES) >= 12
    assert set(GRAPH_FAMILIES) <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    repository, key = make_tiny_decoder(tmp_path, family, values=EVERY_FAMILY[family])
    model = reference_model(repository, key)
    unlike_ones(model)
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
