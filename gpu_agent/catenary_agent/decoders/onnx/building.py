"""The libraries and limits of imports, and the building of graphs in further precisions."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from catenary_agent.decoders.model_files.sizes import ONNX_FORMS, read_table
from catenary_agent.decoders.onnx.graph_worker import graph_in_jail
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.jail.orders import JailLimits
from catenary_services.jail.run import JailedWork, run_jailed
from catenary_services.models.model_repository import PRECISIONS, ModelRepository

_NEEDED = ("transformers", "torch")
_NEEDED_FOR_GRAPHS = ("onnxruntime_genai", "accelerate", "gguf")
_NEEDED_FOR_GGUF = ("gguf",)
_TIMEOUT_S = 3600.0
"""Seconds after which a worker is killed."""
_GIBI = 1 << 30


def check_libraries(target: str = "both", *, gguf: bool = False) -> None:
    """Raises NotSupported unless the libraries of the extra [generation] are installed.

    Args:
        target: The agents that are to run the model: "cpu", "gpu" or "both". Only CPUs need a
            graph.
        gguf: Whether the model comes as a GGUF file.
    """
    needed = _NEEDED + (_NEEDED_FOR_GRAPHS if target != "gpu" else ())
    needed += _NEEDED_FOR_GGUF if gguf else ()
    missing = [name for name in dict.fromkeys(needed) if importlib.util.find_spec(name) is None]
    if missing:
        raise NotSupported(f"importing needs the extra [generation]: {', '.join(missing)}")


def import_limits(source: Path, target: str = "both") -> JailLimits:
    """Returns the limits of reading a model: several times its weights in float32.

    Where no graph is made, only headers are read and small files written.
    """
    files = [source] if source.is_file() else [f for f in source.iterdir() if f.is_file()]
    size = sum(file.stat().st_size for file in files)
    if target == "gpu" and not source.is_file():
        size = 0
    # GGUF packs a weight into half a byte or less; float32 is eight times as large.
    unpacked = 9 * size if source.is_file() else 3 * size
    return JailLimits(
        wall_clock_s=_TIMEOUT_S,
        cpu_s=round(_TIMEOUT_S) * (os.cpu_count() or 1),
        memory_bytes=16 * _GIBI + 6 * unpacked,
        file_bytes=_GIBI + 2 * unpacked,
        folder_bytes=2 * _GIBI + 4 * unpacked,
    )


def ensure_graph(repository: ModelRepository, key: ModelKey, precision: str) -> Path:
    """Returns the folder of a precision's graph, which is built first if it is missing.

    Several agents may ask at once: one builds and the others wait. A graph that is not in the
    version's content record is what a crashed builder has left, and is built again.

    Raises:
        InvalidInput: There is no such precision.
        NotSupported: The model was imported for GPUs only, or a library is missing.
    """
    if precision not in PRECISIONS:
        raise InvalidInput("precision", f"{precision!r} is none of {', '.join(PRECISIONS)}")
    target = repository.folder(key) / f"onnx-{precision}"
    if _is_there(repository, key, target):
        return target
    folder = repository.folder(key)
    with (folder / ".building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_there(repository, key, target):
            return target
        if repository.manifest(key).target == "gpu":
            raise NotSupported(
                f"{key} was imported for GPUs: agents on a CPU run it with PyTorch only"
                " (decoder: torch), or after an import with --target both"
            )
        check_libraries()
        work = JailedWork(
            target=f"{graph_in_jail.__module__}:{graph_in_jail.__name__}",
            job=precision.encode(),
            subject=str(key),
            imports=("torch",),
            inputs=(folder,),
            wanted=(f"{target.name}/*",),
            limits=import_limits(folder),
        )
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as scratch:
            if target.exists():
                target.rename(Path(scratch) / "left")
            made = Path(scratch) / "made"
            made.mkdir()
            with repository.reading(key) as reading:
                reading.begin_own()
                run_jailed(work, into=made)
            (made / target.name).rename(target)
        repository.enter_derived(key, target.name)
        table = repository.decoder_table(key)
        sizes = read_table(folder, precision, table.model_hash)
        # The sizes in PyTorch depend on the manifest's precision, not on that of this graph.
        made_forms = [each for each in sizes.forms if each.form is ONNX_FORMS[precision]]
        table = replace(table, forms=table.with_forms(made_forms))
        if repository.manifest(key).precision == precision:
            table = replace(table, block_bytes=sizes.block_bytes, head_bytes=sizes.head_bytes)
        repository.write_decoder_table(key, table)
    return target


def _is_there(repository: ModelRepository, key: ModelKey, target: Path) -> bool:
    if not target.is_dir():
        return False
    record = repository.content(key)
    return record is None or any(path.startswith(f"{target.name}/") for path in record.files)
