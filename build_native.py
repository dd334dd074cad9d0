"""Compiles the hot paths: Cython for the probe and the check of messages, mypyc around the probe.

Run by `make native` (which compiles only what is stale), and by pip through `hatch_build.py`.
Without a compiler nothing is lost but speed: the same modules run as they are.
`scheduler/built_from.json` says which sources the compiled modules were made from; a test compares,
because Python prefers a stale compiled module to a fresh source. `--list` prints the sources,
`--remove` goes back to plain Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

CYTHON = ("scheduler/book/_native.pyx", "services/rules/_wire.pyx")
MYPYC = (
    "scheduler/book/book.py",
    "scheduler/book/caches.py",
    "scheduler/book/cascade.py",
    "scheduler/book/journal.py",
    "scheduler/book/reservation.py",
    "scheduler/book/slots.py",
    "scheduler/dispatch/availability.py",
    "scheduler/dispatch/batching.py",
    "scheduler/dispatch/booked_times.py",
    "scheduler/dispatch/breaker.py",
    "scheduler/dispatch/chained/admission.py",
    "scheduler/dispatch/chained/adoption.py",
    "scheduler/dispatch/chained/board.py",
    "scheduler/dispatch/chained/board_figures.py",
    "scheduler/dispatch/chained/board_statistics.py",
    "scheduler/dispatch/chained/balancing_sessions.py",
    "scheduler/dispatch/chained/config.py",
    "scheduler/dispatch/chained/desk.py",
    "scheduler/dispatch/chained/destinations.py",
    "scheduler/dispatch/chained/dispatcher.py",
    "scheduler/dispatch/chained/failure_backoff.py",
    "scheduler/dispatch/chained/holding.py",
    "scheduler/dispatch/chained/inadmissible.py",
    "scheduler/dispatch/chained/jffc.py",
    "scheduler/dispatch/chained/ledger.py",
    "scheduler/dispatch/chained/lifecycle.py",
    "scheduler/dispatch/chained/lines.py",
    "scheduler/dispatch/chained/moving.py",
    "scheduler/dispatch/chained/overflow.py",
    "scheduler/dispatch/chained/packing_checks.py",
    "scheduler/dispatch/chained/packing_kinds.py",
    "scheduler/dispatch/chained/packing_line.py",
    "scheduler/dispatch/chained/packing_model.py",
    "scheduler/dispatch/chained/packing_pool.py",
    "scheduler/dispatch/chained/packing_rules.py",
    "scheduler/dispatch/chained/packing_view.py",
    "scheduler/dispatch/chained/pairing.py",
    "scheduler/dispatch/chained/placement_line.py",
    "scheduler/dispatch/chained/reseating.py",
    "scheduler/dispatch/chained/routes.py",
    "scheduler/dispatch/chained/seating.py",
    "scheduler/dispatch/chained/straying.py",
    "scheduler/dispatch/chained/token_room.py",
    "scheduler/dispatch/chained/tracking.py",
    "scheduler/dispatch/chained/views.py",
    "scheduler/dispatch/combined.py",
    "scheduler/dispatch/config.py",
    "scheduler/dispatch/events.py",
    "scheduler/dispatch/ledger.py",
    "scheduler/dispatch/lifecycle.py",
    "scheduler/dispatch/placing/adaptation.py",
    "scheduler/dispatch/placing/best_fit.py",
    "scheduler/dispatch/placing/constraints.py",
    "scheduler/dispatch/placing/jobs.py",
    "scheduler/dispatch/placing/length_histogram.py",
    "scheduler/dispatch/placing/lengths.py",
    "scheduler/dispatch/placing/occupancy.py",
    "scheduler/dispatch/placing/worker.py",
    "scheduler/dispatch/pooled.py",
    "scheduler/dispatch/queue.py",
    "scheduler/dispatch/routes.py",
    "scheduler/dispatch/tracking.py",
    "scheduler/packing/grouping.py",
    "scheduler/packing/lazy_moving.py",
    "scheduler/packing/lazy_pool.py",
    "scheduler/packing/outlook.py",
    "scheduler/packing/placing.py",
    "scheduler/packing/repairing.py",
    "scheduler/packing/settling.py",
    "scheduler/packing/shelves.py",
    "scheduler/packing/sizes.py",
    "scheduler/packing/state.py",
    "scheduler/packing/units.py",
    "services/domain/latency.py",
    "simulator/core/devices.py",
    "simulator/core/loop.py",
    "simulator/core/noise.py",
    "simulator/core/requests.py",
    "simulator/core/world.py",
    "simulator/placement/engine.py",
    "simulator/placement/loop.py",
)
RECORD = "scheduler/built_from.json"
GROUP = "catenary_brain"


def digest(root: Path) -> str:
    """Returns a hash of every source that is compiled."""
    total = hashlib.sha256()
    for name in (*CYTHON, *MYPYC):
        total.update(name.encode() + b"\0" + (root / name).read_bytes())
    return total.hexdigest()


def outputs(root: Path) -> list[str]:
    """Returns the compiled modules that are there, relative to the root."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    names = [str(Path(name).with_suffix(suffix)) for name in (*CYTHON, *MYPYC)]
    names.append(f"{GROUP}__mypyc{suffix}")
    return [name for name in names if (root / name).exists()]


def is_fresh(root: Path) -> bool:
    """True if everything was compiled from the sources as they are."""
    record = root / RECORD
    if len(outputs(root)) != len(CYTHON) + len(MYPYC) + 1 or not record.exists():
        return False
    return bool(json.loads(record.read_text())["sources"] == digest(root))


def remove(root: Path) -> None:
    """Removes every compiled module; plain Python is used then."""
    for name in outputs(root):
        (root / name).unlink()
    (root / RECORD).unlink(missing_ok=True)


def build(root: Path) -> None:
    """Compiles everything in place; needs cython, mypy, setuptools and a C compiler."""
    from Cython.Build import cythonize
    from mypyc.build import mypycify
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    remove(root)
    before = Path.cwd()
    scratch = Path(tempfile.mkdtemp(prefix="catenary-native-"))
    os.chdir(root)
    try:
        extensions = cythonize(
            [Extension(Path(name).with_suffix("").as_posix().replace("/", "."), [name])
             for name in CYTHON],
            build_dir=str(scratch), quiet=True,
        )  # fmt: skip
        options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
        extensions += mypycify(
            [*options, *MYPYC],
            opt_level="3", debug_level="0", group_name=GROUP, target_dir=str(scratch / "mypyc"),
        )  # fmt: skip
        command = build_ext(Distribution({"name": GROUP, "ext_modules": extensions}))
        command.inplace = True
        command.build_temp = str(scratch / "temp")
        command.build_lib = str(scratch / "lib")
        command.parallel = os.cpu_count()
        command.ensure_finalized()
        command.run()
        Path(RECORD).write_text(json.dumps({"sources": digest(root)}) + "\n")
    finally:
        os.chdir(before)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    here = Path(__file__).parent.resolve()
    unknown = set(sys.argv[1:]) - {"--list", "--remove"}
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no such option; there are --list and --remove")
    if "--list" in sys.argv:
        print(*CYTHON, *MYPYC)
    elif "--remove" in sys.argv:
        remove(here)
    elif is_fresh(here):
        print("the compiled modules are of these sources already")
    else:
        build(here)
