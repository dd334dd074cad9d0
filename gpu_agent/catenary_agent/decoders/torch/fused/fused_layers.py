"""Layers of Llama's form in ten kernels where modules of `transformers` take 63.

On a CUDA device a decode step waits for launches and for small kernels, not for arithmetic. Of a
layer remain four products, attention, and five kernels between these: the norms with the sum before
and the rounding behind (`norms`), the rotation of heads with all until keys are stored
(`rotations`), the gate (`gates`), and the last sum. What is rounded is what `torch_wide` rounds, so
"ADR 0025" holds; the design is "ADR 0051".

A layer is replaced only if it is of a class that is known to be of this form, if every part of it
is what is expected, and if it computes on this device what its modules compute. Every other layer
stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from catenary_agent.decoders.torch.fused.layer_forms import (
    MOST_NORMED,
    is_class,
    why_not_fused,
)
from catenary_agent.decoders.torch.torch_attention import (
    AttentionKernel,
    AttentionMetadata,
    LayerCall,
    StepTensors,
    attend_stored,
)
from catenary_agent.decoders.torch.torch_cache import CachePool, TokenCacheShape
from catenary_agent.decoders.torch.torch_weights import DecoderBlocks, ScaledModule
from catenary_agent.decoders.torch.torch_wide import (
    MatrixOperand,
    OperandCache,
    WideLinear,
    joined,
    rounded,
    unscaled,
)
from catenary_services.errors import InternalError
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.decoders")
_TOLERANCE = 0.02
"""The largest difference accepted, relative to what a layer adds. A rounding to 11 bits that falls
the other way is 0.0005."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """The weight and the epsilon of an RMS norm."""

    weight: torch.Tensor
    epsilon: float


class FusedLayer(torch.nn.Module):
    """A layer that computes what the modules of another one do, with fewer kernels.

    It has no weights of its own: those of queries, keys and values are made one matrix, of which
    the modules have views, and so are gate and other half.
    """

    def __init__(self, plain: Any, window: int | None) -> None:
        """Fuses the matrices of a layer for which `why_not_fused` has no reason."""
        from catenary_agent.decoders.torch.fused import gates, norms, rotations

        super().__init__()
        self.plain = plain
        attention, mlp = plain.self_attn, plain.mlp
        size = attention.head_dim
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        queries, keys = (each.weight.shape[0] // size for each in parts[:2])
        has_bias = attention.q_proj.bias is not None
        normed = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self._rotated = rotations.RotationKernel(
            queries,
            keys,
            size,
            _joined(parts, "bias") if has_bias else None,
            None if normed is None else (normed[0].weight, normed[1].weight),
            0.0 if normed is None else normed[0].variance_epsilon,
        )
        self._normed, self._sum_normed, self._gated = norms.normed, norms.sum_normed, gates.gated
        self._how = float(attention.scaling), window, None, None
        self._before, self._behind = (
            _Norm(each.weight, each.variance_epsilon)
            for each in (plain.input_layernorm, plain.post_attention_layernorm)
        )
        self._entering = _joined(parts, "weight")
        self._halves = _joined([mlp.gate_proj, mlp.up_proj], "weight")
        self._leaving, self._down = attention.o_proj.weight.data, mlp.down_proj.weight.data

    def forward(
        self,
        hidden: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        catenary: LayerCall,
        **_: Any,
    ) -> torch.Tensor:
        """Returns float32 [1, rows, hidden size] of the same."""
        rows = hidden[0].contiguous()
        added = self._attention(rows, position_embeddings, catenary)
        total, operand = self._sum_normed(rows, added, self._behind.weight, self._behind.epsilon)
        del added  # the products that follow need the memory
        assert operand.scale is not None
        operand = self._gated(unscaled(operand, self._halves), operand.scale)
        assert operand.scale is not None
        return total.addcmul_(unscaled(operand, self._down), operand.scale)[None]

    def _attention(
        self, rows: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], call: LayerCall
    ) -> torch.Tensor:
        """Returns what attention adds to rows float32 [n, hidden size]."""
        operand = self._normed(rows, self._before.weight, self._before.epsilon)
        assert operand.scale is not None
        step, pool = call.step, call.step.pool
        query = self._rotated(
            unscaled(operand, self._entering),
            operand.scale,
            angles,
            (step.writes, call.layer),
            (pool.keys, pool.values),
        )
        seen = attend_stored(call, query.transpose(0, 1)[None], self._how)
        return unscaled(rounded(seen.reshape(len(rows), -1), query.dtype), self._leaving)


class FusedNorm(torch.nn.Module):
    """The last RMS norm, whose result only the projection to logits reads."""

    def __init__(self, plain: Any, entering: OperandCache) -> None:
        from catenary_agent.decoders.torch.fused import norms

        super().__init__()
        self.plain = plain
        self._entering = entering
        self._normed = norms.normed

    def operand(self, hidden: torch.Tensor) -> MatrixOperand:
        """Returns the normalised rows."""
        epsilon = self.plain.variance_epsilon
        return self._normed(hidden.contiguous(), self.plain.weight, epsilon)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float16 rows, whose scales are where the projection looks for them."""
        return self._entering.put(self.operand(hidden))


