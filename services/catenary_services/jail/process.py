"""The process of a jailed order: its folders and its user, its start and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from catenary_services.jail import users
from catenary_services.jail.orders import JailOrder, JailProtection
from catenary_services.jail.protections import is_root, offered

FOLDER_PREFIX = ".catenary-jail-"
"""The beginning of the names of folders in which jailed processes work."""
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
    "USER": "catenary-jail",
    "LOGNAME": "catenary-jail",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "PATH": "/nowhere",
}
"""The child's whole environment except for folders: it has no keys, proxies or devices."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables passed on unchanged, because times are measured in the jail."""


def placed(order: JailOrder, folder: Path) -> JailOrder:
    """Returns an order with folders below `folder`, a user, and the protections of this machine."""
    protections = offered()
    inputs = tuple(Path(path) for path in order.inputs)
    output, scratch = folder / "output", folder / "scratch"
    output.mkdir(mode=0o700)
    scratch.mkdir(mode=0o700)
    open_to_all = users.is_open_to_all(inputs, folder)
    # A child gets the right to read what others may not only where Landlock holds it.
    may_change = is_root() and (open_to_all or JailProtection.LANDLOCK in protections)
    uid = users.free_uid() if may_change else None
    if uid is not None:
        folder.chmod(0o711)
        for each in (output, scratch):
            os.chown(each, uid, uid)
    missing = {JailProtection.OWN_USER} if uid is None else set()
    return msgspec.structs.replace(
        order,
        inputs=tuple(str(path.resolve()) for path in inputs),
        output=str(output.resolve()),
        scratch=str(scratch.resolve()),
        uid=uid,
        reads_as_root=uid is not None and not open_to_all,
        expected=tuple(sorted(protections - missing)),
    )


def start(
    order: JailOrder, told: int, output: int, more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts the child of a placed order, which is still to be written to its standard input.

    Args:
        order: The order.
        told: The descriptor that the child's messages go to.
        output: The child's standard output and error, as `subprocess` takes them.
        more: Further variables of its environment.
    """
    path = [entry for entry in sys.path if entry]
    folders = ("HOME", "TMPDIR", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR")
    environment = {
        **_QUIET,
        **{name: os.environ[name] for name in _THREADS if name in os.environ},
        "PYTHONPATH": os.pathsep.join(str(Path(entry).resolve()) for entry in path),
        **dict.fromkeys(folders, order.scratch),
        **(more or {}),
    }
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "catenary_services.jail.child", str(told)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=(told,) if order.channel is None else (told, order.channel),
        env=environment,
        cwd=order.scratch,
        start_new_session=True,
    )
    # Where memory runs out, the kernel ends it before whoever started it.
    with suppress(OSError):
        Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000")
    return child


def give(order: JailOrder, process: subprocess.Popen[bytes]) -> None:
    """Writes an order to its child."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(order))
        process.stdin.close()


def end(order: JailOrder, process: subprocess.Popen[bytes]) -> None:
    """Kills every process of a child, and waits for it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    if order.uid is not None:
        users.end_all_of(order.uid)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
