"""A session that is read again goes on with nearly the logits it had, also in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.model_files.families import FAMILIES
from catenary_agent.decoders.model_files.sizes import GATHERED_BYTES
from catenary_agent.decoders.model_files.stored_names import is_router
from catenary_agent.decoders.torch.torch_attention import AttentionKernel
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.decoders.torch.torch_weights import WeightFormat, load_blocks
from catenary_agent.decoders.torch.torch_wide import (
    MatrixOperand,
    joined,
    narrowed,
    product,
    rounded,
)
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import NotSupported
from catenary_services.models.model_repository import ModelRepository
from small_models.tiny_decoders import (
    LAYERS,
    VARIANTS,
    VOCABULARY,
    make_tiny_decoder,
    make_variant,
    reference_model,
)

TOKENS = 48
SHARE = {"float16": 0.25, "bfloat16": 0.12}
"""Of the difference that layers have which round all they compute to bfloat16; 0.07 to 0.11 and
0.03 to 0.06 were measured."""

Tiny = tuple[ModelRepository, ModelKey]


def opened(model: Tiny, numbers: str, first: int = 0, last: int = LAYERS) -> TorchDecoder:
    layout = CacheLayout((last - first) * 8, 96, (first,))
    key = PartitionKey(model[1], first, last)
    return TorchDecoder(model[0], key, Device("cpu"), layout, 1, numbers)


def row_by_row_and_again(executor: TorchDecoder) -> float:
    """Returns how far logits of tokens that come one by one are from those of chunks."""
    tokens = np.random.default_rng(5).integers(3, VOCABULARY, TOKENS)
    executor.open_session(1, 0)
    rows = [
        executor.step([StepItem(1, at, tokens[at : at + 1], "logits")])[0] for at in range(TOKENS)
    ]
    differences = []
    for end in range(8, TOKENS + 1, 4):
        executor.open_session(2, 0)
        executor.step([StepItem(2, 0, tokens[:5], "nothing")])
        (again,) = executor.step([StepItem(2, 5, tokens[5:end], "logits")])
        executor.close_session(2)
        before = rows[end - 1]
        assert again is not None
        assert before is not None
        differences.append(float((again - before).std() / before.std()))
    return float(np.mean(differences))


def rounded_everywhere(model: Tiny) -> float:
    """Returns the same of `transformers` in bfloat16."""
    whole: Any = reference_model(*model).to(torch.bfloat16)
    tokens = torch.from_numpy(np.random.default_rng(5).integers(3, VOCABULARY, (1, TOKENS)))
    cache, rows = None, []
    differences = []
    with torch.inference_mode():
        for at in range(TOKENS):
            made = whole(tokens[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            rows.append(made.logits[0, -1].float())
        for end in range(8, TOKENS + 1, 4):
            again = whole(tokens[:, :end]).logits[0, -1].float()
            differences.append(float((again - rows[end - 1]).std() / rows[end - 1].std()))
    return float(np.mean(differences))


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "starcoder2"])
def test_logits_differ_far_less_than_by_rounding_everything(family: str, tmp_path: Path) -> None:
    model = make_tiny_decoder(tmp_path, family, values=VARIANTS[family])
    plain = rounded_everywhere(model)
    assert plain > 1e-3
    for numbers, share in SHARE.items():
        executor = opened(model, numbers)
        assert row_by_row_and_again(executor) < share * plain, numbers
        executor.close()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("numbers", ["float16", "bfloat16"])
def test_every_family_computes_in_16_bits_what_its_weights_say(
    family: str, numbers: str, tmp_path: Path
) -> None:
    model = make_variant(tmp_path, family)
    reference: Any = reference_model(*model)
    # What is left is the rounding of what enters matrices, of keys and of values.
    with torch.no_grad():
        for name, weights in reference.named_parameters():
            if not is_router(name):
                weights.copy_(weights.to(getattr(torch, numbers)))
    front, back = opened(model, numbers, 0, 2), opened(model, numbers, 2)
    front.open_session(1, 0)
    back.open_session(1, 2)
    tokens = np.random.default_rng(1).integers(3, VOCABULARY, 30)
    for part in (slice(0, 13), slice(13, 29), slice(29, 30)):
        (hidden,) = front.step([StepItem(1, part.start, tokens[part], "hidden")])
        assert hidden is not None
        assert hidden.dtype == np.float32
        (logits,) = back.step([StepItem(1, part.start, hidden, "logits")])
    with torch.inference_mode():
        expected = reference(torch.from_numpy(tokens[None])).logits[0, -1].numpy()
    assert logits is not None
    assert np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()
    for executor in (front, back):
        _, first, last = executor.key
        assert executor.memory_bytes == executor.sizes.weight_bytes(first, last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bits_are_summed_up_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weight = torch.randn(700, 1500).to(dtype)  # more than one tile
    rows = torch.randn(5, 1500)
    exact = rows.double() @ weight.double().T
    error = (product(rounded(rows, dtype), weight) - exact).abs().max() / exact.abs().max()
    assert error < (1e-3 if dtype is torch.float16 else 3e-5)


def test_rows_too_large_for_float16_are_scaled_and_others_left_as_they_are() -> None:
    rows = torch.tensor([[1e6, -3.0, 0.5], [2.0, -3.0, 0.25]])
    weight = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float16)
    made = product(rounded(rows, torch.float16), weight)
    assert made[0].item() == pytest.approx(1e6 - 4.0, rel=1e-3)
    assert made[1].item() == -3.0
    nothing = product(rounded(torch.tensor([[torch.inf, 1.0, 1.0]]), torch.float16), weight)
    assert not torch.isfinite(nothing).any()


def test_both_halves_of_bfloat16_are_added_where_a_kernel_multiplies_them() -> None:
    torch.manual_seed(3)
    rows, weight = torch.randn(3, 64), torch.randn(7, 64).to(torch.bfloat16)
    upper = rows.to(torch.bfloat16)
    both = torch.cat((upper, (rows - upper).to(torch.bfloat16)))
    made = joined(MatrixOperand(both, halves=True), both.float() @ weight.float().T)
    expected = product(rounded(rows, torch.bfloat16), weight)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


def test_a_residual_stream_beyond_float16_is_computed_in_float16(tmp_path: Path) -> None:
    model = make_tiny_decoder(tmp_path, "llama")
    reference: Any = reference_model(*model)
    with torch.no_grad():
        reference.model.layers[1].mlp.down_proj.weight *= 3e4
    reference.save_pretrained(model[0].folder(model[1]))
    tokens = np.random.default_rng(1).integers(3, VOCABULARY, 20)
    front, whole = opened(model, "float16", 0, 2), opened(model, "float16")
    for executor in (front, whole):
        executor.open_session(1, 0)
    (hidden,) = front.step([StepItem(1, 0, tokens, "hidden")])
    (logits,) = whole.step([StepItem(1, 0, tokens, "logits")])
    assert hidden is not None
    assert np.abs(hidden).max() > float(np.finfo(np.float16).max)
    with torch.inference_mode():
        expected = reference(torch.from_numpy(tokens[None])).logits[0, -1].numpy()
    assert logits is not None
    assert np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float16, 3), (torch.bfloat16, 6)])
def test_devices_get_rows_in_the_numbers_of_the_matrix_and_give_float32(
    dtype: torch.dtype, rows: int
) -> None:
    entering = rounded(torch.empty(3, 64, device="meta"), dtype)
    assert (entering.rows.shape, entering.rows.dtype) == ((rows, 64), dtype)
    made = product(entering, torch.empty(7, 64, dtype=dtype, device="meta"))
    assert (made.shape, made.dtype) == ((3, 7), torch.float32)


def test_keys_beyond_float16_become_the_largest_number() -> None:
    made = narrowed(torch.tensor([1e9, -1e9, 1.0]), torch.float16)
    assert made.tolist() == [65504.0, -65504.0, 1.0]


def test_weights_beyond_float16_are_refused_and_held_in_bfloat16(tmp_path: Path) -> None:
    model = make_tiny_decoder(tmp_path, "llama")
    reference = reference_model(*model)
    with torch.no_grad():
        reference.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5
    reference.save_pretrained(model[0].folder(model[1]))
    key = PartitionKey(model[1], 0, LAYERS)
    with model[0].reading(model[1]) as reading:
        with pytest.raises(NotSupported, match=r"layers\.1\.mlp\.up_proj.*bfloat16"):
            load_blocks(reading, key, LAYERS, WeightFormat(torch.device("cpu"), torch.float16))
        load_blocks(reading, key, LAYERS, WeightFormat(torch.device("cpu"), torch.bfloat16))


def test_caches_are_gathered_in_groups_that_fit_and_long_ones_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_decoder(tmp_path, "llama")
    found = {}
    tokens = np.random.default_rng(2).integers(3, VOCABULARY, 90)
    row_bytes = 2 * 2 * 16 * 2  # keys and values of two heads of 16 numbers
    for limit in (GATHERED_BYTES, 40 * row_bytes):
        monkeypatch.setattr("catenary_agent.decoders.torch.torch_attention.GATHERED_BYTES", limit)
        executor = opened(model, "float16")
        executor._kernel = AttentionKernel.PADDED
        lengths = {1: 7, 2: 80, 3: 12, 4: 9, 5: 25}
        for session, length in lengths.items():
            executor.open_session(session, 0)
            executor.step([StepItem(session, 0, tokens[:length], "nothing")])
        items = [StepItem(s, n, tokens[n : n + 1], "logits") for s, n in lengths.items()]
        found[limit] = executor.step(items)
        executor.close()
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-2)