def fuse(blocks: DecoderBlocks, shape: TokenCacheShape, kernel: AttentionKernel) -> None:
    """Replaces layers and the last norm where that is possible.

    Args:
        blocks: The modules, which are changed.
        shape: The shape and format of the caches.
        kernel: The way to compute attention.
    """
    try:
        others = {_why_not_here(blocks, shape, layer) for layer in blocks.layers} - {None}
        if others:
            _log.info("layers_not_fused", reason=min(filter(None, others)))
        for index, layer in enumerate(blocks.layers):
            if _why_not_here(blocks, shape, layer) is not None:
                continue
            fused = FusedLayer(layer, blocks.description.windows[layer.self_attn.layer_idx])
            if shape.device.type == "cuda":
                # Frees the single matrices, which the next layer's joined ones would not fit into.
                torch.cuda.empty_cache()
            check_fused(blocks, (layer, fused), shape, kernel)
            blocks.layers[index] = fused
        _fuse_norm(blocks, shape.device)
    except Exception as error:  # a compiler's, a driver's, or a want of memory
        reason = (str(error).splitlines() or [""])[0][:200]
        _log.warning("fused_layers_unavailable", reason=f"{type(error).__name__}: {reason}")


def _why_not_here(blocks: DecoderBlocks, shape: TokenCacheShape, layer: Any) -> str | None:
    described = blocks.description
    if shape.dtype is not torch.float16:
        return f"caches are of {shape.dtype}"
    if not described.has_plain_scores:
        return "scores of this model are capped, or its heads have sinks"
    if blocks.rotary_kinds:
        return "its layers have several rotary embeddings"
    return why_not_fused(layer, described.rotated_size)


def _fuse_norm(blocks: DecoderBlocks, device: torch.device) -> None:
    """Replaces the last norm if only a matrix of float16 reads it."""
    head = blocks.head.inner if isinstance(blocks.head, ScaledModule) else blocks.head
    family = type(blocks.norm).__name__.removesuffix("RMSNorm")
    if type(head) is not WideLinear or head.weight.dtype is not torch.float16:
        return
    if not is_class(blocks.norm, family, "RMSNorm") or head.weight.shape[1] > MOST_NORMED:
        return
    fused = FusedNorm(blocks.norm, blocks.entering)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn((3, head.weight.shape[1]), generator=random).to(device)
    with torch.inference_mode():
        made = fused.operand(hidden)
        _check_near(joined(made, made.rows), fused.plain(hidden))
    blocks.norm = fused


def _check_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-20))
    if not error < _TOLERANCE:
        raise InternalError(f"a fused layer or norm is off by {error:.3g}")


def check_fused(
    blocks: DecoderBlocks, layers: tuple[Any, Any], shape: TokenCacheShape, kernel: AttentionKernel
) -> None:
    """Raises InternalError unless a layer and what is to replace it compute the same."""
    plain, fused = layers
    size = plain.input_layernorm.weight.shape[0]
    random = torch.Generator().manual_seed(plain.self_attn.layer_idx)
    hidden = torch.randn((1, 6, size), generator=random).to(shape.device)
    first, second, third = CachePool(48, 16, 1, shape).opened([16] * 3)
    plan = AttentionMetadata([third, first, second], (1, 3, 2), (7, 0, 4))
    results, pools = [], []
    with torch.inference_mode():
        positions = torch.from_numpy(plan.positions).to(shape.device)
        angles = blocks.rotary(hidden, positions[None])
        for layer in (plain, fused):
            pool = CachePool(48, 16, 1, shape)
            pool.keys.fill_(0.125)
            pool.values.fill_(0.125)
            call = LayerCall(StepTensors.of(plan, pool, kernel), 0, 3)
            made = layer(hidden, attention_mask=None, position_embeddings=angles, catenary=call)
            results.append(made - hidden)
            pools.append(torch.cat((pool.keys, pool.values)).float())
        blocks.entering.forget()
        for expected, found in (results, pools):
            _check_near(found, expected)


def _joined(linears: list[Any], name: str) -> torch.Tensor:
    """Returns weights or biases of matrices in one tensor, of which they become views."""
    whole = torch.cat([getattr(each, name) for each in linears])
    parts = whole.split([len(getattr(each, name)) for each in linears])
    for each, part in zip(linears, parts, strict=True):
        setattr(each, name, torch.nn.Parameter(part, requires_grad=False))
    return whole
