"""Running the import worker, and making the graph of another precision when it is asked for."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gpu_agent.decoders.precision import graph_folder
from gpu_agent.decoders.sizes import read_table
from services.domain.ids import ModelKey
from services.errors import InternalError, NotSupported
from services.model_repository import ModelRepository

_NEEDED = ("transformers", "torch", "onnxruntime_genai", "accelerate", "gguf")
_TIMEOUT_S = 3600.0
"""A worker that takes longer is killed."""
_WORDS_SHOWN = 400


def run_worker(
    folder: Path,
    gguf: Path | None,
    precisions: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Runs `import_worker` on a model's folder.

    Raises:
        NotSupported: If a library it needs is not installed.
        InternalError: If it fails; the message has its last words.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NotSupported(f"importing needs the extra [generation]: {', '.join(missing)}")
    job = {
        "folder": str(folder.resolve()),
        "gguf": str(gguf.resolve()) if gguf else None,
        "precisions": list(precisions),
    }
    command = [sys.executable, "-m", "gpu_agent.decoders.import_worker", json.dumps(job)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment = {**os.environ, **quiet, "PYTHONPATH": path}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        ) as process:
            assert process.stdout is not None
            watchdog = threading.Timer(_TIMEOUT_S, process.kill)
            watchdog.start()
            try:
                for line in process.stdout:
                    progress(line.strip())
                code = process.wait()
            except BaseException:
                process.kill()
                raise
            finally:
                watchdog.cancel()
        if code != 0:
            errors.seek(0)
            words = " ".join(errors.read().split())[-_WORDS_SHOWN:]
            raise InternalError(f"the import failed with exit code {code}: .. {words}")


def ensure_graph(repository: ModelRepository, key: ModelKey, precision: str) -> Path:
    """Returns the folder of a precision's graph; builds it first if it is not there.

    Several agents may ask at once: one builds, the others wait for it. A graph that nobody has
    entered into the version's record is what a builder that died has left, and is built anew.
    """
    target = graph_folder(repository, key, precision)
    if _is_there(repository, key, target):
        return target
    folder = repository.folder(key)
    with (folder / ".building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_there(repository, key, target):
            return target
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as scratch:
            made = Path(scratch)
            if target.exists():
                target.rename(made / "left")
            with repository.reading(key) as reading:
                for path in folder.iterdir():
                    if path.is_file() and not path.name.startswith("."):
                        (made / path.name).symlink_to(path.resolve())
                        if reading.lists(path):
                            reading.begin(path, first=True)
                run_worker(made, None, [precision])
            (made / target.name).rename(target)
        repository.enter_derived(key, target.name)
        if repository.manifest(key).precision == precision:
            table = repository.decoder_table(key)
            sizes = read_table(folder, precision, table.model_hash)
            repository.write_decoder_table(
                key,
                replace(table, block_bytes=sizes.block_bytes, head_bytes=sizes.head_bytes),
            )
    return target


def _is_there(repository: ModelRepository, key: ModelKey, target: Path) -> bool:
    if not target.is_dir():
        return False
    record = repository.content(key)
    return record is None or any(path.startswith(f"{target.name}/") for path in record.files)
