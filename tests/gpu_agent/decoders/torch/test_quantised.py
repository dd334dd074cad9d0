"""Weights of four and eight bits: the nearest codes, files as they are, and their exact sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.decoders.model_files.quantisation import stored_as
from catenary_agent.decoders.torch import torch_quantised, torch_wide
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.decoders.torch.torch_quantised import (
    EightBitLinear,
    FourBitLinear,
    numbers_of,
    packed,
    quantised,
)
from catenary_agent.executors.device import Device
from catenary_services.domain.decoder import DecoderForm, LargestStep
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.models.model_repository import ModelRepository
from small_models.allocations import torch_peak_bytes
from small_models.tiny_decoders import LAYERS, VOCABULARY, make_tiny_decoder, reference_model
from tiny_language_models import worker_in_this_process

KEY = ModelKey("model", "1")
GROUP = 32
IDS = np.random.default_rng(2).integers(3, VOCABULARY, 20)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""As AutoAWQ packs: place i of a word has output AWQ_ORDER[i]."""


def test_eight_bits_are_the_nearest_codes() -> None:
    torch.manual_seed(1)
    weight, rows = torch.randn(48, 96), torch.randn(5, 96)
    made = quantised(weight, None, "int8", torch.float32)
    assert isinstance(made, EightBitLinear)
    numbers = made.codes.float() * made.steps[:, None]
    assert ((numbers - weight).abs() <= made.steps[:, None] * 0.5001).all()
    torch.testing.assert_close(made(rows), rows @ numbers.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_four_bits_are_the_nearest_codes(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, rows = torch.randn(48, 96), torch.randn(2, 5, 96).to(dtype)
    bias = torch.randn(48).to(dtype)
    made = quantised(weight, bias, "int4", dtype)
    assert isinstance(made, FourBitLinear)
    numbers = numbers_of(made.codes, made.steps.float())
    step = made.steps[..., 0].float().T.repeat_interleave(GROUP, 1)
    # Scale and offset are rounded: the ends of a group may be a little further away.
    slack = 0.5001 if dtype is torch.float32 else 0.6
    assert ((numbers - weight).abs() <= step * slack).all()
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    expected = rows.float() @ numbers.T + bias.float()
    torch.testing.assert_close(made(rows).float(), expected, rtol=tolerance, atol=10 * tolerance)


def test_codes_mean_what_the_kernels_of_pytorch_take_them_for() -> None:
    torch.manual_seed(5)
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    steps, rows = torch.rand(4, 64, 2), torch.randn(3, 128)
    tiles = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    found = torch._weight_int4pack_mm_for_cpu(rows, tiles, GROUP, steps)
    expected = FourBitLinear(packed(codes), steps, None)(rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    whole, scales = torch.randint(-127, 128, (64, 128), dtype=torch.int8), torch.rand(64)
    found = torch._weight_int8pack_mm(rows, whole, scales)
    torch.testing.assert_close(
        found, EightBitLinear(whole, scales, None)(rows), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("group", [0, GROUP])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_that_is_wrong_is_not_used(dtype: torch.dtype, group: int) -> None:
    def formula(
        rows: torch.Tensor, codes: torch.Tensor, steps: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        numbers = numbers_of(codes, steps) if group else codes * steps[:, None]
        made = rows.float() @ numbers.float().T
        return made if scales is None else made * scales

    def tried(kernel: Any) -> str | None:
        return torch_quantised.why_not_kernel(kernel, torch.device("cpu"), dtype, group)

    assert tried(formula) is None
    assert tried(lambda *given: 1.5 * formula(*given)) == "it is off by 0.5 for 1 rows"
    assert tried(lambda *given: formula(*given) * float("nan")) == "it is off by nan for 1 rows"
    # Wrong for many rows only.
    worse = tried(lambda rows, *given: formula(rows, *given) * (1 if len(rows) < 100 else 2))
    assert worse == "it is off by 1 for 100 rows"


def test_no_kernel_is_used_on_a_cpu() -> None:
    assert torch_quantised.kernel_for(torch.device("cpu"), torch.float16, GROUP) is None


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_matrices_of_the_same_rows_round_them_once(precision: str, tmp_path: Path) -> None:
    source, _ = tiny(tmp_path / "tiny")
    repository = import_it(tmp_path / "models", source, precision)
    key = PartitionKey(KEY, 0, LAYERS)
    executor = TorchDecoder(repository, key, Device("cpu"), CacheLayout(8, 64, (0,)), 1, "float16")
    executor.open_session(1, 0)
    with mock.patch.object(torch_wide, "rounded", wraps=torch_wide.rounded) as rounded:
        executor.step([StepItem(1, 0, IDS, "hidden")])
    # What enters attention, leaves it, enters the feed-forward part, and is in its middle.
    assert rounded.call_count == 4 * LAYERS


def test_what_does_not_come_out_even_stays_as_it_is() -> None:
    assert quantised(torch.randn(8, 40), None, "int4", torch.float32) is None
    assert quantised(torch.randn(8, 32), None, "fp32", torch.float32) is None
    assert quantised(torch.randn(8, 40), None, "int8", torch.float32) is not None


def tiny(folder: Path, **values: Any) -> tuple[Path, Any]:
    """Writes a tiny model whose matrices have whole groups; returns its folder and the model."""
    repository, key = make_tiny_decoder(
        folder, "llama", values={"intermediate_size": 128, "attention_bias": True, **values}
    )
    model = reference_model(repository, key)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(repository.folder(key))
    for name in ("model.yaml", "decoder.json"):
        (repository.folder(key) / name).unlink()
    return repository.folder(key), model


def import_it(folder: Path, source: Path, precision: str) -> ModelRepository:
    repository = ModelRepository(folder)
    with worker_in_this_process():
        import_decoder(repository, source, KEY, ImportOptions(precision=precision, target="gpu"))
    return repository


def opened(repository: ModelRepository, first: int = 0, last: int = LAYERS) -> TorchDecoder:
    key = PartitionKey(KEY, first, last)
    return TorchDecoder(repository, key, Device("cpu"), CacheLayout(8, 64, (first,)), 1)


def logits(repository: ModelRepository) -> np.ndarray:
    front, back = opened(repository, 0, 1), opened(repository, 1, LAYERS)
    front.open_session(1, 0)
    back.open_session(1, 1)
    (hidden,) = front.step([StepItem(1, 0, IDS, "hidden")])
    assert hidden is not None
    (found,) = back.step([StepItem(1, 0, hidden, "logits")])
    assert found is not None
    return found


def reference(model: Any) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = model(torch.from_numpy(IDS[None])).logits[0, -1].numpy()
    return found


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_model_that_is_quantised_when_loaded_computes_with_its_codes(
    precision: str, tmp_path: Path
) -> None:
    source, model = tiny(tmp_path / "tiny")
    repository = import_it(tmp_path / "models", source, precision)
    modules, plain = dict(model.named_modules()), reference(model)
    for index, layer in enumerate(opened(repository)._model.blocks.layers):
        made = [each for each in layer.named_modules() if each[0].endswith(LINEARS)]
        assert len(made) == len(LINEARS)
        for name, module in made:
            assert isinstance(module, FourBitLinear if precision == "int4" else EightBitLinear)
            with torch.no_grad():
                modules[f"model.layers.{index}.{name}"].weight.copy_(numbers_in(module))
    np.testing.assert_allclose(logits(repository), reference(model), atol=1e-4)
    assert np.abs(reference(model) - plain).max() > 1e-3


def numbers_in(module: FourBitLinear | EightBitLinear) -> torch.Tensor:
    if isinstance(module, FourBitLinear):
        return numbers_of(module.codes, module.steps)
    return module.codes * module.steps[:, None]


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("form", [DecoderForm.TORCH_FLOAT32, DecoderForm.TORCH_BFLOAT16])
def test_tables_say_what_is_held(precision: str, form: DecoderForm, tmp_path: Path) -> None:
    # 72 inputs of one matrix do not come out even: it stays as it is.
    source, _ = tiny(tmp_path / "tiny", intermediate_size=72)
    repository = import_it(tmp_path / "models", source, precision)
    table = repository.decoder_table(KEY).held(form)
    for first, last in ((0, LAYERS), (0, 1), (1, 3), (3, LAYERS)):
        key = PartitionKey(KEY, first, last)
        layout = CacheLayout(8, 64, (first,))
        numbers = form.value.removeprefix("torch-")
        held = TorchDecoder(repository, key, Device("cpu"), layout, 1, numbers).memory_bytes
        assert held == table.weight_bytes(first, last)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("numbers", ["float32", "bfloat16"])
def test_tables_say_what_steps_take(precision: str, numbers: str, tmp_path: Path) -> None:
    source, _ = tiny(tmp_path / "tiny", hidden_size=256, intermediate_size=1024)
    repository = import_it(tmp_path / "models", source, precision)
    layout = CacheLayout(2 * LAYERS, 128, (0,))
    executor = TorchDecoder(
        repository, PartitionKey(KEY, 0, LAYERS), Device("cpu"), layout, 1, numbers
    )
    executor.open_session(1, 0)
    items = [StepItem(1, 0, np.resize(IDS, 100), "logits")]
    took = torch_peak_bytes(lambda: executor.step(items))
    sizes = replace(executor.sizes, has_graphs=False)  # nothing is captured
    assert took <= sizes.step_bytes(LargestStep(1, 100, 100)) <= 2 * took


def write_quantised(source: Path, model: Any, method: str) -> None:
    """Turns a folder into what AutoGPTQ or AutoAWQ would write; the model gets their numbers."""
    from safetensors.torch import load_file, save_file

    random = torch.Generator().manual_seed(9)
    tensors = load_file(source / "model.safetensors")
    modules = dict(model.named_modules())
    for name in [each for each in tensors if each.rpartition(".")[0].endswith(LINEARS)]:
        if not name.endswith("weight"):
            continue
        base = name.removesuffix(".weight")
        outputs, inputs = tensors.pop(name).shape
        groups = inputs // GROUP
        codes = torch.randint(0, 16, (inputs, outputs), generator=random)
        zeros = torch.randint(1, 17, (groups, outputs), generator=random)
        if method != "gptq":
            zeros = zeros - 1  # as they are, in four bits
        scales = (torch.rand(groups, outputs, generator=random) * 0.06 + 0.01).half()
        steps = codes - zeros.repeat_interleave(GROUP, 0)
        numbers = steps * scales.float().repeat_interleave(GROUP, 0)
        with torch.no_grad():
            modules[base].weight.copy_(numbers.T)
        stored_zeros = zeros - 1 if method == "gptq" else zeros
        tensors[f"{base}.scales"] = scales
        if method == "awq":
            tensors[f"{base}.qweight"] = words(codes.view(inputs, -1, 8)[..., AWQ_ORDER])
            tensors[f"{base}.qzeros"] = words(stored_zeros.view(groups, -1, 8)[..., AWQ_ORDER])
        else:
            tensors[f"{base}.qweight"] = words(codes.view(-1, 8, outputs).transpose(1, 2))
            tensors[f"{base}.qzeros"] = words(stored_zeros.view(groups, -1, 8))
            tensors[f"{base}.g_idx"] = (torch.arange(inputs) // GROUP).int()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    said: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": GROUP}
    if method == "gptq_v2":
        said |= {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    change_config(source, quantization_config=said)


def words(codes: torch.Tensor) -> torch.Tensor:
    """Returns int32 [...] of codes [..., 8], the first one lowest."""
    shifts = torch.arange(0, 32, 4)
    whole = (codes.long() << shifts).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int().contiguous()


def change_config(source: Path, **values: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "awq"])
def test_quantised_files_are_computed_with_as_they_are(method: str, tmp_path: Path) -> None:
    source, model = tiny(tmp_path / "tiny")
    write_quantised(source, model, method)
    repository = import_it(tmp_path / "models", source, "int4")
    assert repository.model_file(KEY).read_bytes() == (source / "model.safetensors").read_bytes()
    np.testing.assert_allclose(logits(repository), reference(model), atol=1e-4)
    held = repository.decoder_table(KEY).held(DecoderForm.TORCH_FLOAT32)
    for first, last in ((0, LAYERS), (1, 2)):
        assert opened(repository, first, last).memory_bytes == held.weight_bytes(first, last)


def test_groups_in_another_order_are_refused_when_they_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, model = tiny(tmp_path / "tiny")
    write_quantised(source, model, "gptq")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    repository = import_it(tmp_path / "models", source, "int4")
    opened(repository, 0, 2)
    with pytest.raises(InvalidInput, match="by activations"):
        opened(repository, 2, 3)


@pytest.mark.parametrize(
    ("said", "precision", "target", "reason"),
    [
        ({"quant_method": "gptq"}, "fp32", "gpu", "import it with --precision int4"),
        ({"quant_method": "gptq"}, "int4", "both", "import it with --target gpu"),
        ({"quant_method": "gptq", "desc_act": True}, "int4", "gpu", "order of activations"),
        ({"quant_method": "gptq", "dynamic": {"a": {}}}, "int4", "gpu", "different ways"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "int4", "gpu", "'marlin'"),
        ({"quant_method": "gptq", "bits": 8}, "int4", "gpu", "8 bits"),
        ({"quant_method": "gptq", "group_size": -1}, "int4", "gpu", "groups of -1"),
        ({"quant_method": "gptq", "lm_head": True}, "int4", "gpu", "projection"),
        ({"quant_method": "awq", "version": "gemv"}, "int4", "gpu", "'gemv'"),
        ({"quant_method": "awq", "zero_point": False}, "int4", "gpu", "zero points"),
        ({"quant_method": "fp8"}, "int8", "gpu", "'fp8', which no agent reads"),
        ({"quant_method": "compressed-tensors"}, "int4", "gpu", "'compressed-tensors'"),
        ({"load_in_4bit": True}, "int4", "gpu", "None, which no agent reads"),
    ],
)
def test_what_cannot_be_exact_is_refused_in_a_sentence(
    said: dict[str, Any], precision: str, target: str, reason: str, tmp_path: Path
) -> None:
    if target == "both":
        pytest.importorskip("onnxruntime_genai")
    source, _ = tiny(tmp_path / "tiny")
    change_config(source, quantization_config={"bits": 4, "group_size": GROUP} | said)
    repository = ModelRepository(tmp_path / "models")
    options = ImportOptions(precision=precision, target=target)
    with worker_in_this_process(), pytest.raises(InvalidInput, match=reason):
        import_decoder(repository, source, KEY, options)
    assert list(repository.root.iterdir()) == []


def test_quantised_files_lack_nothing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, model = tiny(tmp_path / "tiny")
    write_quantised(source, model, "awq")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.qzeros"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"o_proj\.qzeros"):
        import_it(tmp_path / "models", source, "int4")


def test_a_model_is_not_loaded_in_another_precision_than_its_files(tmp_path: Path) -> None:
    source, model = tiny(tmp_path / "tiny")
    write_quantised(source, model, "gptq")
    repository = import_it(tmp_path / "models", source, "int4")
    manifest = repository.folder(KEY) / "model.yaml"
    manifest.write_text(manifest.read_text().replace("int4", "int8"))
    repository.record_content(KEY)
    with pytest.raises(NotSupported, match="is quantised to 4 bits, not int8"):
        opened(repository)


def test_no_quantisation_is_none() -> None:
    assert stored_as({}) is None
    assert stored_as({"quantization_config": None}) is None
