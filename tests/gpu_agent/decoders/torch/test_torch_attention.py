"""The ways to attend over a pool of caches agree, also those that only CUDA devices use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from benchmarks.gpu.models.plain_flash import flash_of_the_tensors
from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.torch import torch_attention
from catenary_agent.decoders.torch.kernel_checks.torch_flash import difference, why_not_flash
from catenary_agent.decoders.torch.torch_attention import (
    AttentionKernel,
    AttentionMetadata,
    LayerCall,
    StepTensors,
    attend,
)
from catenary_agent.decoders.torch.torch_cache import CachePool, TokenCacheShape
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import PartitionKey
from small_models.tiny_decoders import (
    LAYERS,
    make_tiny_decoder,
    prompts,
    reference_model,
    reference_tokens,
)

SHAPE = TokenCacheShape(2, 16, torch.float32, torch.device("cpu"))
HEADS = 6

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: PyTorch sees none"
)


@pytest.fixture
def emulated_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_flash", flash_of_the_tensors)


@pytest.mark.usefixtures("emulated_flash")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("entries", "counts", "cached"),
    [
        ((0, 0, 0), (1, 1, 1), (3, 20, 0)),
        ((0, 0, 1), (6, 1, 9), (0, 12, 4)),
        ((0, 1, 2), (1, 4, 1), (7, 0, 19)),
    ],
)
def test_the_kernels_agree_on_mixed_steps(
    entries: tuple[int, ...], counts: tuple[int, ...], cached: tuple[int, ...], window: int | None
) -> None:
    layers = 3
    outputs = {}
    for kernel in (AttentionKernel.EACH, AttentionKernel.FLASH, AttentionKernel.PADDED):
        torch.manual_seed(1)
        pool = CachePool(12 * 32, 32, layers, SHAPE)
        pool.keys.fill_(float("nan"))  # nobody may look at rows that were never written
        pool.values.fill_(float("nan"))
        spare = pool.open(1)
        caches = [pool.open(entry) for entry in entries]
        for cache in (spare, *caches):
            pool.grow(cache, 32)
        pool.close(spare)
        for cache, old in zip(caches, cached, strict=True):
            for layer in range(cache.first_layer, layers):
                extent = slice(cache.starts[layer], cache.starts[layer] + old)
                pool.keys[extent] = torch.randn(old, 2, 16)
                pool.values[extent] = torch.randn(old, 2, 16)
        plan = AttentionMetadata(caches, counts, cached)
        step = StepTensors.of(plan, pool, kernel)
        found = []
        for layer in range(layers):
            sessions = plan.active(layer)
            rows = plan.bounds[sessions]
            query = torch.randn(1, HEADS, rows, 16)
            key, value = torch.randn(2, 1, 2, rows, 16).unbind(0)
            call = LayerCall(step, layer, sessions)
            output, _ = attend(
                torch.nn.Identity(), query, key, value, None, 0.25, window, catenary=call
            )
            assert output.shape == (1, rows, HEADS, 16)
            found.append(output)
        outputs[kernel] = found
    for kernel in (AttentionKernel.FLASH, AttentionKernel.PADDED):
        for ours, plain in zip(outputs[kernel], outputs[AttentionKernel.EACH], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_a_cpu_has_a_reason_not_to_use_flash_attention() -> None:
    reason = why_not_flash(SHAPE, HEADS)
    assert reason is not None
    assert "cpu" in reason


@pytest.mark.usefixtures("emulated_flash")
def test_the_probe_tells_a_right_kernel_from_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for counts in ((1, 7, 1), (1, 1, 1)):
        assert difference(SHAPE, HEADS, counts) < 1e-5

    def ignores_lengths(
        call: LayerCall, query: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        call.step.used.fill_(1)
        return flash_of_the_tensors(call, query, scaling, window)

    monkeypatch.setattr(torch_attention, "_flash", ignores_lengths)
    assert difference(SHAPE, HEADS, (1, 1, 1)) > 0.1


def test_the_padded_kernel_generates_what_transformers_does(tmp_path: Path) -> None:
    repository, model = make_tiny_decoder(tmp_path, "mistral-window")
    key = PartitionKey(model, 0, LAYERS)
    executor = TorchDecoder(repository, key, Device("cpu"), CacheLayout(40, 64, (0,)), 1)
    executor._kernel = AttentionKernel.PADDED
    texts = prompts(3, 20, seed=2)
    reference = reference_model(repository, model)
    expected = [reference_tokens(reference, text, 12) for text in texts]
    assert _greedy(executor, texts, 12) == expected


@needs_cuda
@pytest.mark.parametrize("kernel", list(AttentionKernel))
def test_a_cuda_device_agrees_with_the_cpu(tmp_path: Path, kernel: AttentionKernel) -> None:
    repository, model = make_tiny_decoder(tmp_path, "llama")
    layout, key = CacheLayout(64, 64, (0,)), PartitionKey(model, 0, LAYERS)
    rows = {}
    for device in (Device("cpu"), Device("cuda")):
        executor = TorchDecoder(repository, key, device, layout, 1)
        if device.kind == "cuda" and kernel is not AttentionKernel.FLASH:
            executor._kernel, executor._graphs = kernel, None
        if device.kind == "cuda" and kernel is AttentionKernel.FLASH:
            assert executor._kernel.has_flash, "FlashAttention was expected to work"
        found = []
        for s, text in enumerate(prompts(5, 20, seed=2)):
            executor.open_session(s, 0)
            found += executor.step([StepItem(s, 0, np.array(text), "logits")])
        lengths = [executor._book.cached[s] for s in range(5)]
        for turn in range(3):
            step = [
                StepItem(s, n + turn, np.array([9 + turn]), "logits") for s, n in enumerate(lengths)
            ]
            found += executor.step(step)
        rows[device.kind] = np.stack([row for row in found if row is not None])
        executor.close()
    # bfloat16 keeps 8 bits: compare the shape of the logits, not their last digits.
    for ours, exact in zip(rows["cuda"], rows["cpu"], strict=True):
        assert np.corrcoef(ours, exact)[0, 1] > 0.99


def _greedy(executor: TorchDecoder, texts: list[list[int]], count: int) -> list[list[int]]:
    known = [list(text) for text in texts]
    cached = [0] * len(texts)
    for s in range(len(texts)):
        executor.open_session(s, 0)
    for _ in range(count):
        items = [
            StepItem(s, cached[s], np.array(tokens[cached[s] :]), "logits")
            for s, tokens in enumerate(known)
        ]
        cached = [len(tokens) for tokens in known]
        for s, logits in enumerate(executor.step(items)):
            assert logits is not None
            known[s].append(int(logits.argmax()))
    return [k[len(t) :] for k, t in zip(known, texts, strict=True)]
