"""What a decoder's table says is what executors allocate, in every form they hold it in.

Counted are the numbers: weights, caches, and what steps hold at a time. Of PyTorch every storage of
its allocator; of ONNX Runtime what it takes of libc, whose other part (graphs, some 700 KB for each
session of the library) is no number and does not grow with the model. The rows of an embedding that
ONNX Runtime's agents look up stay in the file.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from benchmarks.generation.cache_growth import cache_memory_bytes
from catenary_agent.decoders.base import CacheLayout, DecoderExecutor, StepItem, set_layout
from catenary_agent.decoders.emulated import EmulatedDecoder
from catenary_agent.decoders.loading import DecoderOptions, load_decoder, runtime_of
from catenary_agent.decoders.model_files.sizes import GraphBytes, all_tensors, table_from
from catenary_agent.decoders.torch.torch_attention import AttentionKernel
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.executors.device import Device
from catenary_services.domain.decoder import (
    AllocatedSizes,
    DecoderForm,
    DecoderRuntime,
    LargestStep,
)
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.sampler_sizes import SamplerSizes
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from small_models.allocations import malloc_bytes, torch_peak_bytes
from small_models.tiny_decoders import FAMILIES, LAYERS, make_tiny_decoder

CPU = Device.parse("cpu")
NUMBERS = {
    "float32": DecoderForm.TORCH_FLOAT32,
    "bfloat16": DecoderForm.TORCH_BFLOAT16,
    "float16": DecoderForm.TORCH_FLOAT16,
}
RANGES = list(itertools.combinations(range(LAYERS + 1), 2))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRepository, ModelKey]:
    return make_tiny_decoder(tmp_path_factory.mktemp("sizes"), request.param)


def held(model: tuple[ModelRepository, ModelKey], form: DecoderForm) -> AllocatedSizes:
    return model[0].decoder_table(model[1]).held(form)


def storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """What tensors take, those that share memory once."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(found.values())


def tensors_of(executor: TorchDecoder) -> Iterator[torch.Tensor]:
    """Everything a PyTorch executor holds between steps."""
    blocks = executor._model.blocks
    parts: list[Any] = [*blocks.layers, blocks.rotary, blocks.embedding, blocks.norm, blocks.head]
    for part in parts:
        if part is not None:
            yield from part.parameters()
            yield from part.buffers()
    yield executor._pool.keys
    yield executor._pool.values


@pytest.mark.parametrize("numbers", NUMBERS)
def test_pytorch_holds_weights_and_caches_of_the_table_to_the_byte(
    tiny: tuple[ModelRepository, ModelKey], numbers: str
) -> None:
    sizes = held(tiny, NUMBERS[numbers])
    for first, last in RANGES:
        layout = CacheLayout(5 * (last - first), 24, (first,))
        partition = PartitionKey(tiny[1], first, last)
        executor = TorchDecoder(tiny[0], partition, CPU, layout, 1, numbers)
        assert executor.sizes == sizes
        weights = sizes.weight_bytes(first, last)
        assert executor.memory_bytes == weights
        caches = sizes.slot_bytes(layout.memory_tokens)
        assert storage_bytes(tensors_of(executor)) == weights + caches
        set_layout(executor, CacheLayout(3 * (last - first), 40, (first,)))
        assert storage_bytes(tensors_of(executor)) == weights + sizes.slot_bytes(
            3 * 40 * (last - first)
        )
        executor.close()


@pytest.mark.parametrize("numbers", NUMBERS)
def test_exported_rows_are_as_large_as_the_table_says(
    tiny: tuple[ModelRepository, ModelKey], numbers: str
) -> None:
    from catenary_agent.kv.span import CacheSpan

    partition = PartitionKey(tiny[1], 1, 3)
    executor = TorchDecoder(tiny[0], partition, CPU, CacheLayout(4, 24, (1,)), 1, numbers)
    executor.open_session(1, 1)
    hidden = np.ones((6, executor.table.hidden_size), np.float32)
    executor.step([StepItem(1, 0, hidden, "nothing")])
    rows = executor.export_cache(1, CacheSpan(1, 3, 0, 6))
    assert rows.nbytes == 2 * 6 * held(tiny, NUMBERS[numbers]).cache_bytes_per_token


