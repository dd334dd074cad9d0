"""Quantised weights of PyTorch agents: what is quantised, how large it is, and what files have it.

The model's `precision` says what the matrices of its layers are held in; embedding, norms and
projection to the vocabulary stay as they are computed in.

* int8: a matrix row is whole numbers of -127 to 127 times one scale.
* int4: every 32 weights of a row are one of 16 steps, times a scale, plus an offset.

Files that are quantised already hold the same, in groups of 32, 64 or 128: GPTQ and AWQ in their
published layouts, and what an import makes of a GGUF file. Codes and groups are kept as they are;
scales and offsets are rounded to what the device computes in, as all weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from catenary_services.errors import NotSupported

GROUP = 32
"""Weights that share scale and offset, where we quantise."""
_GROUPS = (32, 64, 128)
CODES = "qweight"
"""How the names of quantised matrices end in files, in place of `weight`."""
QUANTISED_PARTS = (".qweight", ".qzeros", ".scales", ".offsets", ".g_idx")
_CODES_PER_WORD = 8


class Layout(StrEnum):
    """How a file stores codes of four bits."""

    GPTQ = "gptq"
    """Eight inputs to a word of 32 bits: [inputs / 8, outputs]; zero points one too small."""
    GPTQ_V2 = "gptq_v2"
    """The same with zero points as they are."""
    AWQ = "awq"
    """Eight outputs to a word, in an order of its own: [inputs, outputs / 8]."""
    PLAIN = "catenary"
    """Two inputs to a byte, the first one above: [outputs, inputs / 2]."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How the files of a model are quantised."""

    layout: Layout
    group: int

    def shape(self, codes: tuple[int, ...]) -> tuple[int, int]:
        """Returns outputs and inputs of a matrix whose codes have a shape."""
        first, second = codes
        if self.layout is Layout.PLAIN:
            return first, 2 * second
        if self.layout is Layout.AWQ:
            return _CODES_PER_WORD * second, first
        return second, _CODES_PER_WORD * first

    def parts(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Returns what files have of a matrix besides an index of groups: ending -> shape."""
        groups = inputs // self.group
        words = outputs // _CODES_PER_WORD
        if self.layout is Layout.PLAIN:
            each = (groups, outputs)
            return {CODES: (outputs, inputs // 2), "scales": each, "offsets": each}
        codes = (inputs, words) if self.layout is Layout.AWQ else (inputs // 8, outputs)
        return {CODES: codes, "qzeros": (groups, words), "scales": (groups, outputs)}


def stored_as(config: Mapping[str, Any]) -> Stored | None:
    """Returns how a model's files are quantised, None if they are not.

    Raises:
        NotSupported: If they are in a way that no agent computes with.
    """
    said = config.get("quantization_config")
    if not said:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method not in {"gptq", "awq", Layout.PLAIN}:
        raise NotSupported(f"it is quantised by {method!r}, which no agent reads")
    bits, group = (
        said.get("bits", said.get("w_bit")),
        said.get("group_size", said.get("q_group_size")),
    )
    if bits != 4:
        raise NotSupported(f"it is quantised to {bits} bits in groups; agents compute with 4")
    if group not in _GROUPS:
        known = ", ".join(map(str, _GROUPS))
        raise NotSupported(f"it is quantised in groups of {group}; agents know {known}")
    if said.get("lm_head"):
        raise NotSupported("its projection to the vocabulary is quantised, which agents keep plain")
    if method == "gptq":
        if said.get("desc_act"):
            raise NotSupported("its groups are in the order of activations (desc_act)")
        if said.get("dynamic"):
            raise NotSupported("its layers are quantised in different ways (dynamic)")
        version = said.get("checkpoint_format") or "gptq"
        if version not in {Layout.GPTQ, Layout.GPTQ_V2}:
            raise NotSupported(f"its weights are laid out as {version!r}, which no agent reads")
        return Stored(Layout(version), group)
    if method == "awq":
        version = str(said.get("version", "gemm")).lower()
        if version != "gemm":
            raise NotSupported(f"its weights are laid out as {version!r}, which no agent reads")
        if not said.get("zero_point", True):
            raise NotSupported("its weights have no zero points, which AWQ's layout wants")
    return Stored(Layout(method), group)


def why_not_precision(stored: Stored | None, precision: str, target: str = "gpu") -> str | None:
    """Returns why a model's files cannot be held in a precision, or run by a target; else None."""
    if stored is None:
        return None
    if precision != "int4":
        return f"is quantised to 4 bits, not {precision}: import it with --precision int4"
    if target != "gpu":
        return "is quantised for GPUs: import it with --target gpu"
    return None


def is_quantised(precision: str, outputs: int, inputs: int) -> bool:
    """Returns True if we quantise a matrix; what does not come out even stays as it is."""
    return precision == "int8" or (precision == "int4" and outputs > 0 and inputs % GROUP == 0)


def matrix_bytes(
    precision: str, shape: tuple[int, int], item_bytes: int, group: int = GROUP
) -> int:
    """Returns what a matrix of a layer takes in memory.

    Args:
        precision: "fp32", "int8" or "int4".
        shape: Outputs, inputs.
        item_bytes: Of a number as it is computed in.
        group: Of int4.
    """
    outputs, inputs = shape
    if not is_quantised(precision, outputs, inputs):
        return outputs * inputs * item_bytes
    if precision == "int8":
        return outputs * inputs + outputs * item_bytes
    return outputs * inputs // 2 + outputs * (inputs // group) * 2 * item_bytes


def unpacking_bytes(precision: str, shape: tuple[int, int], item_bytes: int) -> int:
    """Returns what a step takes for a while to turn a matrix into numbers; see `matrix_bytes`."""
    outputs, inputs = shape
    if not is_quantised(precision, outputs, inputs):
        return 0
    # Of int4 both halves, put together, beside the numbers.
    return outputs * inputs * (item_bytes if precision == "int8" else item_bytes + 2)
