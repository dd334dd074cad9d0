"""Extracted parts on disk, so that an agent reads only the weights it serves.

A part is kept in a folder named by the SHA-256 of everything that determines it. Writers build in
a temporary folder and rename it; if two agents build the same part at once, one rename wins and
the other's work is thrown away. Where the cache cannot be written the part lives in a temporary
folder for as long as it takes to load it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from services.domain.tensors import TensorSpec

CACHE_FOLDER = ".parts"
_FORMAT = 1
"""Raised when a newer program would extract the same part differently."""


def part_digest(
    model_hash: str, ends: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]], variant: str
) -> str:
    """Returns the name of a part: of which file, between which tensors, built how."""
    described = [[[t.name, t.datatype, *t.shape] for t in end] for end in ends]
    facts = [_FORMAT, model_hash, described, variant]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def part_folder(cache: Path, digest: str, build: Callable[[Path], None]) -> Iterator[Path]:
    """Yields the folder that `build` filled, now or earlier; valid inside the `with` block."""
    final = cache / digest
    if final.is_dir():
        yield final
        return
    with contextlib.ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=cache))
            cached = True
        except OSError:  # a read-only repository is a normal way to deploy one
            made = Path(tempfile.mkdtemp(prefix="catenary-part-"))
            cached = False
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        build(made)
        if not cached:
            yield made
            return
        try:
            made.chmod(0o755)
            made.rename(final)
        except OSError:
            if not final.is_dir():  # not the race we may lose, but a real failure
                raise
        yield final
