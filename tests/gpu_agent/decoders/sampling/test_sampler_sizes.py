"""What choosing tokens takes is what the table says, in NumPy and PyTorch, whatever is asked for.

Of PyTorch every allocation of its CPU allocator is counted, of NumPy all that `tracemalloc` sees,
with Python's own objects: some 10 KB. What grows with the vocabulary is exact: the table's number
of bytes for a word is what the dearest way to choose takes. What does not grow with it (columns of
parameters, finalists) is a bound of a KB a row.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.decoders.row_results import row_results
from catenary_agent.decoders.sampling.array_backend import Asked
from catenary_agent.decoders.sampling.kernel_sampler import torch_chooser
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.sampling import SessionSampler
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.executors.device import Device
from catenary_services.domain.decoder import LargestStep
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.sampler_sizes import (
    COUNTED_SESSIONS,
    CPU_BLOCK_NUMBERS,
    SAID_TOKENS,
    SamplerSizes,
    sampler_sizes,
)
from catenary_services.domain.sampling import (
    MAX_BIASED_TOKENS,
    MAX_LISTED_TOKENS,
    SamplingParameters,
)
from small_models.allocations import malloc_bytes, torch_peak_bytes
from small_models.tiny_decoders import LAYERS, make_tiny_decoder

VOCABULARY = 32_000
PYTHON_BYTES = 10_000
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
}
ALL: dict[str, Any] = {
    "temperature": 2.0,
    "top_k": 20_000,
    "top_p": 0.99,
    "min_p": 1e-6,
    "min_tokens": 50,
    "logit_bias": tuple((token, 0.5) for token in range(MAX_BIASED_TOKENS)),
    **PENALTIES,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with penalties": PENALTIES,
    "any": {"temperature": 1.0},
    "min-p": {"temperature": 1.0, "min_p": 0.01},
    "top-k": {"temperature": 1.0, "top_k": 50},
    "top-k of nearly all": {"temperature": 1.0, "top_k": VOCABULARY - 1},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "all filters": ALL,
}
LIBRARIES = ["numpy", "torch"]


def sampler(number: int, prompt: int = 20, **values: Any) -> SessionSampler:
    parameters = SamplingParameters(seed=number, max_tokens=400, **values)
    return SessionSampler(parameters, tuple(range(3, 23 + prompt)), prompt, (2,))


def logits_of(rows: int, *, flat: bool) -> np.ndarray:
    """Logits of a model that is sure of itself, or so flat that no few tokens decide anything."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((rows, VOCABULARY)) * (0.1 if flat else 2.5)
    logits[:, :10] += 0 if flat else 8
    return logits.astype(np.float32)


def chooser_of(library: str) -> Any:
    if library == "numpy":
        return numpy_chooser(VOCABULARY)
    return torch_chooser(torch.device("cpu"), VOCABULARY)


def sizes_of(library: str) -> SamplerSizes:
    return sampler_sizes(VOCABULARY, CPU_BLOCK_NUMBERS, in_torch=library == "torch")


def peak_bytes(library: str, work: Callable[[], object]) -> int:
    if library == "torch":
        return torch_peak_bytes(work)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    work()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most - before


def scratch_bytes(library: str, logits: np.ndarray, asked: list[Asked]) -> int:
    """What one call takes beside what is kept from call to call."""
    chooser = chooser_of(library)
    given: Any = logits if library == "numpy" else torch.from_numpy(logits)
    chooser.choose(given, asked, range(len(asked)))  # what is kept is there from now on
    return peak_bytes(library, lambda: chooser.choose(given, asked, range(len(asked))))


@pytest.mark.parametrize("rows", [1, 5, 8, 30])
@pytest.mark.parametrize("library", LIBRARIES)
def test_choosing_takes_what_the_table_says_whatever_is_asked_for(library: str, rows: int) -> None:
    sizes, slack = sizes_of(library), PYTHON_BYTES if library == "numpy" else 0
    by_words = min(rows, sizes.rows) * sizes.row_bytes
    assert sizes.rows == 8
    most = 0
    for values in WAYS.values():
        for flat in (False, True):
            asked = [(number, sampler(number, **values)) for number in range(rows)]
            took = scratch_bytes(library, logits_of(rows, flat=flat), asked)
            assert took <= sizes.scratch_bytes(rows) + slack, values
            most = max(most, took)
    # Exact in what grows with the vocabulary: the dearest way takes all of it.
    assert by_words <= most <= by_words + rows * sizes.beside_bytes + slack


@pytest.mark.parametrize("library", LIBRARIES)
def test_sessions_of_one_step_may_ask_for_different_things(library: str) -> None:
    sizes, slack = sizes_of(library), PYTHON_BYTES if library == "numpy" else 0
    ways = [*WAYS.values()] * 3
    asked = [(number, sampler(number, **values)) for number, values in enumerate(ways)]
    for flat in (False, True):
        took = scratch_bytes(library, logits_of(len(ways), flat=flat), asked)
        assert took <= sizes.scratch_bytes(len(ways)) + slack


