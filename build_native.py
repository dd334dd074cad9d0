"""Compiles the hot paths: Cython for the probe and the check of messages, mypyc around the probe.

`make native` runs it (and compiles only stale sources), and so does pip through `hatch_build.py`.
Without a compiler nothing is lost but speed: the same modules run as Python.
`scheduler/catenary_scheduler/built_from.json` records which sources the compiled modules were made
from; a test compares, because Python prefers a stale compiled module to a fresh source. `--list`
prints the sources, `--remove` goes back to plain Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CYTHON = (
    "scheduler/catenary_scheduler/book/_native.pyx",
    "services/catenary_services/rules/_wire.pyx",
)
MYPYC = (
    "scheduler/catenary_scheduler/book/book.py",
    "scheduler/catenary_scheduler/book/caches.py",
    "scheduler/catenary_scheduler/book/cascade.py",
    "scheduler/catenary_scheduler/book/journal.py",
    "scheduler/catenary_scheduler/book/reservation.py",
    "scheduler/catenary_scheduler/book/slots.py",
    "scheduler/catenary_scheduler/book/steps.py",
    "scheduler/catenary_scheduler/dispatch/availability.py",
    "scheduler/catenary_scheduler/dispatch/pooled/batching.py",
    "scheduler/catenary_scheduler/dispatch/pooled/booked_times.py",
    "scheduler/catenary_scheduler/dispatch/breaker.py",
    "scheduler/catenary_scheduler/dispatch/chained/admission/admission.py",
    "scheduler/catenary_scheduler/dispatch/chained/admission/adoption.py",
    "scheduler/catenary_scheduler/dispatch/chained/admission/cluster_events.py",
    "scheduler/catenary_scheduler/dispatch/chained/admission/request_events.py",
    "scheduler/catenary_scheduler/dispatch/chained/admission/session_events.py",
    "scheduler/catenary_scheduler/dispatch/chained/admission/timeouts.py",
    "scheduler/catenary_scheduler/dispatch/chained/admission/preemption.py",
    "scheduler/catenary_scheduler/dispatch/chained/config.py",
    "scheduler/catenary_scheduler/dispatch/chained/dispatcher.py",
    "scheduler/catenary_scheduler/dispatch/chained/migration/destinations.py",
    "scheduler/catenary_scheduler/dispatch/chained/migration/moving.py",
    "scheduler/catenary_scheduler/dispatch/chained/migration/evacuation.py",
    "scheduler/catenary_scheduler/dispatch/chained/packing/checks.py",
    "scheduler/catenary_scheduler/dispatch/chained/packing/kinds.py",
    "scheduler/catenary_scheduler/dispatch/chained/packing/session_packing.py",
    "scheduler/catenary_scheduler/dispatch/chained/packing/model.py",
    "scheduler/catenary_scheduler/dispatch/chained/packing/pool.py",
    "scheduler/catenary_scheduler/dispatch/chained/packing/view.py",
    "scheduler/catenary_scheduler/dispatch/chained/packing_rules.py",
    "scheduler/catenary_scheduler/dispatch/chained/placement/slo_placer.py",
    "scheduler/catenary_scheduler/dispatch/chained/placement/least_time_placer.py",
    "scheduler/catenary_scheduler/dispatch/chained/placement/chain_ranking.py",
    "scheduler/catenary_scheduler/dispatch/chained/placement/placer_figures.py",
    "scheduler/catenary_scheduler/dispatch/chained/placement/placer_statistics.py",
    "scheduler/catenary_scheduler/dispatch/chained/placement/inadmissible.py",
    "scheduler/catenary_scheduler/dispatch/chained/placement/placement_requests.py",
    "scheduler/catenary_scheduler/dispatch/chained/placement/session_loads.py",
    "scheduler/catenary_scheduler/dispatch/chained/placement/workers.py",
    "lab/catenary_lab/policies/balancing.py",
    "lab/catenary_lab/policies/balancing_sessions.py",
    "scheduler/catenary_scheduler/dispatch/chained/policies/jffc.py",
    "scheduler/catenary_scheduler/dispatch/chained/policies/pairing.py",
    "scheduler/catenary_scheduler/dispatch/chained/queues/model_queue.py",
    "scheduler/catenary_scheduler/dispatch/chained/queues/failure_backoff.py",
    "scheduler/catenary_scheduler/dispatch/chained/queues/wait_queue.py",
    "scheduler/catenary_scheduler/dispatch/chained/queues/placement_queue.py",
    "scheduler/catenary_scheduler/dispatch/chained/chain_state.py",
    "scheduler/catenary_scheduler/dispatch/chained/states.py",
    "scheduler/catenary_scheduler/dispatch/chained/step_lines.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/session_table.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/booking.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/chain_offers.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/closing.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/ledger.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/history.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/misplaced.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/move_table.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/validation.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/kv_budget.py",
    "scheduler/catenary_scheduler/dispatch/chained/sessions/views.py",
    "scheduler/catenary_scheduler/dispatch/chained/tracking.py",
    "scheduler/catenary_scheduler/dispatch/combined.py",
    "scheduler/catenary_scheduler/dispatch/pooled/config.py",
    "scheduler/catenary_scheduler/dispatch/pooled/dispatcher.py",
    "scheduler/catenary_scheduler/dispatch/events.py",
    "scheduler/catenary_scheduler/dispatch/pooled/ledger.py",
    "scheduler/catenary_scheduler/dispatch/pooled/lifecycle.py",
    "scheduler/catenary_scheduler/dispatch/placing/adaptation.py",
    "scheduler/catenary_scheduler/dispatch/placing/added_time.py",
    "scheduler/catenary_scheduler/dispatch/placing/best_fit.py",
    "scheduler/catenary_scheduler/dispatch/placing/constraints.py",
    "scheduler/catenary_scheduler/dispatch/placing/jobs.py",
    "scheduler/catenary_scheduler/dispatch/placing/length_histogram.py",
    "scheduler/catenary_scheduler/dispatch/placing/lengths.py",
    "scheduler/catenary_scheduler/dispatch/placing/occupancy.py",
    "scheduler/catenary_scheduler/dispatch/placing/prefix_directory.py",
    "scheduler/catenary_scheduler/dispatch/placing/worker.py",
    "scheduler/catenary_scheduler/dispatch/pooled/row_queue.py",
    "scheduler/catenary_scheduler/dispatch/pooled/routes.py",
    "scheduler/catenary_scheduler/dispatch/pooled/text_batches.py",
    "scheduler/catenary_scheduler/dispatch/pooled/tracking.py",
    "scheduler/catenary_scheduler/dispatch/pooled/window_usage.py",
    "scheduler/catenary_scheduler/dispatch/pooled/windows.py",
    "scheduler/catenary_scheduler/packing/lazy/lazy_moving.py",
    "scheduler/catenary_scheduler/packing/lazy/lazy_pool.py",
    "scheduler/catenary_scheduler/packing/lazy/bin_forecast.py",
    "scheduler/catenary_scheduler/packing/mell/grouping.py",
    "scheduler/catenary_scheduler/packing/mell/placing.py",
    "scheduler/catenary_scheduler/packing/mell/repairing.py",
    "scheduler/catenary_scheduler/packing/mell/settling.py",
    "scheduler/catenary_scheduler/packing/mell/sizes.py",
    "scheduler/catenary_scheduler/packing/mell/state.py",
    "scheduler/catenary_scheduler/packing/mell/units.py",
    "scheduler/catenary_scheduler/packing/active_bins.py",
    "services/catenary_services/domain/latency.py",
    "services/catenary_services/domain/windows/window.py",
    "services/catenary_services/domain/windows/window_queue.py",
    "simulator/catenary_simulator/chains/loop.py",
    "simulator/catenary_simulator/core/devices.py",
    "simulator/catenary_simulator/core/noise.py",
    "simulator/catenary_simulator/core/requests.py",
    "simulator/catenary_simulator/core/world.py",
    "simulator/catenary_simulator/kernel.py",
    "simulator/catenary_simulator/packing/loop.py",
    "simulator/catenary_simulator/placement/engine.py",
    "simulator/catenary_simulator/placement/loop.py",
)
RECORD = "scheduler/catenary_scheduler/built_from.json"
GROUP = "catenary_brain"


def installed(name: str) -> str:
    """Returns the path of a checkout's file in an installation: below its package."""
    return name.partition("/")[2] or name


