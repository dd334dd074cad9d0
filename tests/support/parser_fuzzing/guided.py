"""The search for inputs that a parser does not cope with: runs where atheris is installed.

    python -m parser_fuzzing.guided TARGET FINDINGS [options of libFuzzer] CORPUS...

A finding does not end the search; one input of each kind is written to FINDINGS, made short.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import atheris
import structlog

_INSTRUMENTED = [
    "catenary_agent",
    "catenary_gateway",
    "catenary_scheduler",
    "catenary_services",
    "gguf",
    "hpack",
    "jinja2",
    "onnx_ir",
]
_SLOWNESS = 4.0
"""Watched code takes so many times as long, on a machine that others use, too."""
_MOST_OF_A_KIND = 1

with atheris.instrument_imports(include=_INSTRUMENTED):
    from parser_fuzzing import corpus

    TARGET = corpus.target_of(sys.argv[1])

from parser_fuzzing.target import Finding, smaller, tried  # noqa: E402

FOUND: set[str] = set()
FINDINGS = Path(sys.argv[2])


def once(data: bytes) -> None:
    """Tries one input, and writes it down if it is a finding of a new kind."""
    finding = tried(TARGET, data, _SLOWNESS)
    if finding is None or finding.kind in FOUND:
        return
    FOUND.add(finding.kind)
    kind = finding.kind

    def is_one(shorter: bytes) -> bool:
        other = tried(TARGET, shorter, _SLOWNESS)
        return other is not None and other.kind == kind

    is_steady = is_one(data)  # unlike what was slow only because the machine was
    if not is_steady and kind in ("time", "memory"):
        return
    write(Finding(smaller(data, is_one) if is_steady else data, kind, finding.told))


def write(finding: Finding) -> None:
    FINDINGS.mkdir(parents=True, exist_ok=True)
    name = corpus.digest(finding.data)
    (FINDINGS / name).write_bytes(finding.data)
    (FINDINGS / f"{name}.txt").write_text(f"{finding.kind}\n\n{finding.told}\n")


logging.disable()
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
for seed in TARGET.seeds():  # what is made once is not part of any input's time
    tried(TARGET, seed, _SLOWNESS)
atheris.Setup([sys.argv[0], *sys.argv[3:]], once)
atheris.Fuzz()
