"""Temperature, top-k and top-p on the logits of one row, and drawing from what they leave.

None of it sorts the vocabulary: candidates are cut out by bounds that cannot lose one, and only
those are sorted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.domain.sampling import SamplingParameters

Logits = NDArray[np.float32]

_GROUP = 64
_FULL_SORT_SHARE = 4
_BANDS = (9.0, 20.0, 104.0)
"""Distances from the largest scaled logit in which the nucleus is looked for. e^-104 is 0 in
float32, so the last one has all tokens."""
_NARROW_BANDS = (1.0, 2.0, 3.0, 4.5, 6.0, 7.5)


def filtered(logits: Logits, parameters: SamplingParameters) -> tuple[NDArray[np.int64], Logits]:
    """Returns the tokens that temperature, top-k and top-p leave, and how likely they are.

    Args:
        logits: float32 `[vocabulary]`.
        parameters: With a temperature above 0.

    Returns:
        Token ids, most likely first (equal ones by id) where there is a filter and by id where
        there is none; and their weights, float32, which are probabilities up to one factor.
    """
    if 0 < parameters.top_k < len(logits):
        ids = _top_k(logits, parameters.top_k)
        weights = _weights(logits[ids], parameters.temperature)
        if parameters.top_p < 1:
            kept = _nucleus(weights, parameters.top_p, float(weights.sum(dtype=np.float64)))
            ids, weights = ids[:kept], weights[:kept]
        return ids, weights
    weights = _weights(logits, parameters.temperature)
    if parameters.top_p >= 1:
        return np.arange(len(logits)), weights
    return _top_p(weights, parameters.top_p)


def draw(logits: Logits, parameters: SamplingParameters, uniform: float) -> int:
    """Returns the token at which the filtered probabilities, added up, pass `uniform` in [0, 1)."""
    ids, weights = filtered(logits, parameters)
    if len(weights) <= _GROUP * _GROUP:
        return int(ids[_inverse(weights, uniform)])
    # A whole vocabulary: find the group first, then the token in it.
    whole = len(weights) // _GROUP * _GROUP
    groups = weights[:whole].reshape(-1, _GROUP).sum(axis=1, dtype=np.float64)
    cumulated = np.cumsum(np.append(groups, weights[whole:].sum(dtype=np.float64)))
    target = uniform * cumulated[-1]
    group = min(int(np.searchsorted(cumulated, target, "right")), len(cumulated) - 1)
    if group and cumulated[group] == cumulated[group - 1]:  # the last group is empty
        group = int(np.searchsorted(cumulated, cumulated[-1], "left"))
    before = cumulated[group - 1] if group else 0.0
    first = group * _GROUP
    part = weights[first : first + _GROUP]
    share = (target - before) / (cumulated[group] - before)
    return int(ids[first + _inverse(part, share)])


def _inverse(weights: Logits, uniform: float) -> int:
    """Returns the index at which the cumulated weights pass a share of their total."""
    cumulated = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulated, uniform * cumulated[-1], "right"))
    if index < len(cumulated):
        return index
    return int(np.searchsorted(cumulated, cumulated[-1], "left"))  # the last with any weight


def _weights(logits: Logits, temperature: float) -> Logits:
    scaled = logits - logits.max()
    scaled *= np.float32(1 / temperature)
    weights: Logits = np.exp(scaled, out=scaled)
    return weights


def _top_k(logits: Logits, count: int) -> NDArray[np.int64]:
    """Returns the ids of the `count` largest logits, largest first; ties with the last stay."""
    groups = len(logits) // _GROUP
    if count * _FULL_SORT_SHARE > groups:
        bound = np.partition(logits, -count)[-count]
        ids = np.flatnonzero(logits >= bound)
    else:
        # The count-th largest of the groups' maxima is no more than the count-th largest of all.
        maxima = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        ids = np.flatnonzero(logits >= np.partition(maxima, -count)[-count])
        values = logits[ids]
        ids = ids[values >= np.partition(values, -count)[-count]]
    return ids[np.argsort(-logits[ids], kind="stable")]


def _top_p(weights: Logits, share: float) -> tuple[NDArray[np.int64], Logits]:
    """Returns ids and weights of the nucleus; the largest weight is 1."""
    total = float(weights.sum(dtype=np.float64))
    ids, likely = np.arange(0), weights[:0]
    for exponent in _BANDS:
        # Everything likelier than the bound: if it has the share, the nucleus lies in it.
        ids = np.flatnonzero(weights >= np.float32(np.exp(-exponent)))
        likely = weights[ids]
        if likely.sum(dtype=np.float64) >= share * total:
            break
    for exponent in _NARROW_BANDS:  # the same again among few, so that fewer still are sorted
        near = np.flatnonzero(likely >= np.float32(np.exp(-exponent)))
        if likely[near].sum(dtype=np.float64) >= share * total:
            ids, likely = ids[near], likely[near]
            break
    order = np.argsort(-likely, kind="stable")
    kept = _nucleus(likely[order], share, total)
    return ids[order[:kept]], likely[order[:kept]]


def _nucleus(weights: Logits, share: float, total: float) -> int:
    """Returns how many of the descending weights have less than the share in front of them."""
    cumulated = np.cumsum(weights, dtype=np.float64)
    in_front = np.concatenate(([0.0], cumulated[:-1]))
    return max(1, int(np.searchsorted(in_front, share * total, "left")))
