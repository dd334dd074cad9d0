"""Sizes of a decoder language model, known to the whole system without loading the model.

Its blocks are the decoder layers; embedding belongs to block 0, the last norm and the projection to
the vocabulary to the last block. `decoder.json` lies beside `blocks.json` in the repository.

How large a model is depends on who holds it: a GPU agent keeps weights and caches in bfloat16, a
CPU agent the graph's weights in the import's precision and caches in float32, an engine what its
own file has. Each such way is a `DecoderForm`, and the table has the sizes of every form it was
made for ("ADR 0026").
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from catenary_services.domain.sampler_sizes import (
    CPU_BLOCK_NUMBERS,
    GPU_BLOCK_NUMBERS,
    SamplerSizes,
    sampler_sizes,
)
from catenary_services.json_fields import Count

CACHE_BLOCK_TOKENS = 16
"""Memory of caches is counted in blocks of this many tokens: a page of 4 KiB holds 16 tokens of an
attention head of 64 float32 numbers."""
GPU_CHUNK_TOKENS = 512
"""Tokens of a prompt that an agent on a GPU computes at a time, unless it is set otherwise."""
GRAPH_BYTES = 6 << 20
"""Memory that CUDA itself takes for a block in all captured steps: on an H200, 30 graphs of 30
blocks took 166 MB, their buffers included."""


class DecoderRuntime(StrEnum):
    """The library with which an agent runs decoders, and the datatype in which it computes."""

    ONNX = "onnx"
    """ONNX Runtime on a CPU, with weights in the model's `precision` and caches in float32."""
    TORCH_FLOAT32 = "torch-float32"
    TORCH_BFLOAT16 = "torch-bfloat16"
    TORCH_FLOAT16 = "torch-float16"
    VLLM = "vllm"
    """vLLM, which the agent runs as a child process."""
    LLAMA_SERVER = "llama-server"
    """The server of llama.cpp, likewise."""


ENGINES = frozenset({DecoderRuntime.VLLM, DecoderRuntime.LLAMA_SERVER})
"""The runtimes that serve whole models only ("ADR 0049")."""


class DecoderForm(StrEnum):
    """The way a decoder is held: library, datatype of weights and, if not float32, of caches."""

    ONNX_FP32 = "onnx-fp32"
    ONNX_INT8 = "onnx-int8"
    ONNX_INT4 = "onnx-int4"
    TORCH_FLOAT32 = "torch-float32"
    TORCH_BFLOAT16 = "torch-bfloat16"
    TORCH_FLOAT16 = "torch-float16"
    VLLM = "vllm"
    LLAMA_SERVER = "llama-server"


_ONNX_FORMS = {
    "fp32": DecoderForm.ONNX_FP32,
    "int8": DecoderForm.ONNX_INT8,
    "int4": DecoderForm.ONNX_INT4,
}
_GRAPH_FORMS = frozenset({DecoderForm.TORCH_BFLOAT16, DecoderForm.TORCH_FLOAT16})
"""The forms in which a GPU with FlashAttention holds a model: it replays steps as CUDA graphs."""
_TORCH_FORMS = _GRAPH_FORMS | {DecoderForm.TORCH_FLOAT32}


def form_of(runtime: str, precision: str) -> DecoderForm | None:
    """Returns the form in which a runtime holds a model; None if it is unknown.

    It is unknown for emulated devices and for agents of older releases. Their memory is counted by
    the plain sizes of the table.

    Args:
        runtime: The agent's runtime as its hello says; empty or an unknown word if it is not known.
        precision: The precision in the model's manifest: that of its weights on CPU agents.
    """
    if runtime == DecoderRuntime.ONNX:
        return _ONNX_FORMS.get(precision)
    return DecoderForm(runtime) if runtime in set(DecoderRuntime) else None


def serves_whole(runtime: str) -> bool:
    """Returns True for the runtime of an engine, which holds all blocks of a model or none."""
    return runtime in ENGINES


