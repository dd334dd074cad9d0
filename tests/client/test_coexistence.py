"""What lives beside the SDK in one process, and what it must not bring along."""

from __future__ import annotations

import os
import subprocess
import sys

from source_roots import IMPORT_PATH

FORBIDDEN = {
    "aiohttp",
    "catenary_agent",
    "catenary_gateway",
    "catenary_scheduler",
    "catenary_services",
    "catenary_simulator",
    "catenaryd",
    "onnxruntime",
    "opentelemetry",
    "pydantic",
    "redis",
    "torch",
    "uvloop",
    "yaml",
}


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(statement: str) -> set[str]:
    listing = run(f"{statement}\nimport sys\nprint(*sorted(sys.modules))")
    return {name.partition(".")[0] for name in listing.split()}


def test_the_sdk_brings_no_server_package_along():
    modules = imported("import catenary")
    assert "catenary" in modules
    assert not modules & FORBIDDEN
    assert not modules & {"typer", "rich", "PIL"}


def test_the_command_brings_no_server_package_along():
    assert not imported("import catenary.command_line") & (FORBIDDEN | {"PIL"})


TOGETHER = """
import sys
{imports}
import numpy as np
x = np.arange(6, dtype=np.float32).reshape(2, 3)
with catenary.Client(sys.argv[1]) as ours:
    np.testing.assert_array_equal(ours.infer("net", {{"x": x}})["x"], x)
with triton.InferenceServerClient(sys.argv[1]) as theirs:
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    np.testing.assert_array_equal(theirs.infer("net", [tensor]).as_numpy("x"), x)
print("both")
"""
IMPORTS = ["import catenary", "import tritonclient.grpc as triton"]


def test_tritonclient_lives_in_the_same_process_whichever_comes_first(server):
    for imports in (IMPORTS, IMPORTS[::-1]):
        script = TOGETHER.format(imports="\n".join(imports))
        assert run(script, server.target) == "both\n"
