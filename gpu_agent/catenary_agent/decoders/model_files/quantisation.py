"""Quantised weights of PyTorch agents: their precision, their size, and their layout in files.

The `precision` of a model is that of the matrices of its layers. Embedding, norms and the
projection to the vocabulary keep the number format that is computed in.

* int8: a matrix row is integers from -127 to 127 times one scale.
* int4: every 32 weights of a row are one of 16 steps, times a scale, plus an offset.

Files that are quantised already contain the same in groups of 32, 64 or 128: GPTQ and AWQ in their
published layouts, and the result of importing a GGUF file. Codes and groups are kept as they are;
scales and offsets are rounded to the number format of the device, like all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from catenary_services.errors import NotSupported

GROUP = 32
"""Number of weights that share a scale and an offset where the agent quantises."""
_GROUPS = (32, 64, 128)
CODES = "qweight"
"""The ending of a quantised matrix's name in files, in place of `weight`."""
QUANTISED_PARTS = (".qweight", ".qzeros", ".scales", ".offsets", ".g_idx")
_CODES_PER_WORD = 8


class QuantisedLayout(StrEnum):
    """The layouts in which files store codes of four bits."""

    GPTQ = "gptq"
    """Eight inputs in each 32-bit word: [inputs / 8, outputs]; stored zero points are one too
    small."""
    GPTQ_V2 = "gptq_v2"
    """The layout of GPTQ with exact zero points."""
    AWQ = "awq"
    """Eight outputs in each 32-bit word, in a special order: [inputs, outputs / 8]."""
    PLAIN = "catenary"
    """Two inputs in each byte, the first in the upper half: [outputs, inputs / 2]."""


@dataclass(frozen=True, slots=True)
class StoredQuantisation:
    """The quantisation of a model's files."""

    layout: QuantisedLayout
    group: int

    def shape(self, codes: tuple[int, ...]) -> tuple[int, int]:
        """Returns outputs and inputs of a matrix, given the shape of its codes."""
        first, second = codes
        if self.layout is QuantisedLayout.PLAIN:
            return first, 2 * second
        if self.layout is QuantisedLayout.AWQ:
            return _CODES_PER_WORD * second, first
        return second, _CODES_PER_WORD * first

    def parts(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each tensor that files have for a matrix, by ending of its name.

        An index of groups, which some files have, is not included.
        """
        groups = inputs // self.group
        words = outputs // _CODES_PER_WORD
        if self.layout is QuantisedLayout.PLAIN:
            each = (groups, outputs)
            return {CODES: (outputs, inputs // 2), "scales": each, "offsets": each}
        codes = (inputs, words) if self.layout is QuantisedLayout.AWQ else (inputs // 8, outputs)
        return {CODES: codes, "qzeros": (groups, words), "scales": (groups, outputs)}


def stored_as(config: Mapping[str, Any]) -> StoredQuantisation | None:
    """Returns the quantisation of a model's files; None if they are not quantised.

    Raises:
        NotSupported: No agent can compute with their quantisation.
    """
    said = config.get("quantization_config")
    if not said:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method not in {"gptq", "awq", QuantisedLayout.PLAIN}:
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
        if version not in {QuantisedLayout.GPTQ, QuantisedLayout.GPTQ_V2}:
            raise NotSupported(f"its weights are laid out as {version!r}, which no agent reads")
        return StoredQuantisation(QuantisedLayout(version), group)
    if method == "awq":
        version = str(said.get("version", "gemm")).lower()
        if version != "gemm":
            raise NotSupported(f"its weights are laid out as {version!r}, which no agent reads")
        if not said.get("zero_point", True):
            raise NotSupported("its weights have no zero points, which AWQ's layout wants")
    return StoredQuantisation(QuantisedLayout(method), group)


def why_not_precision(
    stored: StoredQuantisation | None, precision: str, target: str = "gpu"
) -> str | None:
    """Returns why a model cannot have a precision or run on a target; None if it can."""
    if stored is None:
        return None
    if precision != "int4":
        return f"is quantised to 4 bits, not {precision}: import it with --precision int4"
    if target != "gpu":
        return "is quantised for GPUs: import it with --target gpu"
    return None


def is_quantised(precision: str, outputs: int, inputs: int) -> bool:
    """Returns True if the agent quantises a matrix; others keep the format computed in."""
    return precision == "int8" or (precision == "int4" and outputs > 0 and inputs % GROUP == 0)


def matrix_bytes(
    precision: str, shape: tuple[int, int], item_bytes: int, group: int = GROUP
) -> int:
    """Returns the memory of a layer's matrix in bytes.

    Args:
        precision: "fp32", "int8" or "int4".
        shape: Number of outputs and inputs.
        item_bytes: Size of a number in the format that is computed in.
        group: Number of weights that share a scale in int4.
    """
    outputs, inputs = shape
    if not is_quantised(precision, outputs, inputs):
        return outputs * inputs * item_bytes
    if precision == "int8":
        return outputs * inputs + outputs * item_bytes
    return outputs * inputs // 2 + outputs * (inputs // group) * 2 * item_bytes


def unpacking_bytes(precision: str, shape: tuple[int, int], item_bytes: int) -> int:
    """Returns the bytes a step needs temporarily to dequantise a matrix; see `matrix_bytes`."""
    outputs, inputs = shape
    if not is_quantised(precision, outputs, inputs):
        return 0
    # For int4, the interleaved codes exist beside the numbers. Kernels take no more: the numbers
    # alone, or for few rows the sums of parts of the inputs.
    return outputs * inputs * (item_bytes if precision == "int8" else item_bytes + 2)