Step = tuple[int, int, int]
"""Sessions that generate, tokens of a prompt, and what each has cached before."""
STEPS: list[Step] = [
    (1, 0, 0),
    (24, 0, 0),
    (24, 0, 200),
    (0, 48, 0),
    (0, 200, 0),
    (0, 96, 200),
    (12, 96, 150),
]
LARGE: list[Step] = [(0, 200, 0), (0, 96, 200), (12, 96, 150)]
"""Large enough for scratch memory not to matter."""


def items_of(executor: DecoderExecutor, step: Step) -> tuple[list[StepItem], LargestStep]:
    """Opens the sessions of a step, with their caches; returns the step, and what it counts as."""
    decoding, chunk, context = step
    first, items = executor.key.first_block, []
    for number in range(decoding + min(1, chunk)):
        executor.open_session(number, first)
        for at in range(0, context, 50):
            part = np.arange(3, 3 + min(50, context - at))
            executor.step([StepItem(number, at, part, "nothing")])
        count = 1 if number < decoding else chunk
        items.append(StepItem(number, context, np.arange(5, 5 + count), "logits"))
    return items, LargestStep(decoding, chunk, context + max(1, chunk))


def logits_sizes(executor: DecoderExecutor) -> AllocatedSizes:
    """What the table says of steps that want logits: no tokens are chosen (test_sampler_sizes), and
    nothing is captured (test_torch_graphs)."""
    return replace(executor.sizes, sampler=SamplerSizes(), has_graphs=False)


@pytest.fixture(scope="module")
def measured() -> Callable[[str], tuple[ModelRepository, ModelKey]]:
    pytest.importorskip("onnxruntime_genai", reason="the extra [generation] is not installed")
    from small_models.measured_models import measured_model

    return measured_model


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_step_of_pytorch_takes_no_more_than_the_table_says_and_not_much_less(
    measured: Callable[[str], tuple[ModelRepository, ModelKey]], numbers: str
) -> None:
    model = measured("fp32")
    whole = PartitionKey(model[1], 0, 4)
    for step in STEPS:
        executor = TorchDecoder(model[0], whole, CPU, CacheLayout(4 * 25, 512, (0,)), 1, numbers)
        items, largest = items_of(executor, step)
        said = logits_sizes(executor).step_bytes(largest)
        took = torch_peak_bytes(lambda: executor.step(items))  # noqa: B023  (called at once)
        assert took <= said, step
        if step in LARGE and numbers != "float16":
            assert said <= 1.4 * took, step
        executor.close()


def test_gathered_caches_of_devices_without_a_kernel_are_in_the_table(
    measured: Callable[[str], tuple[ModelRepository, ModelKey]],
) -> None:
    model = measured("fp32")
    whole = PartitionKey(model[1], 0, 4)
    executor = TorchDecoder(model[0], whole, CPU, CacheLayout(4 * 25, 512, (0,)), 1, "float16")
    executor._kernel = AttentionKernel.PADDED
    items, largest = items_of(executor, (24, 0, 400))
    took = torch_peak_bytes(lambda: executor.step(items))
    assert took <= logits_sizes(executor).step_bytes(largest) <= 3 * took


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_steps_of_families_with_biases_and_norms_are_in_the_table(
    tmp_path: Path, family: str, numbers: str
) -> None:
    model = make_tiny_decoder(tmp_path, family)
    for step in ((0, 60, 0), (6, 40, 50)):
        layout = CacheLayout(LAYERS * 8, 120, (0,))
        partition = PartitionKey(model[1], 0, LAYERS)
        executor = TorchDecoder(model[0], partition, CPU, layout, 1, numbers)
        items, largest = items_of(executor, step)
        took = torch_peak_bytes(lambda: executor.step(items))  # noqa: B023  (called at once)
        scratch = executor.sizes.step.base_bytes
        assert took - scratch <= logits_sizes(executor).step_bytes(largest) - scratch
        executor.close()


# ---- ONNX Runtime ----


def onnx(model: tuple[ModelRepository, ModelKey], first: int, last: int, *cuts: int) -> Any:
    layout = CacheLayout(32 * (last - first), 512, (first, *cuts))
    return load_decoder(model[0], PartitionKey(model[1], first, last), CPU, layout, library="onnx")


