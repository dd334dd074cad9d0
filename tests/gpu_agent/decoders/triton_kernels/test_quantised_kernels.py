"""Products with codes are those of the numbers that codes stand for, in float64: on a GPU, else in
Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from catenary_agent.decoders.model_files.quantisation import unpacking_bytes
from catenary_agent.decoders.torch.torch_quantised import (
    EightBitLinear,
    FourBitLinear,
    group_of,
    numbers_of,
    packed,
    why_not_kernel,
)
from catenary_agent.decoders.triton_kernels.quantised import (
    MOST_ROWS,
    TILES,
    dequantised,
    parts_of,
    scaled,
    times_codes,
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE = 2e-5 if ON_GPU else 2e-6
"""A small part of a step of float16; matrix units cut off what they add."""
FACTORS = (1.0, 2.0**-12, 2.0**9)
# Outputs and inputs: whole tiles, parts of tiles, several parts of the inputs, odd outputs.
EIGHT_BIT_SHAPES = ((64, 128), (1, 1), (37, 41), (130, 528), (16, 1088))
FOUR_BIT_SHAPES = ((64, 128, 32), (1, 32, 32), (37, 96, 32), (130, 576, 64), (17, 1152, 128))


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def eight_bits(
    random: torch.Generator, outputs: int, inputs: int, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(-127, 128, (outputs, inputs), generator=random).to(torch.int8)
    scales = (torch.rand(outputs, generator=random) + 0.1) * factor
    return codes.to(DEVICE), scales.half().to(DEVICE)


def four_bits(
    random: torch.Generator, outputs: int, inputs: int, group: int, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, (outputs, inputs), generator=random).to(torch.uint8)
    steps = torch.randn(inputs // group, outputs, 2, generator=random) * factor
    return packed(codes).to(DEVICE), steps.half().to(DEVICE)


def exact(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Returns the weights in float64, rounded once where a kernel rounds them."""
    if not group_of(codes, steps):
        return codes.double() * steps.double()[:, None]
    return numbers_of(codes, steps.double()).half().double()


def check(found: torch.Tensor, wanted: torch.Tensor, sizes: torch.Tensor | None = None) -> None:
    """Compares rows one by one, so that none hides behind others.

    Args:
        found: The results.
        wanted: What they should be.
        sizes: How large results of each row are where nothing cancels out; None if nothing does.
    """
    assert found.dtype is torch.float32
    assert found.shape == wanted.shape
    distance = (found.double() - wanted).norm(dim=1)
    sizes = wanted.norm(dim=1) if sizes is None else sizes
    assert (distance <= TOLERANCE * sizes).all(), (distance / sizes).max()


