"""A kernel for all that happens between the product of a layer's input and attention.

Queries, keys and values are scaled, and biases added; the heads of queries and keys are normalised
where a model does that, and rotated; all are rounded, and keys and values are stored in the pool.
In PyTorch this is 21 kernels, and more with norms or biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from catenary_agent.decoders.torch.torch_wide import narrowed
from catenary_agent.decoders.triton_kernels.launching import KernelLauncher

_HEADS = 8
"""The most heads that a program computes."""
LARGEST_CACHED = float(torch.finfo(torch.float16).max)


@triton.jit
def _head_norm(
    left, right, weight, of_others, first, inside, HALF: tl.constexpr, EPS: tl.constexpr
):
    """Returns both halves of heads divided by their root mean square, times one of two weights."""
    mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF)
    root = tl.rsqrt(mean + EPS)[:, None]
    at = tl.arange(0, left.shape[1])
    one = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    other = tl.load(of_others + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    left = tl.where(first[:, None], one, other) * (left * root)
    one = tl.load(weight + HALF + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    other = tl.load(of_others + HALF + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return left, tl.where(first[:, None], one, other) * (right * root)


@triton.jit
def _bounded(numbers, LARGEST: tl.constexpr):
    # Numbers that are none stay so, and are reported where logits are.
    numbers = tl.where(numbers > LARGEST, LARGEST, numbers)
    return tl.where(numbers < -LARGEST, -LARGEST, numbers)


@triton.jit(do_not_specialize=["first_write", "write_step"])
def _rotation_kernel(
    product,
    entered,
    bias,
    query_norm,
    key_norm,
    cosine,
    sine,
    writes,
    query,
    keys,
    values,
    first_write,
    write_step,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    EPSILON: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    seen = (head < QUERIES + 2 * KEYS)[:, None] & inside[None, :]
    place = head[:, None] * (2 * HALF) + at[None, :]
    product += row * ((QUERIES + 2 * KEYS) * 2 * HALF)
    factor = tl.load(entered + row)
    left = tl.load(product + place, mask=seen, other=0.0) * factor
    right = tl.load(product + HALF + place, mask=seen, other=0.0) * factor
    if BIASED:
        left += tl.load(bias + place, mask=seen, other=0.0).to(tl.float32)
        right += tl.load(bias + HALF + place, mask=seen, other=0.0).to(tl.float32)
    of_query = head < QUERIES
    of_key = (head >= QUERIES) & (head < QUERIES + KEYS)
    of_value = head >= QUERIES + KEYS
    turned_left, turned_right = left, right
    if NORMED:
        turned_left, turned_right = _head_norm(
            left, right, query_norm, key_norm, of_query, inside, HALF, EPSILON
        )
    angle = row * (2 * HALF) + at
    first_cosine = tl.load(cosine + angle, mask=inside, other=0.0)[None, :]
    second_cosine = tl.load(cosine + HALF + angle, mask=inside, other=0.0)[None, :]
    first_sine = tl.load(sine + angle, mask=inside, other=0.0)[None, :]
    second_sine = tl.load(sine + HALF + angle, mask=inside, other=0.0)[None, :]
    new_left = turned_left * first_cosine - turned_right * first_sine
    new_right = turned_right * second_cosine + turned_left * second_sine
    left = _bounded(tl.where(of_value[:, None], left, new_left), LARGEST).to(tl.float16)
    right = _bounded(tl.where(of_value[:, None], right, new_right), LARGEST).to(tl.float16)
    wanted = seen & of_query[:, None]
    query += row * (QUERIES * 2 * HALF)
    tl.store(query + place, left, mask=wanted)
    tl.store(query + HALF + place, right, mask=wanted)
    slot = tl.load(writes + first_write + row * write_step) * (KEYS * 2 * HALF)
    wanted = seen & of_key[:, None]
    keys += slot - QUERIES * 2 * HALF
    tl.store(keys + place, left, mask=wanted)
    tl.store(keys + HALF + place, right, mask=wanted)
    wanted = seen & of_value[:, None]
    values += slot - (QUERIES + KEYS) * 2 * HALF
    tl.store(values + place, left, mask=wanted)
    tl.store(values + HALF + place, right, mask=wanted)


@dataclass(frozen=True)
class RotationKernel:
    """All that happens to the heads of a layer between product and attention."""

    queries: int
    keys: int
    size: int
    bias: torch.Tensor | None = None
    """The biases of queries, keys and values, one behind the other; None without."""
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    """The weights of the norms of queries and keys; None without."""
    epsilon: float = 0.0

    @cached_property
    def _launch(self) -> KernelLauncher:
        half = self.size // 2
        constants = {
            "QUERIES": self.queries,
            "KEYS": self.keys,
            "HALF": half,
            "HEADS": min(_HEADS, triton.next_power_of_2(self.queries + 2 * self.keys)),
            "BLOCK": triton.next_power_of_2(half),
            "LARGEST": LARGEST_CACHED,
            "BIASED": self.bias is not None,
            "NORMED": self.norms is not None,
            "EPSILON": self.epsilon,
        }
        return KernelLauncher(_rotation_kernel, constants, 4)

    def __call__(
        self,
        product: torch.Tensor,
        entered: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        writes: tuple[torch.Tensor, int],
        caches: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Stores keys and values; returns queries, float16 [n, heads, size].

        Args:
            product: float32 [n, (queries + 2 keys) * size].
            entered: The scale of the rows that entered the matrix, float32 [n, 1].
            angles: Cosine and sine of each row, float32 [1, n, size].
            writes: The pool rows to store at, int64 [layers, n or more], and the layer.
            caches: Keys and values of the pool, float16 [rows, keys, size].
        """
        count = product.shape[0]
        query = product.new_empty((count, self.queries, self.size), dtype=torch.float16)
        bias = product if self.bias is None else self.bias
        norms = (product, product) if self.norms is None else self.norms
        programs = -(-(self.queries + 2 * self.keys) // _HEADS)
        places, layer = writes
        tensors = (product, entered, bias, *norms, *angles, places, query, *caches)
        self._launch((count, programs), tensors, layer * places.stride(0), places.stride(1))
        return query

    def plainly(
        self,
        product: torch.Tensor,
        entered: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        writes: tuple[torch.Tensor, int],
        caches: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Does the same as a call, by PyTorch alone."""
        made = product * entered
        if self.bias is not None:
            made += self.bias
        heads = made.view(len(made), -1, self.size)
        query, key, value = heads.split((self.queries, self.keys, self.keys), 1)
        if self.norms is not None:
            query, key = (
                weight * (each * torch.rsqrt(each.pow(2).mean(-1, keepdim=True) + self.epsilon))
                for weight, each in zip(self.norms, (query, key), strict=True)
            )
        cosine, sine = (each[0, :, None] for each in angles)
        query, key = (each * cosine + _half_turned(each) * sine for each in (query, key))
        places, layer = writes
        for cache, each in zip(caches, (key, value), strict=True):
            cache[places[layer, : len(made)]] = narrowed(each, torch.float16)
        return narrowed(query, torch.float16)


def _half_turned(heads: torch.Tensor) -> torch.Tensor:
    left, right = heads.chunk(2, -1)
    return torch.cat((-right, left), -1)