def library_bytes(load: Callable[[], Any]) -> int:
    """What the library has of libc once something is loaded."""
    gc.collect()
    before = malloc_bytes()
    executor = load()
    gc.collect()  # of what graphs were read into
    taken = malloc_bytes() - before
    executor.close()
    return taken


def scale_bytes(folder: Path, first: int, last: int) -> int:
    """Of the quantised matrices in blocks `[first, last)`, and in the head."""
    from catenary_agent.partitioning.onnx_file import read_onnx

    named = read_onnx(folder / "model.onnx").graph.initializers.items()
    places = [f"model.layers.{block}." for block in range(first, last)]
    places += ["lm_head."] if last == LAYERS else []
    return sum(
        value.const_value.nbytes
        for name, value in named
        if name.endswith("_scales") and name.startswith(tuple(places)) and value.const_value
    )


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_onnx_runtime_reads_the_weights_of_the_table_to_the_byte(
    measured: Callable[[str], tuple[ModelRepository, ModelKey]], precision: str
) -> None:
    from catenary_agent.decoders.model_files.onnx_graph import cut_blocks, cut_head

    model = measured(precision)
    folder = model[0].folder(model[1]) / f"onnx-{precision}"
    for first, last, cuts in ((0, 4, ()), (0, 2, ()), (1, 4, (2, 3)), (3, 4, ())):
        executor = onnx(model, first, last, *cuts)
        edges = [first, *cuts, last]
        parts = [cut_blocks(folder, *edge).weights for edge in itertools.pairwise(edges)]
        parts += [cut_head(folder)[1]] if last == 4 else []
        read = sum(size for part in parts for ranges in part.values() for _, size in ranges)
        scales = scale_bytes(folder, first, last)
        assert bool(scales) is (precision != "fp32")
        assert executor.memory_bytes == read + scales
        assert executor.sizes.weight_bytes(first, last, 1 + len(cuts)) == read + scales
        executor.close()


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_onnx_runtime_allocates_them(
    measured: Callable[[str], tuple[ModelRepository, ModelKey]], precision: str
) -> None:
    model = measured(precision)
    sizes = held(model, DecoderForm(f"onnx-{precision}"))
    library_bytes(lambda: onnx(model, 0, 4))  # the first one also allocates what stays
    # Of seven, since threads that other tests left behind allocate, too, when they like.
    more = statistics.median(
        library_bytes(lambda: onnx(model, 0, 3)) - library_bytes(lambda: onnx(model, 0, 1))
        for _ in range(7)
    )
    # Beside the weights each block has nodes of its graph: some 80 KB.
    assert sizes.block_bytes[1] * 2 <= more <= sizes.block_bytes[1] * 2 + 300_000


def test_caches_of_onnx_runtime_take_what_is_cached(
    measured: Callable[[str], tuple[ModelRepository, ModelKey]],
) -> None:
    model = measured("fp32")
    before = cache_memory_bytes(os.getpid())
    executor = onnx(model, 1, 4)
    for session, tokens in ((1, 16), (2, 160), (3, 304)):
        executor.open_session(session, 1)
        hidden = np.ones((tokens, executor.table.hidden_size), np.float32)
        executor.step([StepItem(session, 0, hidden, "nothing")])
    taken = cache_memory_bytes(os.getpid()) - before
    assert taken == executor.sizes.slot_bytes(3 * (16 + 160 + 304))
    assert executor.cached_block_tokens == 3 * (16 + 160 + 304)
    executor.close()


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_step_of_onnx_runtime_takes_no_more_than_the_table_says(
    measured: Callable[[str], tuple[ModelRepository, ModelKey]], precision: str
) -> None:
    model = measured(precision)
    for step in STEPS:
        executor = onnx(model, 0, 4)
        gc.collect()
        before = malloc_bytes()
        items, largest = items_of(executor, step)
        kept = executor.step(items)
        took = malloc_bytes() - before
        # Prompts were run to fill caches, in chunks of 50.
        filling = LargestStep(0, 50 if step[2] else 0, step[2])
        said = max(
            logits_sizes(executor).step_bytes(largest), logits_sizes(executor).step_bytes(filling)
        )
        assert took <= said, step
        if step == (0, 200, 0):
            assert said <= 3 * took
        del kept
        executor.close()


# ---- what is said of devices, and the table itself ----


