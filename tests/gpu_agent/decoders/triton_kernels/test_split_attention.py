"""Single queries attend as in float64, whatever is cached: on a GPU, else in Triton's
interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import torch

from benchmarks.gpu.models.plain_flash import emulated_graphs
from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.torch.kernel_checks import attention_choice
from catenary_agent.decoders.torch.torch_attention import AttentionKernel
from catenary_agent.decoders.torch.torch_cache import TokenCacheShape
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.decoders.triton_kernels import split_attention
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import PartitionKey
from small_models.tiny_decoders import LAYERS, VOCABULARY, shared_variant

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def exactly(
    query: torch.Tensor, pool: list[torch.Tensor], places: list[tuple[int, int]], window: int | None
) -> torch.Tensor:
    """Attention in float64."""
    result = torch.empty_like(query, dtype=torch.float64)
    for index, (start, used) in enumerate(places):
        hidden = 0 if window is None else max(0, used - window)
        keys, values = (
            rows[start + hidden : start + used]
            .double()
            .repeat_interleave(query.shape[1] // rows.shape[1], 1)
            for rows in pool
        )
        scores = torch.einsum("hd,thd->ht", query[index].double(), keys) * query.shape[2] ** -0.5
        result[index] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
    return result


@pytest.mark.parametrize(
    ("keys", "group", "size", "has_dots", "window"),
    [
        (1, 3, 64, True, None),
        (2, 4, 80, True, 100),
        (1, 8, 96, True, 33),
        (2, 1, 128, False, 70),
        (1, 3, 64, False, None),
        (1, 1, 256, True, None),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_single_queries_attend_as_in_float64(
    keys: int, group: int, size: int, has_dots: bool, window: int | None, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    tokens, lengths = 200, [1, 200, *torch.randint(1, 200, (2,), generator=random).tolist()]
    pool = [
        torch.randn((4 * tokens + 1, keys, size), generator=random).half().to(DEVICE)
        for _ in range(2)
    ]
    places = [(slot * tokens, used) for slot, used in zip((2, 0, 3, 1), lengths, strict=True)]
    for start, used in places:
        for rows in pool:
            rows[start + used : start + tokens] = float("nan")  # of a session before
    starts = torch.tensor([[9, 9, 9, 9, 9], [*(start for start, _ in places), 0]])
    starts = starts.int().to(DEVICE)
    used = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    query = torch.randn((4, keys * group, size), generator=random).half().to(DEVICE)
    tile = split_attention.tile_of(group, size, has_dots=has_dots)
    expected = exactly(query, pool, places, window)
    for most in (tokens, 63):  # in several parts, and in one
        how = size**-0.5, window
        made = [
            split_attention.attend_singly(
                query, (pool[0], pool[1], most), (starts, 1, used), how, tile
            )
            for _ in range(2)
        ]
        assert torch.equal(made[0], made[1])
        error = (made[0].double() - expected).norm() / expected.norm()
        assert float(error) < 1e-3


def test_parts_fill_a_device_and_fit_into_memory() -> None:
    assert split_attention.parts_of(1, 8, 16_384, 1 << 14) == 64
    assert split_attention.parts_of(64, 8, 16_384, 1 << 20) == 2
    assert split_attention.parts_of(256, 8, 16_384, 1 << 22) == 1
    assert split_attention.parts_of(1, 8, 63, 1 << 14) == 1
    assert split_attention.parts_of(2, 8, 16_384, 1 << 22) == 3


@pytest.mark.parametrize("kernel", [AttentionKernel.SPLIT, AttentionKernel.FLASH_AND_SPLIT])
@pytest.mark.skipif(ON_GPU, reason="graphs are emulated on a CPU")
def test_steps_with_the_kernel_say_what_others_do(kernel: AttentionKernel) -> None:
    repository, model = shared_variant("llama, llama3")
    key, layout = PartitionKey(model, 0, LAYERS), CacheLayout(4 * LAYERS, 96, (0,))
    plain, split = (
        TorchDecoder(repository, key, Device("cpu"), layout, 1, "float16") for _ in range(2)
    )
    split._kernel = kernel
    random = np.random.default_rng(1)
    steps = ({0: 5, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 3, 2: 70}, {0: 1, 1: 1, 2: 1})
    for graphs in (False, True):
        with emulated_graphs(), torch.inference_mode():
            if graphs:
                split._renew_graphs(capture=True)
            for executor in (plain, split):
                for session in range(3):
                    executor.open_session(session, 0)
            for step in steps:
                items = []
                for session, count in step.items():
                    tokens = random.integers(3, VOCABULARY, count)
                    place = plain._book.cached[session]
                    items.append(StepItem(session, place, tokens, "logits"))
                for found, expected in zip(split.step(items), plain.step(items), strict=True):
                    assert found is not None
                    assert expected is not None
                    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()
            for executor in (plain, split):
                for session in range(3):
                    executor.close_session(session)


def test_a_kernel_that_is_wrong_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = TokenCacheShape(1, 64, torch.float16, DEVICE)
    assert attention_choice.why_not_split(shape, 2) is None
    right = split_attention.attend_singly
    monkeypatch.setattr(split_attention, "attend_singly", lambda *them: right(*them) * 1.1)
    assert "off by" in (attention_choice.why_not_split(shape, 2) or "")
    monkeypatch.setattr(split_attention, "attend_singly", None)
    assert not attention_choice.is_split_right(shape, 2)


COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from catenary_agent.decoders.triton_kernels import split_attention

capability = int(sys.argv[1])
TYPES = {"key_starts": "*i32", "used": "*i32", "sums": "*fp32", "weights": "*fp32"}
TYPES |= dict.fromkeys(("first_start", "window", "parts"), "i32")
for keys, group, size in ((8, 4, 128), (2, 1, 80), (4, 8, 256)):
    tile = split_attention.tile_of(group, size, has_dots=capability >= 80)
    for launch in split_attention._launchers(keys, group, size, size**-0.5, tile):
        kernel, constants = launch._kernel, launch._constants
        kinds = {each: TYPES.get(each, "*fp16") for each in kernel.arg_names}
        kinds |= dict.fromkeys(constants, "constexpr")
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, each in enumerate(kernel.arg_names)
            if kinds[each].startswith("*")
        }
        made = triton.compile(
            ASTSource(kernel, kinds, constants, aligned),
            target=GPUTarget("cuda", capability, 32),
            options=launch._options,
        )
        print(kernel.__name__, size, made.metadata.shared)
        assert made.metadata.shared <= (99 << 10 if capability >= 80 else 48 << 10)
"""


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_kernels_compile_for_cards_that_are_not_here(capability: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, str(capability)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    assert made.stdout.count("kernel") == 6
