"""Choice of tokens as in agents, for stages that generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from catenary_agent.decoders.sampling.choosing import TokenSampler
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.sampling import SessionSampler
from catenary_services.domain.sampling import SamplingParameters


def sampler(
    history: np.ndarray, seed: int, temperature: float, top_p: float = 0.9, **filters: Any
) -> SessionSampler:
    """Returns the sampler of a session; temperature 0 takes the likeliest token."""
    parameters = SamplingParameters(
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        max_tokens=10_000,
        ignore_eos=True,
        **filters,
    )
    return SessionSampler(parameters, [int(token) for token in history], len(history), ())


def next_tokens(
    logits: Any, samplers: Sequence[SessionSampler], chooser: TokenSampler | None = None
) -> list[int]:
    """Returns the next token of each row of logits, and notes it; on the host without `chooser`."""
    chooser = chooser or numpy_chooser(logits.shape[1])
    chosen = chooser.choose(logits, list(enumerate(samplers)), range(len(samplers)))
    for way, token in zip(samplers, chosen, strict=True):
        way.accept(token)
    return chosen
