"""The record of a comparison, as `docs/peers.json` holds it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Literal

import msgspec

from catenary_lab.scenarios.record import sealed, text_of

RECORD = Path(__file__).resolve().parents[2] / "docs/peers.json"


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server at one model, protocol and number of connections; an entry for every round."""

    peer: str
    model: str
    protocol: Literal["grpc", "http"]
    connections: int
    answers: tuple[int, ...]
    failed: tuple[int, ...]
    rates: tuple[float, ...]
    """Successful answers a second."""
    p50_ms: tuple[float, ...]
    p99_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]
    """CPU time of all the server's processes, by answer."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Model, protocol and connections: what is alike in cells that are compared."""
        return self.model, self.protocol, self.connections


class PeerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server's release and memory, beside its cells."""

    title: str
    version: str
    left_out: str = ""
    """The reason for having no cells; empty if it has some."""
    forms: dict[str, str] = {}
    """The form of its requests by protocol."""
    memory_mb: tuple[float, ...] = ()
    """Resident memory of all its processes after its load, with all models, in every round."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options with which the servers were compared."""

    rounds: int
    seed: int
    seconds: float
    quick: bool
    compiled: bool
    """True if Catenary ran its compiled modules."""
    generators: dict[str, str]
    """The load generator with its version, by protocol."""
    kind: Literal["peers"] = "peers"


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole record."""

    peers: dict[str, PeerFacts]
    direct_ms: dict[str, float]
    """CPU time of a row in ONNX Runtime alone, by model."""
    cells: tuple[Cell, ...]
    settings: Settings
    made: dict[str, str]

    def ratios(self, peer: str, to: str, figure: str) -> dict[tuple[str, str, int], float]:
        """Returns a figure of one server over another's, medians of rounds, where both have it."""
        found = [{e.key: e for e in self.cells if e.peer == name} for name in (peer, to)]
        mine, other = found
        return {
            key: median_of(mine[key], figure) / median_of(other[key], figure)
            for key in mine
            if key in other and median_of(other[key], figure) > 0
        }


def median_of(cell: Cell, figure: str) -> float:
    """Returns the median of a cell's rounds."""
    return float(statistics.median(getattr(cell, figure)))


def document_of(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as JSON values, sealed by its digest."""
    return sealed(json.loads(msgspec.json.encode(comparison)))


def comparison_of(document: Any) -> Comparison:
    """Returns the comparison in a document.

    Raises:
        msgspec.ValidationError: It is none; the message names the field.
    """
    return msgspec.convert(document, Comparison, strict=False)


def save(comparison: Comparison, file: Path = RECORD) -> None:
    """Writes the record of a comparison to a file, in the form that `make truth` reads."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text_of(document_of(comparison)), "utf-8")