def sizes_of(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return rows.double().norm(dim=1) * weights.norm() / weights.shape[1] ** 0.5


@pytest.mark.parametrize("count", [1, 3, 16, 17, 64, 65, 200])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_multiplied_with_the_numbers_of_codes(
    bits: int, count: int, random: torch.Generator
) -> None:
    for index, factor in enumerate(FACTORS):
        shape = (EIGHT_BIT_SHAPES if bits == 8 else FOUR_BIT_SHAPES)[(count + index) % 5]
        codes, steps = (eight_bits if bits == 8 else four_bits)(random, *shape, factor)  # type: ignore[operator]
        rows = torch.randn(count, shape[1], generator=random).half().to(DEVICE)
        scales = (torch.rand(count, 1, generator=random) * 1e4 + 1).to(DEVICE)
        weights = exact(codes, steps)
        wanted, sizes = rows.double() @ weights.T, sizes_of(rows, weights)
        check(times_codes(rows, codes, steps), wanted, sizes)
        check(times_codes(rows, codes, steps, scales), wanted * scales, sizes * scales[:, 0])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", [*EIGHT_BIT_SHAPES, *FOUR_BIT_SHAPES])
def test_every_tile_computes_every_shape(
    tile: object, shape: tuple[int, ...], random: torch.Generator
) -> None:
    codes, steps = (eight_bits if len(shape) == 2 else four_bits)(random, *shape)  # type: ignore[operator]
    rows = torch.randn(2, shape[1], generator=random).half().to(DEVICE)
    weights = exact(codes, steps)
    found = times_codes(rows, codes, steps, None, tile)  # type: ignore[arg-type]
    check(found, rows.double() @ weights.T, sizes_of(rows, weights))


@pytest.mark.parametrize("shape", [*EIGHT_BIT_SHAPES, *FOUR_BIT_SHAPES])
def test_numbers_are_written_as_tiles_have_them(
    shape: tuple[int, ...], random: torch.Generator
) -> None:
    codes, steps = (eight_bits if len(shape) == 2 else four_bits)(random, *shape)  # type: ignore[operator]
    found = dequantised(codes, steps)
    assert found.dtype is torch.float16
    expected = exact(codes, steps) if len(shape) == 3 else codes.double()
    assert torch.equal(found.double(), expected)
    made = torch.randn(5, shape[0], generator=random).to(DEVICE)
    rows = torch.rand(5, 1, generator=random).to(DEVICE)
    scales = None if len(shape) == 3 else steps
    wanted = made.double() * rows * (1.0 if scales is None else scales.double())
    check(scaled(made.clone(), scales, rows), wanted)
    assert torch.equal(scaled(made.clone(), None, None), made)


def test_rows_beyond_those_of_tiles_are_multiplied_with_numbers(random: torch.Generator) -> None:
    if not ON_GPU:
        pytest.skip("PyTorch has this product on CUDA devices only")
    for shape in ((80, 1024), (80, 1024, 64)):
        codes, steps = (eight_bits if len(shape) == 2 else four_bits)(random, *shape)  # type: ignore[operator]
        rows = torch.randn(MOST_ROWS + 1, shape[1], generator=random).half().to(DEVICE)
        scales = (torch.rand(len(rows), 1, generator=random) + 1).to(DEVICE)
        wanted = rows.double() @ exact(codes, steps).T * scales
        check(times_codes(rows, codes, steps, scales), wanted)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_a_row_results_in_does_not_depend_on_the_others(
    bits: int, random: torch.Generator
) -> None:
    # The interpreter's products may be added in another order for each shape.
    count = MOST_ROWS if ON_GPU else 16
    codes, steps = eight_bits(random, 80, 1088) if bits == 8 else four_bits(random, 80, 1088, 32)
    rows = torch.randn(count, 1088, generator=random).half().to(DEVICE)
    whole = times_codes(rows, codes, steps)
    for some in (1, 7, 16, 40, 64, 100):
        if some <= count:
            assert torch.equal(times_codes(rows[:some], codes, steps), whole[:some])


def test_inputs_are_divided_by_the_matrix_alone() -> None:
    for outputs in (1, 64, 1024, 4096, 14_336, 128_256):
        for inputs in (1, 512, 4096, 14_336):
            parts, each = parts_of(outputs, inputs)
            assert (parts - 1) * each < inputs <= parts * each
            assert all(each % tile.inputs == 0 for tile in TILES)
            # Tables count what unpacking takes, and sums of parts must not take more.
            sums = 4 * parts * MOST_ROWS * outputs
            assert parts == 1 or sums <= unpacking_bytes("int8", (outputs, inputs), 2)
    assert parts_of(4096, 14_336)[0] > 1
    assert parts_of(128_256, 4096)[0] == 1


def test_no_rows_are_no_results(random: torch.Generator) -> None:
    codes, steps = eight_bits(random, 8, 16)
    assert times_codes(steps.new_empty(0, 16), codes, steps).shape == (0, 8)


def test_what_contradicts_itself_is_refused(random: torch.Generator) -> None:
    codes, steps = four_bits(random, 8, 64, 32)
    rows = torch.zeros(1, 64, dtype=torch.float16, device=DEVICE)
    for wrong in ((rows[:, :32], codes, steps), (rows.float(), codes, steps)):
        with pytest.raises(ValueError, match="rows"):
            times_codes(*wrong)
    with pytest.raises(ValueError, match="rows"):
        times_codes(rows, codes, steps[:, :4])


def test_layers_take_the_kernel_and_give_what_they_give_without(random: torch.Generator) -> None:
    if not ON_GPU:
        pytest.skip("layers on a CPU take no kernel")
    for group in (0, 32, 64, 128):
        assert why_not_kernel(times_codes, DEVICE, torch.float16, group) is None
    bias = torch.randn(48, generator=random).half().to(DEVICE)
    rows = torch.randn(3, 5, 256, generator=random).to(DEVICE) * 1e5
    for made in (
        EightBitLinear(*eight_bits(random, 48, 256), bias),
        FourBitLinear(*four_bits(random, 48, 256, 32), bias),
    ):
        assert made._times_codes is times_codes
        found = made(rows)
        made._times_codes = None
        torch.testing.assert_close(
            found, made(rows), rtol=2e-3, atol=2e-3 * float(found.abs().max())
        )


COMPILING = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from catenary_agent.decoders.triton_kernels import quantised, quantised_kernels

capability, group, index = map(int, sys.argv[1:])
tile = quantised.TILES[index]
words = "*i32" if group else "*fp16"
KERNELS = (
    (
        quantised_kernels.dequantise_kernel,
        ["*u8", words, "*fp16"] + 3 * ["i32"],
        dict(OUTPUTS=16, INPUTS=256, GROUP=group, EVEN=True),
        4,
    ),
    (
        quantised_kernels.finish_kernel,
        ["*fp32", "*fp16", "*fp32", "*fp32"] + 3 * ["i32"],
        dict(BLOCK=1024, STEPPED=True, SCALED=True),
        4,
    ),
    (
        quantised_kernels.product_kernel,
        ["*fp16", "*u8", words, "*fp32", "*fp32"] + 6 * ["i32"],
        dict(
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            GROUP=group,
            SCALED=True,
            EVEN=True,
            STAGES=tile.stages,
        ),
        tile.warps,
    ),
)
# Before Ampere there are no products.
for kernel, types, constants, warps in KERNELS[: 3 if capability >= 80 else 2]:
    names = kernel.arg_names
    signature = dict(zip(names, types)) | dict.fromkeys(constants, "constexpr")
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, each in enumerate(types) if each[0] == "*"
    }
    made = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )
    shared = made.metadata.shared
    print(kernel.__name__, shared, len(made.asm["cubin"]))
    assert shared <= SHARED[capability], shared
"""
SHARED = {70: 96 << 10, 75: 64 << 10, 80: 99 << 10, 90: 227 << 10}
"""The shared memory that a program can have, by compute capability; for 8.0 that of 8.6."""


@pytest.mark.parametrize(
    ("capability", "group", "tile"),
    [(70, 0, 0), (75, 32, 0), (80, 128, 2), (90, 0, 0), (90, 32, 2)],
)
def test_kernels_compile_for_cards_that_are_not_here(
    capability: int, group: int, tile: int
) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    program = f"SHARED = {SHARED}\n{COMPILING}"
    command = [sys.executable, "-c", program, str(capability), str(group), str(tile)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    assert made.stdout.count("kernel") == (3 if capability >= 80 else 2)
