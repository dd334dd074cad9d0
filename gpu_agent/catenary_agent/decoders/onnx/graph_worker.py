"""The building of a model's ONNX graph, run in the jail by imports and for further precisions."""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

from catenary_services.jail.child import JailWorkspace

_BUILDER = "onnxruntime_genai.models.builder"


def build_graph(folder: Path, precision: str, target: Path) -> None:
    """Writes the graph of a model as `onnx-<precision>/` into `target`."""
    with tempfile.TemporaryDirectory() as cache:
        sys.argv = [
            _BUILDER,
            "-i",
            str(folder),
            "-o",
            str(target / f"onnx-{precision}"),
            "-p",
            precision,
            "-e",
            "cpu",
            "-c",
            cache,
            "--extra_options",
            "hf_remote=false",
        ]
        runpy.run_module(_BUILDER, run_name="__main__", alter_sys=True)


def graph_in_jail(job: bytes, room: JailWorkspace) -> bytes:
    """Writes `onnx-<precision>/` for the model in the first input; the job is the precision."""
    precision = job.decode()
    room.tell(f"building the {precision} graph")
    build_graph(room.inputs[0], precision, room.output)
    return b""
