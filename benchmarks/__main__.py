"""Runs benches: `python -m benchmarks [--quick] [--strict] [--json] [--out FILE] [NAME ...]`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from pathlib import Path

from catenary_lab.limits import Figure, table
from catenary_lab.scenarios.record import made_now, sealed, text_of
from catenary_services.log import configure_logging

MODULES = {
    "planning": "benchmarks.pools.planning",
    "chain_planning": "benchmarks.chains.chain_planning",
    "dispatch": "benchmarks.pools.dispatch",
    "chain_dispatch": "benchmarks.chains.chain_dispatch",
    "placement": "benchmarks.placement.placement",
    "rebalance": "benchmarks.placement.rebalance",
    "packing": "benchmarks.packing.packing",
    "packing_live": "benchmarks.packing.packing_live",
    "simulation": "benchmarks.simulation",
    "transport": "benchmarks.transport",
    "end_to_end": "benchmarks.end_to_end",
    "texts": "benchmarks.texts",
    "decoding": "benchmarks.decoders.decoding",
    "sampling": "benchmarks.decoders.sampling",
    "latency_lines": "benchmarks.decoders.latency_lines",
    "split_phase": "benchmarks.generation.split_phase",
    "beside": "benchmarks.generation.prompts_beside",
    "migration": "benchmarks.generation.migration",
    "cache_growth": "benchmarks.generation.cache_growth",
    "generation": "benchmarks.generation.generation",
    "guesses": "benchmarks.generation.guesses",
    "prefix": "benchmarks.generation.prefixes",
    "engines": "benchmarks.generation.engines",
}
"""Every bench by its name, in the order they are run and recorded in."""
LONG = frozenset(
    {"beside", "engines", "generation", "guesses", "migration", "prefix", "split_phase"}
)
"""Benches that take minutes even with few repeats: the short form runs them only by name."""


def main() -> None:
    """Runs the named benches, one after another, and prints their tables."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a limit is missed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", type=Path, help="file of records to bring up to date")
    parser.add_argument("modules", nargs="*", metavar="NAME", help=f"of {', '.join(MODULES)}")
    arguments = parser.parse_args()
    unknown = set(arguments.modules) - set(MODULES)
    if unknown:
        parser.error(f"unknown bench: {', '.join(sorted(unknown))}")
    configure_logging("benchmark", "main", "warning", as_json=False)
    everything = []
    if not arguments.json:
        print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.machine()}")
    usual = [each for each in MODULES if not (arguments.quick and each in LONG)]
    for name in arguments.modules or usual:
        figures = importlib.import_module(MODULES[name]).run(arguments.quick)
        everything += figures
        if arguments.out is not None:
            _record(arguments.out, name, figures, quick=arguments.quick)
        if not arguments.json:
            print(f"\n{name}\n{table(figures)}", flush=True)
    if arguments.json:
        print(json.dumps(everything))
    missed = [figure["name"] for figure in everything if not figure["ok"]]
    if missed:
        print(f"limits missed: {'; '.join(missed)}", file=sys.stderr)
        sys.exit(1 if arguments.strict else 0)


def _record(path: Path, name: str, figures: list[Figure], *, quick: bool) -> None:
    """Writes the figures of a bench into a file of records, replacing its earlier ones."""
    records = json.loads(path.read_text("utf-8")) if path.exists() else {}
    record = {"figures": figures, "settings": {"quick": quick}, "made": made_now()}
    records[name] = sealed(record)
    ordered = [each for each in MODULES if each in records]
    ordered += [each for each in records if each not in MODULES]
    path.write_text(text_of({each: records[each] for each in ordered}), "utf-8")


if __name__ == "__main__":
    main()