@pytest.mark.parametrize("library", LIBRARIES)
def test_logits_are_not_copied_for_the_sessions_that_want_them_untouched(library: str) -> None:
    sizes, rows = sizes_of(library), 30
    logits: Any = logits_of(rows, flat=False)
    logits = logits if library == "numpy" else torch.from_numpy(logits)
    chooser = chooser_of(library)
    no_inputs = np.zeros(1, np.int64)
    items = [
        StepItem(row, 0, no_inputs, "token" if row % 3 else "logits", sampler(row, temperature=1.0))
        for row in range(rows)
    ]
    row_results(chooser, logits, items)
    took = peak_bytes(library, lambda: row_results(chooser, logits, items))
    assert took <= sizes.scratch_bytes(rows) < rows * VOCABULARY * 4 * 2


@pytest.mark.parametrize("sessions", [1, COUNTED_SESSIONS, COUNTED_SESSIONS + 1, 40])
def test_pytorch_keeps_counts_to_the_byte(sessions: int) -> None:
    sizes, chooser = sizes_of("torch"), chooser_of("torch")
    asked = [(number, sampler(number, **ALL)) for number in range(sessions)]
    logits = torch.from_numpy(logits_of(sessions, flat=False))
    for _ in range(3):
        for (_, each), token in zip(
            asked, chooser.choose(logits, asked, range(len(asked))), strict=True
        ):
            each.accept(token)
    kept = chooser._arrays._counts.memory_bytes + chooser._counted.nbytes
    assert kept == sizes.kept_bytes(sessions, 400)
    # Whoever comes for one that went takes its place.
    chooser.forget(0)
    chooser.choose(logits[:1], [(sessions, sampler(1, **PENALTIES))], [0])
    assert chooser._arrays._counts.memory_bytes + chooser._counted.nbytes == kept


def test_numpy_keeps_what_was_said_to_the_byte_and_no_more_than_the_table_says() -> None:
    sizes = sizes_of("numpy")
    listed = tuple(range(MAX_LISTED_TOKENS))
    for prompt in (1, 100, 1000):
        made = sampler(1, prompt, **ALL, stop_token_ids=listed, allowed_token_ids=listed)
        said, before = made.said, 12 * (prompt + 20)
        assert said is not None
        assert said.memory_bytes == before
        for token in range(5000, 5000 + SAID_TOKENS + 1):
            made.accept(token)
        assert said.memory_bytes == before + 2 * 12 * SAID_TOKENS
        kept = said.memory_bytes + made.biased.nbytes + made.bias.nbytes
        kept += made.only.nbytes + made._ends.nbytes
        counters = sizes.fixed_bytes
        assert kept + counters <= sizes.kept_bytes(1, made.position)
        assert sizes.kept_bytes(1, made.position) - kept - counters < 12 * SAID_TOKENS


def test_no_vocabulary_is_too_large_or_too_small_for_a_row_at_a_time() -> None:
    assert sampler_sizes(1 << 20, CPU_BLOCK_NUMBERS, in_torch=True).rows == 1
    assert sampler_sizes(1, CPU_BLOCK_NUMBERS, in_torch=False).rows == CPU_BLOCK_NUMBERS
    nothing = SamplerSizes()
    assert nothing.kept_bytes(100, 100) == nothing.scratch_bytes(100) == 0


# ---- within steps ----


def token_items(executor: Any, sessions: int, chunk: int) -> tuple[list[StepItem], LargestStep]:
    """A step in which every session wants a token, chosen with all there is to choose with."""
    items = []
    for number in range(sessions + min(1, chunk)):
        executor.open_session(number, 0)
        count = 1 if number < sessions else chunk
        inputs = np.arange(5, 5 + count)
        bias = ((1, 0.5), (2, -0.5))
        made = sampler(number, **{**ALL, "top_k": 100, "logit_bias": bias})
        items.append(StepItem(number, 0, inputs, "token", made))
    return items, LargestStep(sessions, chunk, max(1, chunk))


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "float16"])
def test_steps_of_pytorch_that_choose_tokens_are_in_the_table(tmp_path: Path, numbers: str) -> None:
    model = make_tiny_decoder(tmp_path, "llama")
    whole = PartitionKey(model[1], 0, LAYERS)
    for sessions, chunk in ((1, 0), (24, 0), (12, 60)):
        layout = CacheLayout(LAYERS * 25, 120, (0,))
        executor = TorchDecoder(model[0], whole, Device("cpu"), layout, 1, numbers)
        items, largest = token_items(executor, sessions, chunk)
        took = torch_peak_bytes(lambda: executor.step(items))  # noqa: B023  (called at once)
        scratch = executor.sizes.step.base_bytes
        assert took - scratch <= executor.sizes.step_bytes(largest) - scratch
        executor.close()


def test_steps_of_onnx_runtime_that_choose_tokens_are_in_the_table() -> None:
    pytest.importorskip("onnxruntime_genai", reason="the extra [generation] is not installed")
    from small_models.measured_models import measured_model

    repository, key = measured_model("fp32")
    whole = PartitionKey(key, 0, 4)
    for sessions, chunk in ((1, 0), (24, 0), (12, 60)):
        executor = load_decoder(
            repository, whole, Device("cpu"), CacheLayout(4 * 25, 512, (0,)), library="onnx"
        )
        gc.collect()
        before = malloc_bytes()
        items, largest = token_items(executor, sessions, chunk)
        kept = executor.step(items)
        assert malloc_bytes() - before <= executor.sizes.step_bytes(largest)
        del kept
        executor.close()