def times(folder: Path, key: ModelKey) -> Path:
    """A file of emulated times."""
    file = folder / "times.json"
    file.write_text(json.dumps({key.name: {"decode_ns": 1000}}))
    return file


def test_an_emulated_device_counts_as_what_it_stands_for(
    measured: Callable[[str], tuple[ModelRepository, ModelKey]], tmp_path: Path
) -> None:
    repository, key = measured("fp32")
    table = repository.decoder_table(key)
    layout = CacheLayout(4, 64, (0,))
    whole = PartitionKey(key, 0, 4)
    device = Device.parse("emulated:P4", slowdown=0, profile=times(tmp_path, key))
    plain = load_decoder(repository, whole, device, layout)
    assert (plain.sizes, plain.memory_bytes) == (table.held(None), table.weight_bytes(0, 4))
    for numbers, form in NUMBERS.items():
        choice = DecoderOptions("torch", numbers)  # type: ignore[arg-type]
        made = load_decoder(
            repository, whole, device, layout, library="torch", numbers=choice.numbers
        )
        assert isinstance(made, EmulatedDecoder)
        assert made.sizes == table.held(form)
        assert made.memory_bytes == table.held(form).weight_bytes(0, 4)
        assert runtime_of(device, choice) == form.value


@pytest.mark.parametrize(
    ("device", "choice", "runtime"),
    [
        ("cpu", DecoderOptions(), DecoderRuntime.ONNX),
        ("cpu", DecoderOptions("onnx"), DecoderRuntime.ONNX),
        ("cpu", DecoderOptions("torch"), DecoderRuntime.TORCH_FLOAT32),
        ("cpu", DecoderOptions("torch", "bfloat16"), DecoderRuntime.TORCH_BFLOAT16),
        ("cuda:0", DecoderOptions("auto", "float16"), DecoderRuntime.TORCH_FLOAT16),
        ("emulated:P4", DecoderOptions(), None),
        ("emulated:P4", DecoderOptions("onnx"), DecoderRuntime.ONNX),
        ("emulated:P4", DecoderOptions("torch"), DecoderRuntime.TORCH_FLOAT16),
    ],
)
def test_what_decoders_run_with(
    device: str, choice: DecoderOptions, runtime: DecoderRuntime | None
) -> None:
    assert runtime_of(Device.parse(device), choice) is runtime


CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "intermediate_size": 16,
}


def test_a_table_is_made_without_any_graph(tmp_path: Path) -> None:
    repository, key = make_tiny_decoder(tmp_path, "llama-tied")
    tensors = all_tensors(repository.folder(key))
    table = repository.decoder_table(key)
    assert {each.form for each in table.forms} == set(NUMBERS.values())
    plain, small = table.held(DecoderForm.TORCH_FLOAT32), table.held(DecoderForm.TORCH_BFLOAT16)
    assert table.block_bytes == plain.block_bytes[0] == 2 * small.block_bytes[0]
    assert small.shared_bytes == small.embedding_bytes == VOCABULARY_BYTES // 2
    # All of it is every tensor of the file once: the head is tied.
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert plain.weight_bytes(0, 4) - plain.fixed_bytes == whole


VOCABULARY_BYTES = 256 * 64 * 4


@pytest.mark.parametrize("missing", ["model.embed_tokens.weight", "model.norm.weight", "layers.1"])
def test_a_table_of_weights_that_lack_something_is_refused(tmp_path: Path, missing: str) -> None:
    repository, key = make_tiny_decoder(tmp_path, "llama")
    tensors = all_tensors(repository.folder(key))
    left = {name: tensor for name, tensor in tensors.items() if missing not in name}
    config = {**CONFIG, "num_hidden_layers": 4}
    with pytest.raises(InvalidInput):
        table_from(config, left, model_hash="0")


def test_a_table_of_a_graph_with_other_layers_is_refused(tmp_path: Path) -> None:
    repository, key = make_tiny_decoder(tmp_path, "llama")
    tensors = all_tensors(repository.folder(key))
    graphs = {"int4": GraphBytes((10, 10), 5)}
    with pytest.raises(InvalidInput, match="other layers"):
        table_from({**CONFIG, "num_hidden_layers": 4}, tensors, model_hash="0", graphs=graphs)