def why_not_loaded(
    runtime: str, target: str, engines: Collection[str] = (), *, has_blocks: bool = True
) -> str:
    """Returns a sentence why a runtime cannot load a model; empty if it can or is unknown.

    PyTorch also loads what was imported for CPUs, because every import keeps the weights.

    Args:
        runtime: The agent's runtime as its hello says; empty or an unknown word if it is not known.
        target: The target in the model's manifest: what the model was imported for.
        engines: The engines that can read the model's files.
        has_blocks: Whether the model can be run block by block as well.
    """
    if serves_whole(runtime):
        if runtime in engines:
            return ""
        needs = "a GGUF file" if runtime == DecoderRuntime.LLAMA_SERVER else "safetensors"
        return f"it serves language models with {runtime}, which needs {needs} of the model"
    if not has_blocks and runtime:
        names = " or ".join(sorted(engines))
        return f"only {names} serves the model, and this agent has no such engine"
    if runtime == DecoderRuntime.ONNX and target == "gpu":
        return (
            "it runs decoders with ONNX Runtime, and the model was imported for GPUs"
            " (import it with --target both, or set decoder: torch for the agent)"
        )
    return ""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Memory of one step besides weights and caches, in bytes, as coefficients of an upper bound.

    Blocks run one after the other, and then the head. The larger of the two counts, unless each
    keeps memory of its own (`kept_by_entries`).
    """

    base_bytes: int = 0
    """Scratch memory of the library, however small the step."""
    row_bytes: int = 0
    """Memory inside a block for every token that is computed."""
    output_bytes: int = 0
    """Memory behind the blocks for every token that is computed."""
    logits_bytes: int = 0
    """Memory behind the blocks for every row whose logits are needed."""
    context_bytes: int = 0
    """Memory for every context token of a generating session: attention scores, or a copy of its
    cache."""
    pair_bytes: int = 0
    """Memory for every pair of a prompt token and a token it attends to: masks and scores."""
    kept_by_entries: int = 0
    """1 if the head and every range of blocks between two entries keep memory of their own; 0 if
    not."""


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step an executor runs: one row of each session, and a chunk of a prompt."""

    sessions: int = 0
    chunk_tokens: int = 0
    session_tokens: int = 0
    """The most tokens that any token of the step attends to."""
    entries: int = 1
    """Number of blocks at which sessions enter the partition."""


@dataclass(frozen=True, slots=True)
class AllocatedSizes:
    """The sizes of a decoder as one form holds it, in bytes that are really allocated."""

    form: DecoderForm | None
    """The form; None if it is unknown, and the plain sizes of the table stand for it."""
    block_bytes: tuple[int, ...]
    """Weights of each block."""
    embedding_bytes: int
    """The embedding, needed with block 0; 0 where it stays in the file, which ONNX Runtime agents
    map."""
    head_bytes: int
    """The last norm and the projection, needed with the last block."""
    shared_bytes: int
    """The part of embedding and head that is allocated once where both are held: a tied projection.
    """
    fixed_bytes: int
    """A partition's memory whatever its size: a spare row of the caches, rotary angles of
    positions."""
    entry_bytes: int
    """Memory for each block at which sessions enter the partition."""
    cache_bytes_per_token: int
    """Key and value of one token in one block."""
    step: StepSizes = StepSizes()
    sampler: SamplerSizes = SamplerSizes()  # noqa: RUF009 - immutable
    """Memory for choosing tokens, needed with the last block. Files do not hold it;
    `DecoderTable.held` fills it in, like the next one."""
    has_graphs: bool = False
    """Whether steps may be replayed as CUDA graphs, which keep the memory of the largest one."""

    @property
    def largest_block_bytes(self) -> int:
        return max(self.block_bytes)

    @property
    def ends_bytes(self) -> int:
        """An upper bound of a partition's bytes besides its blocks, entries, caches and steps."""
        return self.embedding_bytes + self.head_bytes - self.shared_bytes + self.fixed_bytes

    def weight_bytes(self, first_block: int, last_block: int, entries: int = 1) -> int:
        """Returns the bytes of the weights of a range of blocks, with embedding and head.

        Args:
            first_block: The first block of the partition.
            last_block: The block behind its last one.
            entries: Number of its blocks at which sessions enter.
        """
        is_first, is_last = first_block == 0, last_block == len(self.block_bytes)
        size = sum(self.block_bytes[first_block:last_block])
        size += self.fixed_bytes + entries * self.entry_bytes
        size += self.embedding_bytes if is_first else 0
        size += self.head_bytes if is_last else 0
        return size - (self.shared_bytes if is_first and is_last else 0)

    def slot_bytes(self, session_tokens: int) -> int:
        """Returns the bytes of one block slot: one session's cache in one block."""
        return session_tokens * self.cache_bytes_per_token

    def step_bytes(self, step: LargestStep, *, has_head: bool = True) -> int:
        """Returns an upper bound of the bytes of a step besides weights and caches.

        With the head, it includes what is kept from step to step of sessions with penalties. Steps
        that no graph replays take their memory beside that of the graphs.
        """
        each, sessions = self.step, step.sessions
        chunk = min(step.chunk_tokens, step.session_tokens)
        rows = sessions + chunk
        looked_at = sessions * each.context_bytes + chunk * each.pair_bytes
        in_block = rows * each.row_bytes + step.session_tokens * looked_at
        # The last token of a prompt chunk may be sampled as well.
        sampled = sessions + min(1, chunk) if has_head else 0
        behind = rows * each.output_bytes + sampled * each.logits_bytes
        behind += self.sampler.scratch_bytes(sampled)
        kept = self.sampler.kept_bytes(sampled, step.session_tokens) if has_head else 0
        if self.has_graphs:
            # Inputs and results of the largest step stay beside what its blocks take.
            kept += rows * (each.row_bytes + each.output_bytes)
            kept += len(self.block_bytes) * GRAPH_BYTES
        if each.kept_by_entries:
            return step.entries * (each.base_bytes + in_block) + behind + kept
        return each.base_bytes + max(in_block, behind) + kept

    def partition_bytes(self, blocks: tuple[int, int], cache_tokens: int, step: LargestStep) -> int:
        """Returns the bytes of a whole partition: weights, caches and the largest step.

        Args:
            blocks: Its first block, and the block behind its last one.
            cache_tokens: Tokens that may be cached, each counted once per block.
            step: Its largest step.
        """
        has_head = blocks[1] == len(self.block_bytes)
        weights = self.weight_bytes(*blocks, step.entries)
        return weights + self.slot_bytes(cache_tokens) + self.step_bytes(step, has_head=has_head)


