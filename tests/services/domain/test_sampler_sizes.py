"""Where sizes of tokens that are chosen count, and where not."""

from __future__ import annotations

from dataclasses import replace

from catenary_services.domain.decoder import (
    AllocatedSizes,
    DecoderForm,
    DecoderRuntime,
    DecoderTable,
    LargestStep,
    StepSizes,
)
from catenary_services.domain.sampler_sizes import SamplerSizes

STEP = StepSizes(1000, 10, 2, 50, 3, 4)
SAMPLER = SamplerSizes(
    fixed_bytes=7,
    counts_bytes=800,
    session_bytes=20,
    token_bytes=3,
    row_bytes=400,
    rows=4,
    beside_bytes=5,
)
HELD = AllocatedSizes(DecoderForm.TORCH_FLOAT32, (10, 10), 0, 0, 0, 0, 0, 2, STEP, SAMPLER)


def test_what_is_kept_comes_in_pages_and_scratch_is_bounded() -> None:
    assert SAMPLER.kept_bytes(0, 100) == 7
    assert SAMPLER.kept_bytes(8, 100) == 7 + 800 + 8 * (20 + 300)
    assert SAMPLER.kept_bytes(9, 100) == 7 + 1600 + 9 * (20 + 300)
    assert SAMPLER.scratch_bytes(3) == 3 * 405
    assert SAMPLER.scratch_bytes(100) == 4 * 400 + 100 * 5


def test_a_step_takes_scratch_behind_the_blocks_and_what_is_kept_beside_them() -> None:
    asked = LargestStep(sessions=5, chunk_tokens=20, session_tokens=100)
    kept = SAMPLER.kept_bytes(6, 100)
    behind = 25 * 2 + 6 * 50 + SAMPLER.scratch_bytes(6)
    in_blocks = 25 * 10 + 100 * (5 * 3 + 20 * 4)
    assert HELD.step_bytes(asked) == 1000 + max(in_blocks, behind) + kept
    slow = replace(HELD, sampler=replace(SAMPLER, row_bytes=10_000))
    assert slow.step_bytes(asked) == 1000 + behind + 4 * 9_600 + kept
    apart = replace(HELD, step=replace(STEP, kept_by_entries=1))
    assert apart.step_bytes(asked) == 1000 + in_blocks + behind + kept
    # Nobody chooses tokens where the last block is not.
    assert HELD.step_bytes(asked, has_head=False) == 1000 + in_blocks
    assert slow.partition_bytes((0, 1), 0, asked) == 10 + 1000 + in_blocks


def test_every_form_of_any_file_has_them_and_what_nobody_knows_has_none() -> None:
    forms = (HELD, replace(HELD, form=DecoderForm.ONNX_INT4))
    stored = tuple(replace(each, sampler=SamplerSizes()) for each in forms)
    table = DecoderTable("0", 2, 8, 2, 1, 4, 32_000, 128, (2,), 10, 20, 30, 4, forms=stored)
    on_gpu = table.held_by(DecoderRuntime.TORCH_FLOAT32, "fp32").sampler
    on_cpu = table.held_by(DecoderRuntime.ONNX, "int4").sampler
    assert on_gpu.counts_bytes == 8 * 32_000 * 4
    assert on_cpu.counts_bytes == 0
    assert on_gpu.rows == 131 > on_cpu.rows == 8
    assert on_gpu.row_bytes == 25 * 32_000
    assert on_cpu.row_bytes == 24 * 32_000
    assert table.held_by("", "fp32").sampler == SamplerSizes()
