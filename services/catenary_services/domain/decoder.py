"""What the whole system knows of a decoder language model without loading it.

Its blocks are the decoder layers; embedding belongs to block 0, the last norm and the projection to
the vocabulary to the last block. `decoder.json` lies beside `blocks.json` in the repository.

How large a model is depends on who holds it: a GPU agent keeps weights and caches in bfloat16, a
CPU agent the graph's weights in the import's precision and caches in float32. Each such way is a
`Form`, and the table has the sizes of every form it was made for ("ADR 0026").
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""Memory of caches is counted in blocks of so many tokens: a page of 4 KiB holds 16 tokens of a
head of 64 float32 numbers."""


class Runtime(StrEnum):
    """What an agent runs decoders with: the library, and the numbers it computes in."""

    ONNX = "onnx"
    """ONNX Runtime on a CPU: weights as the model's `precision` says, caches in float32."""
    TORCH_FLOAT32 = "torch-float32"
    TORCH_BFLOAT16 = "torch-bfloat16"
    TORCH_FLOAT16 = "torch-float16"


class Form(StrEnum):
    """How a decoder is held: library, weights and, where they are not float32, caches."""

    ONNX_FP32 = "onnx-fp32"
    ONNX_INT8 = "onnx-int8"
    ONNX_INT4 = "onnx-int4"
    TORCH_FLOAT32 = "torch-float32"
    TORCH_BFLOAT16 = "torch-bfloat16"
    TORCH_FLOAT16 = "torch-float16"


_ONNX_FORMS = {"fp32": Form.ONNX_FP32, "int8": Form.ONNX_INT8, "int4": Form.ONNX_INT4}
_TORCH_FORMS = frozenset({Form.TORCH_FLOAT32, Form.TORCH_BFLOAT16, Form.TORCH_FLOAT16})


def form_of(runtime: str, precision: str) -> Form | None:
    """Returns how a runtime holds a model; None if nobody can say.

    That is so for emulated devices and for agents of older releases, which count by the table's
    plain sizes whatever they run on.

    Args:
        runtime: Of the agent, as its hello says; empty or unknown: nothing is known.
        precision: Of the model's manifest: what CPU agents keep its weights in.
    """
    if runtime == Runtime.ONNX:
        return _ONNX_FORMS.get(precision)
    return Form(runtime) if runtime in set(Runtime) else None


def why_not_loaded(runtime: str, target: str) -> str:
    """Returns, in words, why a runtime cannot load a model; empty if it can, or nobody knows.

    PyTorch loads what was imported for CPUs, too: every import keeps the weights as they are.

    Args:
        runtime: Of the agent, as its hello says; empty or unknown: nothing is known.
        target: Of the model's manifest: what it was imported for.
    """
    if runtime == Runtime.ONNX and target == "gpu":
        return (
            "it runs decoders with ONNX Runtime, and the model was imported for GPUs"
            " (import it with --target both, or set decoder: torch for the agent)"
        )
    return ""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What one step takes beside weights and caches, at most.

    Blocks are run one after the other, then the head: the larger of the two is what counts, unless
    each of them keeps memory of its own.
    """

    base_bytes: int = 0
    """However small it is: scratch memory of the library."""
    row_bytes: int = 0
    """In a block, for every token that is computed."""
    output_bytes: int = 0
    """Behind the blocks, for every token."""
    logits_bytes: int = 0
    """Behind the blocks, for every row whose logits are wanted."""
    context_bytes: int = 0
    """For every token that a session which generates looks at: scores, or a copy of its cache."""
    pair_bytes: int = 0
    """For every token of a prompt by every token it looks at: masks, and scores."""
    kept_by_entries: int = 0
    """1: every range of blocks between two entries keeps its memory, and the head does."""


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step an executor is to run: a row of each session, beside a chunk of a prompt."""

    sessions: int = 0
    chunk_tokens: int = 0
    session_tokens: int = 0
    """What each of its tokens looks at, at most."""
    entries: int = 1
    """Blocks that sessions enter at."""


