"""The demo's preparation: what it takes is said first, then both models are made side by side.

Each model is made in a process of its own, on one core, and what libraries print goes into a log
file. Run as a program, this module is such a process: `python -m catenaryd.demo.preparing FOLDER
MODEL` prints a line for each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from catenary_services.errors import CatenaryError, InternalError, Unavailable
from catenary_services.models.model_repository import ModelRepository

NEEDED_BYTES = {"efficientnet-lite0": 60_000_000, "smollm2-135m": 1_200_000_000}
"""Room that a prepared model takes on the disk, by its name."""
_ONE_CORE = {"OMP_NUM_THREADS": "1"}


def is_prepared(root: Path, model: str) -> bool:
    """Returns whether a model is in the repository and cut, and devices can be emulated with it."""
    repository = ModelRepository(root)
    with contextlib.suppress(CatenaryError):
        key = repository.resolve(model)
        table = repository.block_table(key)
        # A model that was prepared by an earlier release has no kernels.
        return bool(table.kernels) or repository.manifest(key).generates_text
    return False


def announce(root: Path, models: Sequence[str]) -> list[str]:
    """Says what has to be prepared and what that takes, and returns the models' names.

    Raises:
        Unavailable: There is not enough room on the disk.
    """
    click.echo(
        "Nothing is downloaded: models and photographs came with the installation, in wheels."
    )
    missing = [model for model in models if not is_prepared(root, model)]
    if not missing:
        click.echo(f"Nothing is to be prepared: {' and '.join(models)} are in {root}.")
        return []
    needed = sum(NEEDED_BYTES[model] for model in missing)
    click.echo(
        f"To be prepared, once: {' and '.join(missing)}, which are cut into blocks. Takes about a"
        f" minute\non two cores, and {needed / 1e9:.1f} GB in {root}."
    )
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise Unavailable(f"{root} has {free / 1e9:.1f} GB left of the {needed / 1e9:.1f} needed")
    return missing


async def prepare(root: Path, model: str, log_file: Path, progress: Callable[[str], None]) -> None:
    """Makes a model in a process of its own, which ends if this is cancelled.

    Args:
        root: The folder of the repository.
        model: A demo model.
        log_file: The file that gets what libraries print.
        progress: Called with a text at each step.

    Raises:
        InternalError: It failed; the message has its last words.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            str(root),
            model,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **_ONE_CORE},
            start_new_session=True,
        )
    assert process.stdout is not None
    last = ""
    try:
        async for line in process.stdout:
            last = line.decode(errors="replace").strip()
            progress(last)
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
    if code:
        raise InternalError(f"{model} could not be prepared ({last}); see {log_file}")


def _work(root: Path, model: str) -> int:
    from catenary_agent.preparing.prepare import prepare_model
    from catenaryd.demo.models import ensure_model
    from catenaryd.local.supervisor import end_with_parent

    end_with_parent()
    # Whoever is asked to end takes along what it has begun: the jail, and half a model.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Lines for the parent go where this process was told to print, all else into the log.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as lines:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def tell(text: str) -> None:
            print(text, file=lines, flush=True)

        try:
            key = ensure_model(root, model, progress=tell)
            if not is_prepared(root, model):
                tell("counting its kernels, which an earlier release did not")
                prepare_model(ModelRepository(root), key)
        except CatenaryError as error:
            tell(error.message)
            return 1
        tell("ready")
    return 0


if __name__ == "__main__":
    sys.exit(_work(Path(sys.argv[1]), sys.argv[2]))
