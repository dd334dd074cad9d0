"""Which form a runtime holds a model in, and what a form says of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catenary_services.domain.decoder import (
    GRAPH_BYTES,
    AllocatedSizes,
    DecoderForm,
    DecoderRuntime,
    DecoderTable,
    LargestStep,
    StepSizes,
    form_of,
)

PLAIN = DecoderTable("0", 3, 8, 2, 1, 4, 100, 128, (2,), 10, 20, 30, 4)
HELD = AllocatedSizes(DecoderForm.TORCH_BFLOAT16, (10, 11, 12), 100, 120, 90, 5, 7, 2)


@pytest.mark.parametrize(
    ("runtime", "precision", "form"),
    [
        ("onnx", "fp32", DecoderForm.ONNX_FP32),
        ("onnx", "int8", DecoderForm.ONNX_INT8),
        ("onnx", "int4", DecoderForm.ONNX_INT4),
        ("onnx", "of a later release", None),
        *(
            (f"torch-{numbers}", precision, DecoderForm(f"torch-{numbers}"))
            for numbers in ("float32", "bfloat16", "float16")
            for precision in ("fp32", "int8", "int4")
        ),
        ("", "fp32", None),
        ("tpu-bfloat16", "fp32", None),
        ("onnx-fp32", "int4", None),
    ],
)
def test_a_form_follows_from_runtime_and_precision(
    runtime: str, precision: str, form: DecoderForm | None
) -> None:
    assert form_of(runtime, precision) == form


def test_every_runtime_has_a_form_in_every_precision() -> None:
    for runtime in DecoderRuntime:
        for precision in ("fp32", "int8", "int4"):
            assert form_of(runtime, precision) in set(DecoderForm)


def test_a_form_that_the_table_lacks_has_its_plain_sizes() -> None:
    table = replace(PLAIN, forms=(HELD,))
    found = table.held(DecoderForm.TORCH_BFLOAT16)
    assert replace(found, sampler=HELD.sampler, has_graphs=False) == HELD
    for form in (None, DecoderForm.ONNX_INT4):
        found = table.held(form)
        assert (found.form, found.block_bytes, found.cache_bytes_per_token) == (form, (10,) * 3, 4)
        assert found.weight_bytes(0, 3) == PLAIN.weight_bytes(0, 3) == 80
        assert found.weight_bytes(1, 2) == 10
        assert found.step_bytes(LargestStep(8, 8, 8)) == 0


def test_forms_are_added_and_replaced() -> None:
    table = replace(PLAIN, forms=(HELD,))
    other = replace(HELD, form=DecoderForm.ONNX_INT4)
    newer = replace(HELD, embedding_bytes=1)
    assert table.with_forms([other, newer]) == (other, newer)


def test_a_tied_head_is_there_once_where_both_ends_are() -> None:
    assert HELD.weight_bytes(0, 3) == 33 + 100 + 120 - 90 + 5 + 7
    assert HELD.weight_bytes(0, 1) == 10 + 100 + 5 + 7
    assert HELD.weight_bytes(2, 3) == 12 + 120 + 5 + 7
    assert HELD.weight_bytes(1, 2, entries=3) == 11 + 5 + 3 * 7
    for part in ((0, 3), (0, 1), (1, 2), (2, 3)):
        blocks = (part[1] - part[0]) * HELD.largest_block_bytes
        assert HELD.weight_bytes(*part) <= blocks + HELD.ends_bytes + HELD.entry_bytes


def test_a_step_takes_the_larger_of_blocks_and_head() -> None:
    step = StepSizes(1000, 10, 2, 50, 3, 4)
    held = replace(HELD, step=step)
    asked = LargestStep(sessions=5, chunk_tokens=20, session_tokens=100)
    in_blocks = 25 * 10 + 100 * (5 * 3 + 20 * 4)
    assert held.step_bytes(asked) == 1000 + in_blocks
    heavy = replace(held, step=replace(step, logits_bytes=10_000))
    assert heavy.step_bytes(asked) == 1000 + 25 * 2 + 6 * 10_000
    assert heavy.step_bytes(asked, has_head=False) == 1000 + in_blocks
    # No chunk is longer than a session, and no prompt leaves one row to be sampled.
    assert held.step_bytes(replace(asked, chunk_tokens=10**6)) == 1000 + 105 * 10 + 100 * (15 + 400)
    assert heavy.step_bytes(LargestStep(5)) == 1000 + 5 * 2 + 5 * 10_000
    apart = replace(held, step=replace(step, kept_by_entries=1))
    assert apart.step_bytes(replace(asked, entries=3)) == 3 * (1000 + in_blocks) + 25 * 2 + 6 * 50
    assert held.step_bytes(replace(asked, entries=3)) == held.step_bytes(asked)


def test_graphs_keep_the_memory_of_the_largest_step_beside_it() -> None:
    held = replace(HELD, step=StepSizes(1000, 10, 2, 50, 3, 4))
    asked = LargestStep(sessions=5, chunk_tokens=20, session_tokens=100)
    graphs = replace(held, has_graphs=True)
    assert graphs.step_bytes(asked) - held.step_bytes(asked) == 25 * (10 + 2) + 3 * GRAPH_BYTES
    forms = tuple(replace(held, form=form) for form in DecoderForm)
    table = replace(PLAIN, forms=forms)
    replayed = {each.form for form in DecoderForm if (each := table.held(form)).has_graphs}
    assert replayed == {DecoderForm.TORCH_FLOAT16, DecoderForm.TORCH_BFLOAT16}


def test_a_partition_is_weights_caches_and_a_step() -> None:
    held, asked = replace(HELD, step=StepSizes(row_bytes=3)), LargestStep(4, entries=2)
    assert held.partition_bytes((0, 2), 50, asked) == held.weight_bytes(0, 2, 2) + 100 + 12
