"""Log probabilities of tokens, from logits that stay on their device.

They are those of the model: nothing that changes the choice of a token changes them. Sums are
float64, as the values are compared with those of other programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.sampling.array_backend import ArrayBackend
from catenary_services.domain.logprobs import LOWEST_LOGPROB, TokenLogprobs


def logprobs_of(
    arrays: ArrayBackend, values: Any, tokens: Sequence[int], top: int
) -> list[TokenLogprobs]:
    """Returns the log probabilities of a token of each row, with the `top` likeliest ones.

    Args:
        arrays: The operations of the library the logits come in.
        values: float32 [rows, vocabulary], logits; changed.
        tokens: A token of each row.
        top: How many of the likeliest tokens to name with each.
    """
    xp = arrays.xp
    columns = arrays.put(np.array(tokens, np.int64)[:, None])
    # Before the subtraction, in which small differences are lost.
    ranks = arrays.host(xp.count_nonzero(values > arrays.take(values, columns), 1)) + 1
    values -= xp.amax(values, 1)[:, None]
    whole = xp.log(xp.sum(xp.exp(values), 1, dtype=xp.float64))[:, None]
    own = arrays.take(values, columns)
    columns = arrays.likeliest_columns(values, min(top, values.shape[1]))
    best = arrays.host(xp.asarray(arrays.take(values, columns), dtype=xp.float64) - whole)
    ids = arrays.host(columns)
    # Equal ones in the order of their ids, whatever the order in which a library finds them.
    order = np.lexsort((ids, -best), axis=1)
    ids = np.take_along_axis(ids, order, 1)
    best = _bounded(np.take_along_axis(best, order, 1))
    chosen = _bounded(arrays.host(xp.asarray(own, dtype=xp.float64) - whole)[:, 0])
    return [
        TokenLogprobs(
            token,
            float(chosen[row]),
            int(ranks[row]),
            tuple(zip(ids[row].tolist(), best[row].tolist(), strict=True)),
        )
        for row, token in enumerate(tokens)
    ]


def _bounded(logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns numbers that JSON has: logits that are not finite give others."""
    return np.clip(np.nan_to_num(logprobs, nan=LOWEST_LOGPROB), LOWEST_LOGPROB, 0.0)
