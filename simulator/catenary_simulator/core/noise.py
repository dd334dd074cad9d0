"""Factors by which real durations differ from the profiled ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from catenary_services.domain.ids import Nanoseconds

_BLOCK = 4096


class NoiseFactors:
    """An endless, seeded supply of positive factors with mean 1 (stragglers not counted).

    Factors are log-normal with the coefficient of variation `cv`. With the probability
    `probability` a factor is multiplied by `slow`.
    """

    __slots__ = ("_at", "_block", "_probability", "_random", "_sigma", "_slow", "constant")

    def __init__(self, cv: float, probability: float, slow: float, seed: int, stream: int) -> None:
        self._random = np.random.default_rng((seed, stream))
        self._sigma = sqrt(log(1.0 + cv * cv))
        self._probability = probability
        self._slow = slow
        self._block: list[float] = []
        self._at = 0
        self.constant = cv <= 0.0 and (probability <= 0.0 or slow == 1.0)
        """True if every factor is 1, so that the caller can save the multiplication."""

    def next(self) -> float:
        if self._at == len(self._block):
            self._refill()
        factor = self._block[self._at]
        self._at += 1
        return factor

    def _refill(self) -> None:
        sigma = self._sigma
        factors = np.exp(self._random.normal(-sigma * sigma / 2.0, sigma, _BLOCK))
        if self._probability > 0.0:
            slow = self._random.random(_BLOCK) < self._probability
            factors = np.where(slow, factors * self._slow, factors)
        self._block = [float(factor) for factor in factors]
        self._at = 0


@dataclass(frozen=True, slots=True)
class Noise:
    """Differences between real and profiled durations.

    Attributes:
        compute: Factors of compute times.
        transfer: Factors of transfer times.
        report_delay_ns: Delay of reports and results on their way to the dispatcher.
    """

    compute: NoiseFactors
    transfer: NoiseFactors
    report_delay_ns: Nanoseconds = 0
