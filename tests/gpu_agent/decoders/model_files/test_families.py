"""Every family that is let in computes what `transformers` does; every other one is refused.

Compared are logits and greedy tokens of two sessions in the same steps, over two agents: prompts in
chunks and single tokens, past the windows of layers that have some.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.decoders.model_files.description import (
    describe,
    why_not,
    why_not_on_cpu,
    why_not_quantised,
)
from catenary_agent.decoders.model_files.families import FAMILIES
from catenary_agent.decoders.model_files.sizes import all_tensors
from catenary_agent.decoders.torch import torch_formula
from catenary_agent.decoders.torch.torch_attention import AttentionKernel
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.decoders.torch.torch_skeleton import check_tensors
from catenary_agent.executors.device import Device
from catenary_services.domain.decoder import LargestStep
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.sampler_sizes import SamplerSizes
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.models.model_repository import ModelRepository
from compared_models.decoders import REFUSED, compared_logits
from compared_models.page import Row, check_refused, check_written
from small_models.allocations import torch_peak_bytes
from small_models.tiny_decoders import (
    LAYERS,
    VARIANTS,
    VOCABULARY,
    make_tiny_decoder,
    make_variant,
    reference_model,
    shared_variant,
)
from tiny_language_models import worker_in_this_process

CUT = 1
TOLERANCE = 1e-5


def test_every_family_is_compared() -> None:
    assert {name.partition(",")[0] for name in VARIANTS} == set(FAMILIES)
    assert len(FAMILIES) >= 25


def opened(
    model: Any, first: int, last: int, numbers: str = "float32", tokens: int = 64
) -> TorchDecoder:
    key = PartitionKey(model[1], first, last)
    layout = CacheLayout(2 * LAYERS, tokens, (first,))
    made = TorchDecoder(model[0], key, Device("cpu"), layout, 1, numbers)
    for session in (0, 1):
        made.open_session(session, first)
    return made


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_tokens_are_those_of_transformers(variant: str) -> None:
    model = shared_variant(variant)
    ends = [opened(model, *span) for span in ((0, CUT), (CUT, LAYERS))]
    found = compared_logits(ends, reference_model(*model))
    assert found.difference < TOLERANCE
    assert found.tokens == found.expected_tokens
    for end in ends:
        _, first, last = end.key
        assert end.memory_bytes == end.sizes.weight_bytes(first, last)
    check_written(Row("safetensors", variant, "PyTorch"), "`transformers`", found.difference)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_takes_no_more_than_the_table_says(variant: str) -> None:
    model = shared_variant(variant)
    tokens = min(400, model[0].decoder_table(model[1]).context_tokens)
    for numbers in ("float32", "float16"):
        end = opened(model, 0, LAYERS, numbers, tokens)
        items = [StepItem(0, 0, np.arange(tokens) % VOCABULARY, "logits")]
        took = torch_peak_bytes(lambda: end.step(items))  # noqa: B023  (called at once)
        sizes = replace(end.sizes, sampler=SamplerSizes(), has_graphs=False)
        said = sizes.step_bytes(LargestStep(0, tokens, tokens))
        assert took <= said
        if tokens == 400:  # large enough for scratch memory not to matter
            assert took <= said - sizes.step.base_bytes
        end.close()


@pytest.mark.parametrize("variant", ["gemma2", "gpt_oss"])
def test_capped_scores_and_sinks_are_the_same_on_devices_without_a_kernel(variant: str) -> None:
    model = shared_variant(variant)
    end = opened(model, 0, LAYERS)
    end._kernel = AttentionKernel.PADDED
    found = compared_logits([end], reference_model(*model))
    assert found.difference < TOLERANCE
    assert found.tokens == found.expected_tokens


def test_scores_are_computed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_formula, "SCORED_BYTES", 1 << 12)
    monkeypatch.setattr(torch_formula, "SCORED_ROWS", 5)
    model = shared_variant("gpt_oss")
    found = compared_logits([opened(model, 0, LAYERS)], reference_model(*model))
    assert found.difference < TOLERANCE


def test_a_session_ends_where_angles_would_change() -> None:
    model = shared_variant("phi3, longrope")
    assert model[0].decoder_table(model[1]).context_tokens == 64
    layout = CacheLayout(20, 65, (0,))
    key = PartitionKey(model[1], 0, LAYERS)
    with pytest.raises(InvalidInput, match="65 is more than the model's 64"):
        TorchDecoder(model[0], key, Device("cpu"), layout, 1)
    with pytest.raises(InvalidInput, match="65 is more than the model's 64"):
        opened(model, 0, LAYERS).prepare_layout(layout)


@pytest.mark.parametrize("variant", ["mixtral", "granitemoe", "qwen2_moe"])
def test_experts_are_read_from_the_tensors_that_files_have(variant: str) -> None:
    repository, key = shared_variant(variant)
    folder = repository.folder(key)
    shapes = {name: tensor.shape for name, tensor in all_tensors(folder).items()}
    check_tensors(folder, shapes)
    name = next(each for each in shapes if ".experts.3." in each or ".input_linear." in each)
    with pytest.raises(InvalidInput, match="is not in the model's files"):
        check_tensors(folder, {each: shape for each, shape in shapes.items() if each != name})
    with pytest.raises(InvalidInput, match="has no use"):
        check_tensors(folder, {**shapes, "model.layers.1.mlp.other.weight": (1,)})


def test_experts_are_not_quantised(tmp_path: Path) -> None:
    model = make_variant(tmp_path, "mixtral")
    said = why_not_quantised({"model_type": "mixtral"}, "int8")
    assert said is not None
    assert "--precision fp32" in said
    assert why_not_quantised({"model_type": "mixtral"}, "fp32") is None
    model[0].write_manifest(replace(model[0].manifest(model[1]), precision="int8"))
    with pytest.raises(NotSupported, match="has experts"):
        opened(model, 0, LAYERS)


# ---- what is refused ----

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_wrong_is_refused_with_a_sentence(what: str, tmp_path: Path) -> None:
    config, options = REFUSED[what]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    repository, key = ModelRepository(tmp_path / "models"), ModelKey("refused", "1")
    with worker_in_this_process(), pytest.raises(InvalidInput) as refused:
        import_decoder(repository, tmp_path / "source", key, ImportOptions(**options))
    check_refused("safetensors", what, refused.value.message)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"rope_scaling": None, "mlp_bias": False, "pretraining_tp": 1, "num_experts": 1},
        LLAMA | {"sliding_window": None, "use_mrope": False, "some_list": []},
        {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu"},
        {
            "model_type": "qwen3_moe",
            "use_sliding_window": False,
            "max_window_layers": 48,
            "sliding_window": 4096,
        },
        {
            "model_type": "phi3",
            "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]},
            "partial_rotary_factor": 0.75,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
        },
        {
            "model_type": "gpt_oss",
            "experts_per_token": 4,
            "num_experts_per_tok": 4,
            "initial_context_length": 4096,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False},
        },
        {"model_type": "cohere2", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0},
        {"model_type": "starcoder2", "norm_epsilon": 1e-5, "layer_norm_epsilon": 1e-5},
        {"model_type": "gemma3_text", "sliding_window_pattern": 6, "rope_local_base_freq": 1e4},
    ],
)
def test_keys_that_change_nothing_are_let_in(config: dict[str, Any]) -> None:
    assert why_not(config) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations_that_transformers_writes_are_understood(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    assert why_not(json.loads(config.to_json_string(use_diff=False))) is None
    assert why_not(config.to_diff_dict()) is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_absent_keys_are_read_as_transformers_reads_them(variant: str) -> None:
    """What is said around the layers does not depend on which defaults a file spells out."""
    repository, key = shared_variant(variant)
    written = json.loads((repository.folder(key) / "config.json").read_text())
    read = ("head_dim", "logit_scale", "logits_scaling", "embedding_multiplier")
    read += ("final_logit_softcapping", "attn_logit_softcapping", "partial_rotary_factor")
    short = {name: value for name, value in written.items() if name not in read}
    filled = transformers.AutoConfig.for_model(short.pop("model_type"), **short).to_dict()
    assert describe({**short, "model_type": filled["model_type"]}) == describe(filled)


def test_a_configuration_that_transformers_refuses_is_a_sentence(tmp_path: Path) -> None:
    repository, key = make_tiny_decoder(tmp_path, "llama", values={})
    file = repository.folder(key) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "wavy"}))
    with pytest.raises(InvalidInput, match="refused by transformers: 'wavy'"):
        opened((repository, key), 0, LAYERS)


def test_graphs_are_made_of_fewer_families() -> None:
    said = why_not_on_cpu({"model_type": "mixtral"})
    assert said is not None
    assert "which agents on a CPU run" in said
    assert why_not_on_cpu({"model_type": "qwen3"}) is None
