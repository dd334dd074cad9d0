"""Fused layers compute what the modules do that they replace: on a GPU, else in Triton's
interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import torch

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.torch.fused import gates, norms, rotations
from catenary_agent.decoders.torch.fused.fused_layers import FusedLayer, FusedNorm, fuse
from catenary_agent.decoders.torch.fused.layer_forms import why_not_fused
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.decoders.torch.torch_wide import LARGEST_IN_ROWS, MatrixOperand
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import PartitionKey
from compared_models.decoders import compared_logits
from small_models.tiny_decoders import LAYERS, VOCABULARY, reference_model, shared_variant

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FUSED = ("llama, llama3", "mistral, window", "qwen2, window", "qwen3")
TOLERANCE = 2e-3
"""Four steps of float16."""


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def drawn(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=random).to(DEVICE)


def whole(operand: MatrixOperand) -> torch.Tensor:
    """The rows that an operand stands for."""
    assert operand.scale is not None
    return operand.rows.float() * operand.scale


def check_operand(found: MatrixOperand, expected: MatrixOperand) -> None:
    assert found.rows.dtype is torch.float16
    assert not found.halves
    assert torch.isfinite(found.rows).all()
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-5, atol=0)
    largest = whole(expected).abs().amax(1, keepdim=True)
    assert ((whole(found) - whole(expected)).abs() <= largest * 2**-10).all()
    # Nearly all are equal: what differs by the order of a sum seldom rounds the other way.
    assert (found.rows.float() != expected.rows.float()).float().mean() < 0.02


def spread(rows: torch.Tensor) -> torch.Tensor:
    """Makes rows very large, and some very small."""
    factors = torch.tensor([1.0, 1e6, 1e-6, 3e4], device=rows.device)
    return rows * factors[torch.arange(len(rows), device=rows.device) % 4, None]


@pytest.mark.parametrize(
    ("count", "size"), [(1, 64), (5, 576), (3, 1), (300, 33), (7, 1000), (2, 4096), (2, 16384)]
)
def test_norms_are_those_of_pytorch(random: torch.Generator, count: int, size: int) -> None:
    hidden, added = (spread(drawn(random, count, size)) for _ in range(2))
    weight = drawn(random, size).mul_(9e3).half()
    check_operand(norms.normed(hidden, weight, 1e-5), norms.plainly_normed(hidden, weight, 1e-5))
    total, made = norms.sum_normed(hidden, added, weight, 1e-5)
    assert torch.equal(total, hidden + added)
    check_operand(made, norms.plainly_normed(total, weight, 1e-5))


@pytest.mark.parametrize("size", [1, 60, 1536, 8192, 11008, 14336])
def test_gates_are_those_of_pytorch(random: torch.Generator, size: int) -> None:
    product = spread(drawn(random, 9, 2 * size)) * 3
    entered = drawn(random, 9, 1).abs() + 1
    made = gates.gated(product, entered)
    check_operand(made, gates.plainly_gated(product, entered))
    assert made.scale is not None
    assert (made.scale > 1).any()
    assert (made.scale == 1).any()
    assert float(made.rows.abs().max()) <= LARGEST_IN_ROWS


@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(4, 2, 16), (9, 3, 64), (1, 1, 80), (32, 8, 128)]
)
@pytest.mark.parametrize("more", ["", "biases", "norms"])
def test_heads_are_rotated_and_stored_as_by_pytorch(
    random: torch.Generator, queries: int, keys: int, size: int, more: str
) -> None:
    count, layers = 11, 3
    heads = queries + 2 * keys
    rotation = rotations.RotationKernel(
        queries,
        keys,
        size,
        drawn(random, heads * size).half() if more == "biases" else None,
        (drawn(random, size).half(), drawn(random, size).half()) if more == "norms" else None,
        1e-6,
    )
    product = spread(drawn(random, count, heads * size))
    product[4, 3] = torch.nan
    entered = drawn(random, count, 1).abs() + 1
    turns = drawn(random, 1, count, size // 2).repeat(1, 1, 2) * 9
    pools = [drawn(random, 40, keys, size).half() for _ in range(2)]
    # As a step has them: more columns than rows, and not row by row in memory.
    writes = (
        torch.randperm(39, generator=random)[: layers * (count + 2)].view(-1, layers).T.to(DEVICE)
    )
    results = []
    for compute in (rotation, rotation.plainly):
        caches = pools[0].clone(), pools[1].clone()
        query = compute(product, entered, (turns.cos(), turns.sin()), (writes, 1), caches)
        results.append((query, *caches))
    # A rotation subtracts: what is left of large numbers has the error of these.
    largest = (product * entered).abs().nan_to_num().amax(1)
    of_slots = torch.zeros(40, device=DEVICE).index_copy(0, writes[1, :count], largest)
    for found, expected, sizes in zip(*results, (largest, of_slots, of_slots), strict=True):
        off = (found.float() - expected.float()).abs()
        most = 1e-3 + 2e-3 * expected.float().abs() + 2.0**-21 * sizes[:, None, None]
        assert torch.equal(found.isnan(), expected.isnan())
        assert bool((off <= most)[~expected.isnan()].all())
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[writes[1, :count].cpu()] = False
    assert torch.equal(results[0][1][untouched.to(DEVICE)], pools[0][untouched.to(DEVICE)])
    assert results[0][0].isnan().sum() == 2 if more != "norms" else results[0][0].isnan().any()


def opened(variant: str, *, fused: bool) -> TorchDecoder:
    key = PartitionKey(shared_variant(variant)[1], 0, LAYERS)
    device = Device("cuda" if ON_GPU else "cpu")
    layout = CacheLayout(4 * LAYERS, 96, (0,))
    made = TorchDecoder(shared_variant(variant)[0], key, device, layout, 1, "float16")
    blocks = made._model.blocks
    if not ON_GPU and fused:
        fuse(blocks, made._shape, made._kernel)
    if ON_GPU and not fused:
        blocks.layers[:] = [getattr(each, "plain", each) for each in blocks.layers]
        blocks.norm = getattr(blocks.norm, "plain", blocks.norm)
        made._graphs = None
    for session in (0, 1):
        made.open_session(session, 0)
    return made


@pytest.mark.parametrize("family", FUSED)
def test_models_with_fused_layers_compute_what_transformers_does(family: str) -> None:
    executor = opened(family, fused=True)
    blocks = executor._model.blocks
    assert [type(each) for each in blocks.layers] == [FusedLayer] * LAYERS
    assert type(blocks.norm) is FusedNorm
    plain = compared_logits([opened(family, fused=False)], reference_model(*shared_variant(family)))
    found = compared_logits([executor], reference_model(*shared_variant(family)))
    assert found.difference < max(TOLERANCE, 1.5 * plain.difference)
    assert found.tokens == found.expected_tokens


@pytest.mark.parametrize("family", FUSED)
def test_fused_weights_take_no_more_memory(family: str) -> None:
    executor = opened(family, fused=True)
    blocks = executor._model.blocks
    found: dict[int, int] = {}
    for part in (*blocks.layers, blocks.norm, blocks.head, blocks.embedding):
        tensors = [*part.parameters(), *part.buffers()]
        for module in part.modules():
            tensors += [each for each in vars(module).values() if isinstance(each, torch.Tensor)]
        rotated = getattr(part, "_rotated", None)
        if rotated is not None and rotated.bias is not None:
            tensors.append(rotated.bias)
        for each in tensors:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    angles = sum(each.nbytes for each in blocks.rotary.buffers())
    assert sum(found.values()) + angles == blocks.memory_bytes


def differences(executor: TorchDecoder) -> list[float]:
    """How far logits of tokens that came one by one are from those of a session read again."""
    tokens = np.random.default_rng(5).integers(3, VOCABULARY, 24)
    one_by_one = [
        executor.step([StepItem(0, at, tokens[at : at + 1], "logits")])[0] for at in range(24)
    ]
    executor.open_session(2, 0)
    executor.step([StepItem(2, 0, tokens[:5], "nothing")])
    found = []
    for first, end in ((5, 12), (12, 24)):
        (again,) = executor.step([StepItem(2, first, tokens[first:end], "logits")])
        before = one_by_one[end - 1]
        assert again is not None
        assert before is not None
        found.append(float((again - before).std() / before.std()))
    return found


def test_a_session_that_is_read_again_goes_on_as_near_as_with_plain_layers() -> None:
    fused, plain = (differences(opened("llama, llama3", fused=each)) for each in (True, False))
    assert np.mean(fused) <= 3 * np.mean(plain) + 1e-4


@pytest.mark.parametrize(
    "variant", ["llama", "gemma", "gemma2", "mixtral", "phi3", "olmo2", "granite"]
)
def test_layers_of_another_form_stay_as_they_are(variant: str) -> None:
    executor = opened(variant, fused=True)
    assert not any(isinstance(each, FusedLayer) for each in executor._model.blocks.layers)


def changed(what: str, layer: Any) -> None:
    """Makes something of a layer be as no layer of this form has it."""
    attention, mlp = layer.self_attn, layer.mlp
    if what == "activation":
        mlp.act_fn = torch.nn.GELU()
    elif what == "part":
        layer.other = torch.nn.Identity()
    elif what == "bias":
        mlp.down_proj.bias = torch.nn.Parameter(torch.zeros(64), requires_grad=False)
    elif what == "matrix":
        attention.o_proj = torch.nn.Linear(64, 64)
    elif what == "norm":
        layer.input_layernorm = torch.nn.RMSNorm(64)
    elif what == "datatype":
        mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.bfloat16(), requires_grad=False)


@pytest.mark.parametrize("what", ["activation", "part", "bias", "matrix", "norm", "datatype"])
def test_a_layer_with_something_else_is_not_fused(what: str) -> None:
    executor = opened("llama, llama3", fused=False)
    layer = executor._model.blocks.layers[0]
    size = executor.table.head_size
    assert why_not_fused(layer, size) is None
    assert why_not_fused(layer, size // 2) is not None
    changed(what, layer)
    assert why_not_fused(layer, size) is not None


@pytest.mark.parametrize("broken", ["wrong", "failing"])
def test_layers_whose_kernels_are_wrong_or_fail_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    right: Callable[..., MatrixOperand] = gates.gated

    def instead(product: torch.Tensor, entered: torch.Tensor) -> MatrixOperand:
        if broken == "failing":
            raise RuntimeError("no compiler")
        return right(product * 1.1, entered)

    executor = opened("llama, llama3", fused=False)
    monkeypatch.setattr(gates, "gated", instead)
    fuse(executor._model.blocks, executor._shape, executor._kernel)
    assert not any(isinstance(each, FusedLayer) for each in executor._model.blocks.layers)
    assert not isinstance(executor._model.blocks.norm, FusedNorm)
    found = compared_logits([executor], reference_model(*shared_variant("llama, llama3")))
    assert found.tokens == found.expected_tokens


COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from catenary_agent.decoders.torch.fused import gates, norms, rotations

TYPES = {"product": "*fp32", "entered": "*fp32", "hidden": "*fp32", "added": "*fp32"}
TYPES |= {"total": "*fp32", "scale": "*fp32", "cosine": "*fp32", "sine": "*fp32"}
TYPES |= {"writes": "*i64", "first_write": "i32", "write_step": "i32"}


def compiled(launch):
    kernel, constants = launch._kernel, launch._constants
    kinds = {each: TYPES.get(each, "*fp16") for each in kernel.arg_names}
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = [(at,) for at, each in enumerate(kernel.arg_names) if kinds[each].startswith("*")]
    source = ASTSource(
        kernel, kinds, constants, {at: [["tt.divisibility", 16]] for at in aligned}
    )
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    made = triton.compile(source, target=target, options=launch._options)
    assert made.asm["cubin"]
    print(kernel.__name__, constants, made.metadata.shared, "bytes shared")


one = __import__("torch").zeros(1)
for size in (576, 4096, 16384):
    for adds in (False, True):
        compiled(norms._launcher(size, 1e-5, adds))
for size in (1536, 14336):
    compiled(gates._launcher(size))
compiled(rotations.RotationKernel(32, 8, 128)._launch)
compiled(rotations.RotationKernel(9, 3, 64, one)._launch)
compiled(rotations.RotationKernel(16, 8, 80, None, (one, one), 1e-6)._launch)
"""


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_kernels_compile_for_devices(capability: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(capability)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