@dataclass(frozen=True, slots=True)
class DecoderTable:
    """Sizes of a Llama-family model (Llama 2/3, Mistral, Qwen2/3, SmolLM2) as it is loaded."""

    model_hash: str
    """SHA-256 of the weights; the block table has the same."""
    blocks: int
    hidden_size: int
    attention_heads: int
    key_value_heads: int
    head_size: int
    vocabulary_size: int
    context_tokens: int
    """Longest sequence the model was made for."""
    end_token_ids: tuple[Count, ...]
    """Any of them ends a text."""
    block_bytes: int
    """Weights of one block as imported, in bytes. This and the next three sizes stand for every
    form that the table does not list: those of emulated devices, and all forms in files older than
    forms."""
    embedding_bytes: int
    """The embedding, needed with block 0, in bytes."""
    head_bytes: int
    """The last norm and the projection, needed with the last block, in bytes."""
    cache_bytes_per_token: int
    """Key and value of one token in one block, in bytes."""
    forms: tuple[AllocatedSizes, ...] = ()
    """The sizes in each form the model can be held in; empty in files older than forms."""

    def held(self, form: DecoderForm | None) -> AllocatedSizes:
        """Returns the sizes in a form; the plain sizes if the form is not in the table."""
        for each in self.forms:
            if each.form == form and form is not None:
                has_graphs = form in _GRAPH_FORMS
                return replace(each, sampler=self._sampler(form), has_graphs=has_graphs)
        return AllocatedSizes(
            form,
            (self.block_bytes,) * self.blocks,
            self.embedding_bytes,
            self.head_bytes,
            0,
            0,
            0,
            self.cache_bytes_per_token,
        )

    def _sampler(self, form: DecoderForm) -> SamplerSizes:
        in_torch = form in _TORCH_FORMS
        # PyTorch's forms may be held on a GPU, where more rows are handled at a time.
        numbers = GPU_BLOCK_NUMBERS if in_torch else CPU_BLOCK_NUMBERS
        return sampler_sizes(self.vocabulary_size, numbers, in_torch=in_torch)

    def held_by(self, runtime: str, precision: str) -> AllocatedSizes:
        """Returns the sizes in the form a runtime holds the model in (`form_of`)."""
        return self.held(form_of(runtime, precision))

    def with_forms(self, forms: Sequence[AllocatedSizes]) -> tuple[AllocatedSizes, ...]:
        """Returns the table's forms together with others, which replace those of the same form."""
        made = {each.form: each for each in (*self.forms, *forms)}
        return tuple(made[form] for form in sorted(made, key=str))

    def weight_bytes(self, first_block: int, last_block: int) -> int:
        """Returns the bytes of weights of blocks `[first_block, last_block)` by the plain sizes.

        The embedding counts with block 0, the head with the last block.
        """
        return self.held(None).weight_bytes(first_block, last_block)

    def slot_bytes(self, session_tokens: int) -> int:
        """Returns the bytes of one block slot: one session's cache in one block."""
        return session_tokens * self.cache_bytes_per_token
