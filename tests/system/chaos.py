"""Chaos in the house: `make chaos SEED=7 MINUTES=8`, or `make chaos SOAK=1 MINUTES=30`.

Real processes, each in a network namespace of its own, answer photographs and streams of text with
known right answers while faults come, singly and in pairs, by a schedule that the seed determines.
A run is good if every request ended, right or with a stated error, everything was as before within
the time docs/failures.md promises, and nothing is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from faults.all_faults import REGISTRY
from faults.campaign import Campaign, Result, as_json
from faults.report import lines
from faults.schedule import schedule


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    names = tuple(name for name in options.only.split(",") if name)
    if unknown := [name for name in names if name not in REGISTRY]:
        print(f"no such fault: {', '.join(unknown)}; there are {', '.join(sorted(REGISTRY))}")
        return 2
    if options.list:
        for name in sorted(REGISTRY):
            print(f"{name:22} {REGISTRY[name].about}")
        return 0
    if options.schedule:
        for step in itertools.islice(schedule(options.seed, names), options.schedule):
            print(step)
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    # A run that is told to stop ends its processes and namespaces, as one that is interrupted.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    result = asyncio.run(_run(options, folder, names))
    print(*lines(result), sep="\n")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(as_json(result) + "\n")
    if result.is_good and options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"logs: {folder / 'logs'}")
    return 0 if result.is_good else 1


async def _run(options: argparse.Namespace, folder: Path, names: tuple[str, ...]) -> Result:
    seconds = 60 * options.minutes
    campaign = Campaign(folder, options.seed, network=not options.no_network)
    mode = "soak" if options.soak else f"chaos, seed {options.seed}"
    print(
        f"{mode}, {options.minutes:g} minutes, files in {folder}, {time.strftime('%H:%M:%S')}",
        flush=True,
    )
    if options.soak:
        return await campaign.soak(seconds)
    return await campaign.chaos(seconds, names, options.steps)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the schedule and of everything drawn"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for which faults come")
    parser.add_argument(
        "--steps", type=int, default=0, help="at most so many steps of the schedule"
    )
    parser.add_argument("--only", default="", help="names of faults, with commas, to draw from")
    parser.add_argument(
        "--soak", action="store_true", help="no faults: slopes of memory, descriptors and threads"
    )
    parser.add_argument(
        "--no-network", action="store_true", help="all on the loopback interface, shared memory too"
    )
    parser.add_argument("--json", type=Path, help="file for everything that happened")
    parser.add_argument("--folder", type=Path, help="for logs and data; kept")
    parser.add_argument("--list", action="store_true", help="show the faults there are")
    parser.add_argument(
        "--schedule", type=int, metavar="STEPS", help="show the first steps of a seed"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