def _packages() -> dict[str, str]:
    """Returns the folder of each package, by name."""
    folders = {Path(name).parents[-3] for name in (*CYTHON, *MYPYC)}
    return {folder.name: str(folder) for folder in sorted(folders)}


def digest(root: Path) -> str:
    """Returns a hash of every source that is compiled."""
    total = hashlib.sha256()
    for name in (*CYTHON, *MYPYC):
        total.update(name.encode() + b"\0" + (root / name).read_bytes())
    return total.hexdigest()


def outputs(root: Path) -> list[str]:
    """Returns the compiled modules that exist, relative to the root."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    names = [str(Path(name).with_suffix(suffix)) for name in (*CYTHON, *MYPYC)]
    names.append(f"{GROUP}__mypyc{suffix}")
    return [name for name in names if (root / name).exists()]


def is_fresh(root: Path) -> bool:
    """True if everything was compiled from the present sources."""
    record = root / RECORD
    if len(outputs(root)) != len(CYTHON) + len(MYPYC) + 1 or not record.exists():
        return False
    return bool(json.loads(record.read_text())["sources"] == digest(root))


def remove(root: Path) -> None:
    """Removes every compiled module, after which plain Python is used."""
    for name in outputs(root):
        (root / name).unlink()
    (root / RECORD).unlink(missing_ok=True)


def build(root: Path) -> None:
    """Compiles everything in place; needs cython, mypy, setuptools and a C compiler."""
    from Cython.Build import cythonize
    from mypyc.build import mypycify
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    class ParallelBuild(build_ext):
        """A build whose C files are compiled side by side, those of one extension too."""

        def build_extensions(self) -> None:
            compile_files = self.compiler.compile

            def compile_each(sources: list[str], *args: Any, **options: Any) -> list[str]:
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    made = pool.map(lambda one: compile_files([one], *args, **options), sources)
                    return [name for names in made for name in names]

            self.compiler.compile = compile_each
            if "gcc" in Path(self.compiler.compiler[0]).name:
                # Calls between modules are a third slower unless the linker may inline them.
                for extension in self.extensions:
                    extension.extra_compile_args.append("-flto=auto")
                    extension.extra_link_args.append(f"-flto={os.cpu_count()}")
            super().build_extensions()

    remove(root)
    before = Path.cwd()
    scratch = Path(tempfile.mkdtemp(prefix="catenary-native-"))
    os.chdir(root)
    try:
        extensions = cythonize(
            [
                Extension(
                    Path(installed(name)).with_suffix("").as_posix().replace("/", "."), [name]
                )
                for name in CYTHON
            ],
            build_dir=str(scratch),
            quiet=True,
        )
        options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
        extensions += mypycify(
            [*options, *MYPYC],
            opt_level="3",
            debug_level="0",
            group_name=GROUP,
            multi_file=True,
            target_dir=str(scratch / "mypyc"),
        )
        command = ParallelBuild(
            Distribution({"name": GROUP, "ext_modules": extensions, "package_dir": _packages()})
        )
        command.inplace = True
        command.build_temp = str(scratch / "temp")
        command.build_lib = str(scratch / "lib")
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
