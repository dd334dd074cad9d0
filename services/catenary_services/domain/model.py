"""A model as the whole system knows it without loading it: signature, blocks and their costs.

A model is a chain of *blocks*. Block `i` lies between boundary `i` and boundary `i+1`; boundary 0
is the model's input, the last boundary its output. The tensors of a boundary are everything
computed before it that is still needed behind it, so any range of blocks is a self-contained
partition: it reads boundary `first` and writes boundary `last`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from catenary_services.domain.decoder import DecoderRuntime
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.tensors import TensorSpec
from catenary_services.json_fields import Count, Positive

SHORTEST_TEXT_TOKENS = 8
"""A text counts as at least so many tokens in a batch, which bounds the rows of a batch."""

RECOGNISED = "auto"
"""The name of a parser that is recognised from the chat template."""

ENGINE_OF = {"vllm": DecoderRuntime.VLLM, "llama_server": DecoderRuntime.LLAMA_SERVER}
"""The platforms of models that one engine alone serves."""
LANGUAGE_PLATFORMS = frozenset({"decoder", *ENGINE_OF})
"""The platforms of models that generate text."""
_SAFETENSORS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Boundary:
    """The tensors that cross the cut between two blocks, in wire order."""

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1)]
    """Dimension 0 is the batch (`ANY`) if the model is batched."""
    row_bytes: int
    """Bytes of one row in the tensors' own datatypes (float32 counted as 4 bytes)."""

    def wire_row_bytes(self, *, float16: bool) -> int:
        """Returns the bytes of one row on the wire; FP32 tensors travel as FP16 if `float16`."""
        if not float16:
            return self.row_bytes
        # Free dimensions count as 1 here, because only the share of FP32 is taken from the shapes.
        sizes = [
            (tensor.nbytes([max(1, size) for size in tensor.shape[1:]]), tensor.datatype)
            for tensor in self.tensors
        ]
        total = sum(size for size, _ in sizes)
        float32 = sum(size for size, datatype in sizes if datatype == "FP32")
        return self.row_bytes - self.row_bytes * float32 // (2 * total) if total else 0


Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The cost of one kernel launch for one row of the batch.

    A kernel is an operation with the element-wise operations that runtimes fuse behind it.
    """

    flops: Amount
    elements: Amount
    """Number of values read and written, without the weights."""
    weight_elements: Amount
    """Number of weights, which are read once, whatever the batch."""
    dense: bool
    """True for convolutions over many channels and matrix products, which tensor cores compute."""


BlockCosts = tuple[tuple[KernelCost, ...], ...]
"""The kernels of each block."""


@dataclass(frozen=True, slots=True)
class TokenUnits:
    """The units in which batches of texts are counted, instead of rows.

    Texts of a batch are filled up to the longest of them. A batch of n units has room for n times
    `tokens` tokens, the filling included.
    """

    tokens: Positive
    """The tokens that one unit has room for."""
    text_tokens: Positive
    """The most tokens of a text."""

    @property
    def per_text(self) -> int:
        """The units of a text of full length: no batch may be smaller than the largest text."""
        return -(-self.text_tokens // self.tokens)

    @property
    def shortest(self) -> int:
        """The fewest tokens a text counts as."""
        return min(SHORTEST_TEXT_TOKENS, self.text_tokens)

    def counted(self, tokens: int) -> int:
        """Returns the tokens that a text of a length counts as."""
        return max(self.shortest, min(tokens, self.text_tokens))

    def of(self, rows: int, tokens: int) -> int:
        """Returns the units of a batch of rows, the longest of which counts as `tokens`."""
        return -(-rows * tokens // self.tokens)

    def most_rows(self, units: int) -> int:
        """Returns how many texts a batch has at most: one of shortest texts."""
        return units * self.tokens // self.shortest

    def extremes(self, units: int) -> tuple[tuple[int, int], ...]:
        """Returns batches of a size, as rows and tokens, of which one is the slowest there is.

        What a batch costs is convex in the length of its rows, as attention is quadratic in it, and
        grows with their number. So it costs most if its rows are as long or as short as they can
        be.
        """
        room = units * self.tokens
        full, few = room // self.text_tokens, -(-room // self.text_tokens)
        batches = [
            (full, self.text_tokens),
            (few, room // few),
            (room // self.shortest, self.shortest),
        ]
        return tuple(dict.fromkeys((n, long) for n, long in batches if n and long >= self.shortest))


@dataclass(frozen=True, slots=True)
class BlockTable:
    """A model cut into blocks; `catenary_agent.partitioning` makes it once, beside the model."""

    model_hash: str
    """SHA-256 of the model file. A table of a file with another hash is refused."""
    batched: bool
    """True if dimension 0 of every boundary tensor is the batch."""
    boundaries: tuple[Boundary, ...]
    """`blocks + 1` entries."""
    compute_ns: tuple[Count, ...]
    """Measured single-row time of each block on the device that made the table."""
    kernels: BlockCosts = ()
    """The kernels of each block, from which times on other devices are estimated; empty if nobody
    counted them, as in tables of earlier releases."""
    units: TokenUnits | None = None
    """The units of batches, if the model is given texts: all costs here are those of a text of full
    length. None: rows, as in tables of earlier releases."""

    @property
    def blocks(self) -> int:
        return len(self.boundaries) - 1

    @property
    def row_units(self) -> int:
        """The units of one row, of a text one of full length; 1 where batches are rows."""
        return 1 if self.units is None else self.units.per_text


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """`model.yaml` of the model repository: how a model wants to be served."""

    key: ModelKey
    platform: str
    """"onnxruntime_onnx" or "pytorch_exported"; of models that generate text "decoder", or the
    engine that alone serves it: "vllm" or "llama_server"."""
    file: str
    """Name of the model's file in the folder of `model.yaml`."""
    slo_ns: Nanoseconds
    max_batch: int
    float16_boundaries: bool
    precision: str = "fp32"
    """Precision of a decoder's weights on CPU agents: "fp32", "int8" or "int4"."""
    session_tokens: int = 2048
    """The most tokens of one session of a decoder, prompt and answer together."""
    objectives: TokenObjectives | None = None
    """Objectives of a decoder's sessions that name none themselves."""
    cache_oversubscription: float | None = None
    """Concurrent sessions of a decoder per session of full length that fits into memory; None for
    the scheduler's setting."""
    packing: PackingGoal | None = None
    """The goal for which a decoder's sessions are moved between chains; None for the cluster's
    setting."""
    dimensions: tuple[tuple[str, int], ...] = ()
    """Sizes of dimensions that the model's file leaves free, by their names or "input[axis]"."""
    text_tokens: int = 0
    """The most tokens of a text, for models of which a gateway makes tokens of texts; 0 for others,
    which are given tensors as they are."""
    target: str = "both"
    """The targets a decoder was imported for: "cpu", "gpu" or "both". With "gpu" it has no graph,
    and only PyTorch runs it."""
    tool_parser: str = RECOGNISED
    """The form in which a decoder writes calls of tools: "hermes", "llama3_json", "mistral",
    "json", "none" or `RECOGNISED`."""
    reasoning_parser: str = RECOGNISED
    """The form in which a decoder writes its reasoning: "qwen3", "deepseek_r1", "none" or
    `RECOGNISED`."""
    engine_file: str = ""
    """Name of the file that llama-server reads, if it lies beside `file`."""
    engine_arguments: tuple[str, ...] = ()
    """Arguments of an engine besides those that the agent gives it."""
    min_version: str = ""
    """The oldest version of the engine that serves the model; empty for any."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Names of LoRA adapters, and their folders in the folder of `model.yaml`; only of models that
    vLLM alone serves."""

    @property
    def generates_text(self) -> bool:
        return self.platform in LANGUAGE_PLATFORMS

    @property
    def engines(self) -> frozenset[DecoderRuntime]:
        """The engines that can read the files of a model that generates text."""
        if self.platform in ENGINE_OF:
            return frozenset({ENGINE_OF[self.platform]})
        found = set()
        if self.generates_text and self.file.endswith(_SAFETENSORS):
            found.add(DecoderRuntime.VLLM)
        if self.generates_text and self.engine_file:
            found.add(DecoderRuntime.LLAMA_SERVER)
        return frozenset(found)

    @property
    def has_blocks(self) -> bool:
        """True unless only an engine serves it."""
        return self.platform not in ENGINE_OF
