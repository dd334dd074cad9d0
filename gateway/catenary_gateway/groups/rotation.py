"""Smooth weighted round robin over groups (Aladdin, Appendix A: r_i = N_i / N_w * r_a)."""

from __future__ import annotations

from collections.abc import Mapping


class WeightedRotation:
    """A rotation that deals requests out to groups in proportion to their weights.

    Any `sum(weights)` consecutive turns with the same weights give each group exactly its weight.
    """

    def __init__(self) -> None:
        self._credit: dict[str, dict[int, int]] = {}

    def next(self, name: str, weights: Mapping[int, int]) -> int:
        """Returns the group whose turn it is.

        Args:
            name: Name of the model; each model has a rotation of its own.
            weights: Number of workers by group; not empty, and each at least 1.
        """
        old = self._credit.get(name, {})
        credit: dict[int, int] = {}
        chosen, most, total = -1, 0, 0
        for group, weight in weights.items():
            has = credit[group] = old.get(group, 0) + weight
            total += weight
            if chosen < 0 or has > most or (has == most and group < chosen):
                chosen, most = group, has
        credit[chosen] -= total
        self._credit[name] = credit
        return chosen
