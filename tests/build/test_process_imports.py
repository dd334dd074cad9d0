"""What each process imports before anybody asks for more: libraries are memory in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest

EXPORTS_SPANS = "opentelemetry.sdk.trace"
READS_CERTIFICATES = "cryptography.x509"
SHOWS_TRACEBACKS = "rich"
EDITS_GRAPHS = ("onnx", "onnx_ir", "sympy")
COMPUTES = ("torch", "onnxruntime", "transformers", "scipy")
SPEAKS_HTTP = "aiohttp"
RUNS_MODEL_FILES = ("tokenizers", "jinja2")
READS_TEXTS = (*RUNS_MODEL_FILES, "llguidance")
EVERYWHERE = {EXPORTS_SPANS, READS_CERTIFICATES, SHOWS_TRACEBACKS, *EDITS_GRAPHS, "pytest"}

LACKS = {
    "catenary_gateway.process": {*EVERYWHERE, *COMPUTES, *RUNS_MODEL_FILES, "redis"},
    "catenary_scheduler.process": {*EVERYWHERE, *COMPUTES, SPEAKS_HTTP, *READS_TEXTS},
    "catenary_agent.process": {*EVERYWHERE, *COMPUTES, SPEAKS_HTTP, *READS_TEXTS, "redis"},
    # An agent that serves ONNX models: what cuts a model runs in a process of its own.
    "catenary_agent.executors.onnx_part": {*EVERYWHERE, "torch", SPEAKS_HTTP, *READS_TEXTS},
}


@pytest.mark.parametrize("module", LACKS)
def test_a_process_imports_no_library_that_it_does_not_use(module: str) -> None:
    source = f"import sys, {module}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True
    )
    assert LACKS[module] & set(done.stdout.split()) == set()
    assert module in done.stdout.split()


def test_logging_leaves_rich_to_whoever_wants_it() -> None:
    source = "import sys, catenary_services.log\nassert 'rich' not in sys.modules\nimport rich.text"
    subprocess.run([sys.executable, "-c", source], timeout=60, check=True)
