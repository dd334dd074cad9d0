"""The process of an engine: started on a socket of its own, listened to, and ended.

It gets no secret of the agent: only the variables that a library for computing needs, no network
port, and the model's folder by its path. What it prints is read line by line and bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from catenary_agent.engines.engine_child import NO_ENGINE, SAID
from catenary_agent.engines.requests import EngineCommand
from catenary_services.errors import InternalError, NotSupported, Unavailable
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.engines")
_SCRIPT = Path(__file__).with_name("engine_child.py")
_PASSED = re.compile(
    r"(PATH|HOME|USER|LANG|TZ|TMPDIR|LD_LIBRARY_PATH|LC_\w+|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|VLLM_\w+"
    r"|GGML_\w+|OMP_\w+|MKL_\w+|XDG_CACHE_HOME|TRITON_CACHE_DIR|TORCHINDUCTOR_CACHE_DIR)"
)
"""The variables of the agent that an engine gets."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_FIXED = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}
_LONGEST_LINE = 2_000
_KEPT_LINES = 30
_WORDS = 400
_POLL_S = 0.1
_END_S = 5.0
_LAST_WORDS_S = 1.0
"""Seconds to wait for the last lines of a process that has ended: others may hold its output."""
_LONGEST_FOLDER = 107 - len("/engine-01234567/engine.sock")
"""Bytes of a folder's path below which an address of a socket, which holds 107, has room."""


@dataclass(frozen=True, slots=True)
class StartLimits:
    """The limits on waiting for an engine that starts."""

    silence_s: float
    """Seconds for which nothing may be heard of it."""
    stopping: threading.Event
    """Set if nobody needs the engine any more."""
    progressed: Callable[[], None]
    """Called when something was heard."""


class EngineChild:
    """A running engine. Any thread may call any method."""

    def __init__(self, python: Path, command: EngineCommand, sockets: Path | None) -> None:
        """Makes a folder for the socket; starts nothing yet.

        Args:
            python: The interpreter of the engine's virtual environment.
            command: What the engine is started with; "{socket}" in it stands for the socket's path.
            sockets: The folder for sockets; None for that of temporary files, which also takes the
                place of one whose path is too long.
        """
        if sockets is not None:
            sockets = _short(sockets.absolute())
        # A bare name is looked for in PATH.
        self._python = python if len(python.parts) == 1 else python.absolute()
        self._command = command
        self._folder = Path(tempfile.mkdtemp(prefix="engine-", dir=sockets))
        self.socket = self._folder / "engine.sock"
        """The path of the Unix socket on which the engine listens."""
        self.version = ""
        """The version of the engine; empty until it has said it."""
        self.ended: Callable[[str], None] = lambda why: None
        """Called once, with a sentence, when the process ends without having been told to."""
        self.heard_s = time.monotonic()
        """The moment when the process last printed something, on the monotonic clock."""
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._listener = threading.Thread(target=self._listen, name="engine-output", daemon=True)
        self._is_closing = threading.Event()
        self._is_over = threading.Event()

    def start(self) -> None:
        """Starts the process and the threads that listen to it.

        Raises:
            NotSupported: The interpreter cannot be run.
        """
        arguments = [each.replace("{socket}", str(self.socket)) for each in self._command.arguments]
        try:
            self._process = subprocess.Popen(
                [str(self._python), str(_SCRIPT), self._command.engine, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._environment(),
                start_new_session=True,
            )
        except OSError as error:
            self.close()
            raise NotSupported(f"engine_python {self._python} cannot be run: {error}") from None
        self._listener.start()
        threading.Thread(target=self._await_end, name="engine-end", daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the process; 0 before it is started."""
        return self._process.pid if self._process is not None else 0

    def wait(self, is_ready: Callable[[], bool], limits: StartLimits) -> None:
        """Returns when the engine is ready, which is asked again and again.

        Raises:
            Unavailable: Nobody needs the engine any more.
            NotSupported: The engine is not installed.
            InternalError: The process ended, or has said nothing for too long.
        """
        told_s = self.heard_s = time.monotonic()
        while not is_ready():
            if self._is_over.wait(_POLL_S):
                raise self._failure()
            if self.heard_s > told_s:
                told_s = self.heard_s
                limits.progressed()
            if limits.stopping.is_set():
                raise Unavailable("this agent is stopping")
            if time.monotonic() - self.heard_s > limits.silence_s:
                silent = f"has said nothing for {limits.silence_s:g} s while it started"
                raise InternalError(f"the engine {silent}: {self.last}")

    @property
    def last(self) -> str:
        """The last lines that the process printed, shortened."""
        return " | ".join(list(self._lines)[-6:])[-_WORDS:]

    def close(self) -> None:
        """Ends the process and whatever it started. Idempotent."""
        self._is_closing.set()
        process = self._process
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # it ends by this alone; what follows is for what hangs
            self._kill(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kills the group of a process that was not waited for, so that its number is its own.

        What it started may still hold the device.
        """
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _environment(self) -> dict[str, str]:
        passed = {
            name: value
            for name, value in os.environ.items()
            if _PASSED.fullmatch(name) and not _SECRET.search(name)
        }
        return {**passed, **_FIXED, **self._command.environment}

    def _listen(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            # A line longer than this comes in parts, so that nothing grows without bound.
            while part := process.stdout.readline(_LONGEST_LINE):
                self.heard_s = time.monotonic()
                self._take(part.decode(errors="replace").rstrip())
        except (OSError, ValueError) as error:
            _log.warning("engine_unheard", error=str(error))

    def _await_end(self) -> None:
        """Says that the process has ended, with all that it started.

        Its output does not tell: what it started has that, too. vLLM computes in processes that
        outlive a killed server for as long as they like.
        """
        process = self._process
        assert process is not None
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self._kill(process)
        code = process.wait()
        self._listener.join(_LAST_WORDS_S)
        self._is_over.set()
        if not self._is_closing.is_set():
            _log.warning("engine_ended", engine=self._command.engine, exit_code=code)
            self.ended(f"the engine ended with code {code}: {self.last}")

    def _take(self, line: str) -> None:
        if line.startswith(SAID) and not self.version:
            with contextlib.suppress(ValueError, AttributeError):
                self.version = str(json.loads(line.removeprefix(SAID)).get("version", ""))[:100]
            return
        self._lines.append(line)
        _log.debug("engine_says", line=line)

    def _failure(self) -> NotSupported | InternalError:
        process = self._process
        code = process.returncode if process is not None else None
        if code == NO_ENGINE:
            text = f"engine_python {self._python} has no {self._command.engine} installed"
            return NotSupported(text)
        return InternalError(f"the engine ended with code {code} while it started: {self.last}")


def _short(folder: Path) -> Path | None:
    """Makes a folder and returns it; None if its path is too long for sockets in it."""
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder
