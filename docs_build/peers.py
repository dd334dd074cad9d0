"""The record of the comparison with other servers, and what its page shows of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import summary
from benchmarks.peers.record import comparison_of
from catenary_lab.limits import Figure

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path("docs/peers.json")


class PeersPage:
    """The words of the page's template."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.found = comparison_of(record)
        self.servers = summary.servers(self.found)
        self.rates = partial(summary.rates, self.found)
        self.latencies = partial(summary.latencies, self.found)
        self.cpu = partial(summary.cpu, self.found)

    @property
    def figures(self) -> list[Figure]:
        """The targets beside what was measured."""
        return summary.targets(self.found)

    @property
    def how(self) -> str:
        """The sentence about how it was measured."""
        settings = self.found.settings
        generators = ", ".join(dict.fromkeys(settings.generators.values()))
        failed = summary.failures(self.found)
        counted = ", ".join(f"{title} {count}" for title, count in failed.items()) or "none"
        compiled = "compiled" if settings.compiled else "without compiled modules"
        return (
            f"{settings.rounds} rounds of {settings.seconds:g} s by {generators}, seed"
            f" {settings.seed}; Catenary {compiled}. Failed answers: {counted}. Rounds of a rate"
            f" lie {summary.spread(self.found):.0%} of it apart (median of all loads)."
        )


def peers_page(root: Path = ROOT) -> PeersPage | None:
    """Returns the page's words, or None where no run is recorded."""
    file = root / RECORD
    return PeersPage(json.loads(file.read_text("utf-8"))) if file.exists() else None
