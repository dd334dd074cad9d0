"""Gumbel noise as a function of seed, position and token id, the same in NumPy and PyTorch.

The token at which logit / temperature + noise is largest is drawn with the probabilities of
softmax(logits / temperature): the Gumbel-max trick (Gumbel 1954; Maddison, Tarlow, Minka, "A*
sampling", NeurIPS 2014). Noise belongs to a token, so logits that differ slightly, as they do when
a session is computed again elsewhere, mostly lead to the same token.

Random numbers are functions of a counter, without a state (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011). Their Philox is not used: PyTorch has no unsigned products, and ten
rounds of emulated ones cost more than the rest of sampling. SplitMix64 (Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014) is a function of a counter as well. It
takes two products of 64 bits, whose overflow all libraries discard alike. One result serves two
tokens with 31 bits each.

Every function takes `xp`, the module whose arrays it is given: `numpy` or `torch`. Their logarithms
differ in the last bit, so they only determine the few tokens that may win (`rough_noise`). These
are compared in float64 sums and products, which are exact or rounded alike (`exact_noise`).
"""

from __future__ import annotations

from typing import Any

_ALL = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BITS = 31
_LN2 = 0.6931471805599453
_ROOT_OF_HALF = 0.7071067811865476
_SERIES = 12
"""Number of terms of the logarithm's series; the next one is below 2^-60 of the first."""


def stream_of(seed: int, position: int) -> int:
    """Returns the signed 64-bit number from which the noise of one position derives."""
    return stream_at(mixed_seed(seed), position)


def mixed_seed(seed: int) -> int:
    """Returns the part of `stream_of` that a session's positions share."""
    return _mixed((seed + _STEP) & _ALL)


def stream_at(mixed: int, position: int) -> int:
    """Returns what `stream_of` does, from the result of `mixed_seed`."""
    return _signed(_mixed((mixed + position * _STEP) & _ALL))


def counters(xp: Any, vocabulary: int) -> Any:
    """Returns the offset of each pair of tokens in `random_bits`: int64 [(vocabulary + 1) // 2]."""
    return xp.arange(1, (vocabulary + 1) // 2 + 1, dtype=xp.int64) * _signed(_STEP)


def random_bits(xp: Any, streams: Any, counted: Any) -> Any:
    """Returns 31 random bits for every row and token: int32 [rows, vocabulary rounded up to even].

    Args:
        xp: `numpy` or `torch`.
        streams: int64 [rows], results of `stream_of`.
        counted: The result of `counters`, on the same device.
    """
    mixed = counted[None] + streams[:, None]
    _mix(mixed)
    # Both halves of each number; the lower one comes first on every platform with wheels.
    bits = mixed.view(xp.int32)
    bits &= (1 << _BITS) - 1
    return bits


def random_bits_of(streams: Any, tokens: Any) -> Any:
    """Returns the columns `tokens` of the result of `random_bits`: int64 [rows, n].

    Args:
        streams: int64 [rows], results of `stream_of`.
        tokens: int64 [rows, n], token ids.
    """
    mixed = ((tokens >> 1) + 1) * _signed(_STEP)
    mixed += streams[:, None]
    _mix(mixed)
    return (mixed >> ((tokens & 1) << 5)) & ((1 << _BITS) - 1)


def _mix(numbers: Any) -> None:
    """Applies the finaliser of SplitMix64 to int64 in place; `_mixed` does so for one number."""
    first, second = map(_signed, _FACTORS)
    # Shifts of signed integers extend the sign; the masks remove it.
    for shift, factor in ((30, first), (27, second), (31, 1)):
        shifted = numbers >> shift
        shifted &= _ALL >> shift
        numbers ^= shifted
        if factor != 1:
            numbers *= factor


def rough_noise(xp: Any, bits: Any) -> Any:
    """Returns float32 noise of random bits, accurate to 1e-5 above -2.5, less so below."""
    # u = (bits + 1/2) / 2^31, slightly reduced so that it stays below 1 in float32.
    share = xp.asarray(bits, dtype=xp.float32)
    share += 0.5
    share *= -(1 - 2.0**-24) * 2.0**-_BITS
    xp.log1p(share, out=share)
    share *= -1
    xp.log(share, out=share)
    share *= -1
    return share


def exact_noise(xp: Any, bits: Any) -> Any:
    """Returns -ln(-ln(1 - u)) for u = (bits + 1/2) / 2^31, float64, equal in every library."""
    share = (xp.asarray(bits, dtype=xp.float64) + 0.5) * 2.0**-_BITS
    return -_ln(xp, -_ln(xp, 1.0 - share))


def _ln(xp: Any, values: Any) -> Any:
    """Returns ln of positive float64 values, by operations that IEEE 754 rounds uniquely."""
    mantissa, exponent = xp.frexp(values)
    low = mantissa < _ROOT_OF_HALF
    mantissa = xp.where(low, mantissa * 2.0, mantissa)
    exponent = xp.asarray(exponent, dtype=xp.float64) - xp.asarray(low, dtype=xp.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)  # ln m = 2 artanh of it
    square = ratio * ratio
    total = square * 0.0 + 1.0 / (2 * _SERIES - 1)
    for odd in range(2 * _SERIES - 3, 0, -2):
        total = total * square
        total = total + 1.0 / odd
    return exponent * _LN2 + 2.0 * ratio * total


def _mixed(value: int) -> int:
    value = ((value ^ value >> 30) * _FACTORS[0]) & _ALL
    value = ((value ^ value >> 27) * _FACTORS[1]) & _ALL
    return value ^ value >> 31


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
