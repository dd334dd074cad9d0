"""Measures Catenary beside other servers: `python -m benchmarks.peers [--quick] [--out FILE]`.

`make peers` makes the servers' environments; a server without one is left out, and the record says
so. Wall times mean something only while nothing else runs on the machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks.peers import record
from benchmarks.peers.load import GENERATORS, chosen, told_version
from benchmarks.peers.measuring import Found, Options, measure
from benchmarks.peers.record import Comparison, PeerFacts, Settings
from benchmarks.peers.servers import PEERS, is_made, version_of
from benchmarks.peers.summary import PROTOCOLS, printed
from benchmarks.peers.workloads import CONNECTIONS, Workload, workloads
from catenary_lab.scenarios.record import made_now
from catenary_scheduler.book import COMPILED
from catenary_services.log import configure_logging

DATA = Path(".catenary/bench-peers")
ROUNDS, SECONDS = 3, 1.25
_QUICK_S = 0.5
NOT_MADE = "its environment is not made: `make peers`"


def main() -> None:
    """Measures what the command line names, prints a table and writes the record."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="every server's turns")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a load")
    parser.add_argument("--seed", type=int, default=1, help="of the orders")
    parser.add_argument("--quick", action="store_true", help="one short round; never a record")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), help="these servers")
    parser.add_argument("--models", nargs="+", choices=list(CONNECTIONS), help="these models")
    parser.add_argument("--generator", choices=list(GENERATORS), help="for both protocols")
    parser.add_argument("--out", type=Path, help="file of the record")
    arguments = parser.parse_args()
    configure_logging("benchmark", "main", "warning", as_json=False)
    # Servers are ended on the way out, whatever ends the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asked = arguments.only or list(PEERS)
    generators = {name: arguments.generator or chosen(name) for name in PROTOCOLS}
    options = Options(
        peers=tuple(name for name in asked if is_made(name)),
        rounds=1 if arguments.quick else arguments.rounds,
        seed=arguments.seed,
        seconds=_QUICK_S if arguments.quick else arguments.seconds,
        generators=generators,
    )
    # A selection is as little a record as a short form.
    whole = not (arguments.quick or arguments.only or arguments.models)
    started = time.monotonic()
    models = workloads(DATA / "models", tuple(arguments.models or CONNECTIONS))
    made = made_now()
    found = measure(options, DATA / "models", models, lambda line: print(line, flush=True))
    comparison = comparison_of(found, options, models, asked, made, whole=whole)
    print(printed(comparison))
    print(f"{time.monotonic() - started:.0f} s")
    if arguments.out is not None:
        record.save(comparison, arguments.out)


def comparison_of(
    found: Found,
    options: Options,
    models: list[Workload],
    asked: list[str],
    made: dict[str, str],
    *,
    whole: bool,
) -> Comparison:
    """Returns the record of what was found."""
    facts = {
        name: PeerFacts(
            title=PEERS[name].title,
            version=version_of(name) if name in options.peers else "",
            left_out=found.failures.get(name, "") if name in options.peers else NOT_MADE,
            forms=found.forms.get(name, {}),
            memory_mb=tuple(found.memory_mb.get(name, ())),
        )
        for name in asked
    }
    settings = Settings(
        rounds=options.rounds,
        seed=options.seed,
        seconds=options.seconds,
        quick=not whole,
        compiled=COMPILED,
        generators={name: told_version(each) for name, each in options.generators.items()},
    )
    direct_ms = {each.name: each.direct_ms for each in models}
    return Comparison(facts, direct_ms, tuple(found.all_cells()), settings, made)


if __name__ == "__main__":
    main()