@dataclass(frozen=True, slots=True)
class HeldSizes:
    """The sizes of a decoder as one form holds it, in bytes that are really allocated."""

    form: Form | None
    """None: whatever it is, the table's plain sizes stand for it."""
    block_bytes: tuple[int, ...]
    """Weights of each block."""
    embedding_bytes: int
    """Needed where block 0 is. 0 where it stays in the file (ONNX Runtime's agents map it)."""
    head_bytes: int
    """Last norm and projection; needed where the last block is."""
    shared_bytes: int
    """Of these two the part that is there once where both are: a tied projection."""
    fixed_bytes: int
    """Of every partition whatever it holds: a spare row of the caches, angles of positions."""
    entry_bytes: int
    """The same, once for each block that sessions enter at."""
    cache_bytes_per_token: int
    """Key and value of one token in one block."""
    step: StepSizes = StepSizes()
    sampler: SamplerSizes = SamplerSizes()  # noqa: RUF009 - immutable
    """Of tokens that are chosen where the last block is; no part of files (`DecoderTable.held`)."""

    @property
    def largest_block_bytes(self) -> int:
        """Weights of the largest block."""
        return max(self.block_bytes)

    @property
    def ends_bytes(self) -> int:
        """What any partition takes at most beside blocks, entries, caches and steps."""
        return self.embedding_bytes + self.head_bytes - self.shared_bytes + self.fixed_bytes

    def weight_bytes(self, first_block: int, last_block: int, entries: int = 1) -> int:
        """Returns what blocks `[first_block, last_block)` take, with embedding and head.

        Args:
            first_block: Of the partition.
            last_block: Its end.
            entries: Blocks of it that sessions enter at.
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
        """Returns what steps take at most beside weights and caches.

        Where tokens are chosen that is, too, what is kept of sessions with penalties from one step
        to the next.
        """
        each, sessions = self.step, step.sessions
        chunk = min(step.chunk_tokens, step.session_tokens)
        rows = sessions + chunk
        looked_at = sessions * each.context_bytes + chunk * each.pair_bytes
        in_block = rows * each.row_bytes + step.session_tokens * looked_at
        # The last token of a chunk may be sampled, too.
        sampled = sessions + min(1, chunk) if has_head else 0
        behind = rows * each.output_bytes + sampled * each.logits_bytes
        behind += self.sampler.scratch_bytes(sampled)
        kept = self.sampler.kept_bytes(sampled, step.session_tokens) if has_head else 0
        if each.kept_by_entries:
            return step.entries * (each.base_bytes + in_block) + behind + kept
        return each.base_bytes + max(in_block, behind) + kept

    def partition_bytes(self, blocks: tuple[int, int], cache_tokens: int, step: LargestStep) -> int:
        """Returns what a partition takes in all.

        Args:
            blocks: Its first block, and its end.
            cache_tokens: That may be cached, counted once per block.
            step: Its largest.
        """
        has_head = blocks[1] == len(self.block_bytes)
        weights = self.weight_bytes(*blocks, step.entries)
        return weights + self.slot_bytes(cache_tokens) + self.step_bytes(step, has_head=has_head)


@dataclass(frozen=True, slots=True)
class DecoderTable:
    """Sizes of a Llama-family model (Llama 2/3, Mistral, Qwen2/3, SmolLM2) as it is loaded."""

    model_hash: str
    """SHA-256 of the weights, the same as in the block table."""
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
    """Weights of one block, as imported. This and the next three stand for every form that the
    table does not know: of emulated devices, and in files older than forms."""
    embedding_bytes: int
    """Needed where block 0 is."""
    head_bytes: int
    """Last norm and projection; needed where the last block is."""
    cache_bytes_per_token: int
    """Key and value of one token in one block."""
    forms: tuple[HeldSizes, ...] = ()
    """Its sizes in each form it can be held in; empty in files older than forms."""

    def held(self, form: Form | None) -> HeldSizes:
        """Returns the sizes of a form; the plain ones if it is not in the table."""
        for each in self.forms:
            if each.form == form and form is not None:
                return replace(each, sampler=self._sampler(form))
        return HeldSizes(
            form,
            (self.block_bytes,) * self.blocks,
            self.embedding_bytes,
            self.head_bytes,
            0,
            0,
            0,
            self.cache_bytes_per_token,
        )

    def _sampler(self, form: Form) -> SamplerSizes:
        in_torch = form in _TORCH_FORMS
        # PyTorch's forms may be held on a GPU, where more rows are worked on at a time.
        numbers = GPU_BLOCK_NUMBERS if in_torch else CPU_BLOCK_NUMBERS
        return sampler_sizes(self.vocabulary_size, numbers, in_torch=in_torch)

    def held_by(self, runtime: str, precision: str) -> HeldSizes:
        """Returns the sizes where a runtime holds the model; see `form_of`."""
        return self.held(form_of(runtime, precision))

    def with_forms(self, forms: Sequence[HeldSizes]) -> tuple[HeldSizes, ...]:
        """Returns the table's forms with others added, or put in the place of the same ones."""
        made = {each.form: each for each in (*self.forms, *forms)}
        return tuple(made[form] for form in sorted(made, key=str))

    def weight_bytes(self, first_block: int, last_block: int) -> int:
        """Returns the weights of blocks `[first_block, last_block)`, with embedding and head."""
        return self.held(None).weight_bytes(first_block, last_block)

    def slot_bytes(self, session_tokens: int) -> int:
        """Returns the bytes of one block slot: one session's cache in one block."""
        return session_tokens * self.cache_bytes_per_token
