"""Tables of a record by model, with ratios to Triton, and the targets of the fast path."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.peers.record import Cell, Comparison, median_of
from benchmarks.peers.servers import Protocol
from catenary_lab.limits import Figure, at_least, at_most, table

OURS, REFERENCE = "catenary", "triton"
PROTOCOLS: tuple[Protocol, ...] = ("grpc", "http")
TITLES = {"grpc": "gRPC", "http": "HTTP"}
SHARES: dict[tuple[str, int], float] = {
    ("tiny", 16): 0.8,
    ("tiny", 64): 0.8,
    ("efficientnet-lite0", 1): 0.95,
    ("efficientnet-lite0", 4): 1.0,
    ("efficientnet-lite0", 16): 1.1,
    ("payload", 1): 0.8,
    ("payload", 16): 0.8,
}
"""Least share of Triton's rate over both protocols, by model and connections."""
MOST_P50_MS = 1.2
"""The target for one small request at a time."""
MOST_MEMORY_MB = 250.0


def targets(found: Comparison) -> list[Figure]:
    """Returns what is aimed at beside what was measured; a cell without a figure is left out."""
    figures = []
    shares = found.ratios(OURS, REFERENCE, "rates")
    for protocol in PROTOCOLS:
        for (model, connections), least in SHARES.items():
            key = (model, protocol, connections)
            if key in shares:
                name = f"{_named(*key)}: rate over Triton's"
                figures.append(at_least(name, shares[key], "x", least))
    for cell in found.cells:
        if cell.peer == OURS and cell.model == "tiny" and cell.connections == 1:
            name = f"{_named(*cell.key)}: p50"
            figures.append(at_most(name, median_of(cell, "p50_ms"), "ms", MOST_P50_MS))
    ahead = [ratio for _key, ratio in over_python(found) if _key[0] == "tiny"]
    if ahead:
        name = "tiny: rate over the fastest Python server's, worst cell"
        figures.append(at_least(name, min(ahead), "x", 1.0))
    if memory := found.peers[OURS].memory_mb if OURS in found.peers else ():
        name = "memory of a cluster with one agent and all models"
        figures.append(at_most(name, statistics.median(memory), "MB", MOST_MEMORY_MB))
    return figures


def over_python(found: Comparison) -> Iterator[tuple[tuple[str, str, int], float]]:
    """Yields our rate over that of the fastest Python server, for every cell they share."""
    others = [name for name in found.peers if name not in (OURS, REFERENCE)]
    every = [found.ratios(OURS, other, "rates") for other in others]
    for key in sorted({key for ratios in every for key in ratios}):
        yield key, min(ratios[key] for ratios in every if key in ratios)


def spread(found: Comparison) -> float:
    """Returns how far a rate's rounds lie apart, over their median; the median of all cells."""
    each = [
        (max(cell.rates) - min(cell.rates)) / median_of(cell, "rates")
        for cell in found.cells
        if median_of(cell, "rates") > 0
    ]
    return statistics.median(each) if each else 0.0


def failures(found: Comparison) -> dict[str, int]:
    """Returns how many answers of each server were no success; servers without any are left out."""
    counted = {
        name: sum(sum(cell.failed) for cell in found.cells if cell.peer == name)
        for name in found.peers
    }
    return {found.peers[name].title: count for name, count in counted.items() if count}


def servers(found: Comparison) -> str:
    """Returns a table of all servers: release, forms of requests, memory."""
    rows = []
    for each in found.peers.values():
        forms = ", ".join(f"{TITLES[name]}: {form}" for name, form in each.forms.items())
        memory = f"{statistics.median(each.memory_mb):,.0f}" if each.memory_mb else "-"
        rows.append([each.title, each.version or "-", each.left_out or forms, memory])
    return _markdown(["server", "release", "requests", "memory, MB"], rows, numbers=1)


def rates(found: Comparison, model: str) -> str:
    """Returns a table of a model's answers a second, with the ratio to Triton's."""
    shares = {name: found.ratios(name, REFERENCE, "rates") for name in found.peers}

    def text(cell: Cell) -> str:
        share = shares[cell.peer].get(cell.key)
        rate = f"{median_of(cell, 'rates'):,.0f}"
        return rate if share is None or cell.peer == REFERENCE else f"{rate} ({share:.2f})"

    return _by_connections(found, model, text)


def latencies(found: Comparison, model: str) -> str:
    """Returns a table of a model's p50 and p99 in milliseconds."""

    def text(cell: Cell) -> str:
        return f"{median_of(cell, 'p50_ms'):,.2f} / {median_of(cell, 'p99_ms'):,.2f}"

    return _by_connections(found, model, text)


def cpu(found: Comparison, model: str) -> str:
    """Returns a table of the milliseconds of CPU by answer, of all processes of a server."""
    return _by_connections(found, model, lambda cell: f"{median_of(cell, 'cpu_ms'):,.2f}")


def printed(found: Comparison) -> str:
    """Returns everything as text for a terminal."""
    parts = [servers(found)]
    for model, direct_ms in found.direct_ms.items():
        parts.append(f"{model}: {direct_ms:.2f} ms of ONNX Runtime; answers a second (over Triton)")
        parts.append(rates(found, model))
        parts += ["p50 / p99, ms", latencies(found, model), "CPU by answer, ms", cpu(found, model)]
    parts.append(table(targets(found)))
    parts.append(f"rounds apart by {spread(found):.0%}; failures: {failures(found) or 'none'}")
    return "\n\n".join(parts)


def _named(model: str, protocol: str, connections: int) -> str:
    return f"{model}, {TITLES[protocol]}, {connections} in flight"


def _by_connections(found: Comparison, model: str, text: Callable[[Cell], str]) -> str:
    cells = {
        (each.protocol, each.peer, each.connections): each
        for each in found.cells
        if each.model == model
    }
    columns = sorted({connections for *_, connections in cells})
    rows = []
    for protocol in PROTOCOLS:
        for name, facts in found.peers.items():
            mine = [cells.get((protocol, name, connections)) for connections in columns]
            if any(mine):
                texts = ["-" if cell is None else text(cell) for cell in mine]
                rows.append([facts.title, TITLES[protocol], *texts])
    header = ["server", "", *(f"{each} in flight" for each in columns)]
    return _markdown(header, rows, numbers=len(columns))


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> str:
    """Returns a table whose last columns are numbers."""
    rule = "|" + "---|" * (len(header) - numbers) + "---:|" * numbers
    lines = [f"| {' | '.join(header)} |", rule]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
