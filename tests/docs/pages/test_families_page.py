"""The page of what is served lists every comparison and every refusal that a test makes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")

from compared_models import decoders, encoders, gguf_files, nets, onnx_files
from compared_models.page import Row, refusals, written
from small_models.tiny_decoders import VARIANTS


def test_every_comparison_is_on_the_page_and_no_other() -> None:
    rows = {Row("safetensors", name, "PyTorch") for name in VARIANTS}
    rows |= {Row("safetensors", name, "ONNX Runtime") for name in decoders.GRAPHS}
    rows |= {Row(*case, "PyTorch") for case in gguf_files.CASES}
    rows |= {Row(*case, "ONNX Runtime") for case in gguf_files.GRAPHS}
    rows |= {Row(*case, "ONNX Runtime") for case in onnx_files.CASES | nets.onnx_cases()}
    rows |= {Row(*case, "PyTorch") for case in nets.program_cases()}
    rows |= {Row("encoder", name, "ONNX Runtime") for name in encoders.CASES}
    assert written().keys() == rows


def test_every_refusal_is_on_the_page_and_no_other() -> None:
    tried = {
        "safetensors": decoders.REFUSED,
        "GGUF": gguf_files.REFUSED,
        "ONNX": onnx_files.REFUSED,
        "encoder": encoders.REFUSED,
    }
    cases = {(files, what) for files, each in tried.items() for what in each}
    assert refusals().keys() == cases | nets.REFUSED.keys()
