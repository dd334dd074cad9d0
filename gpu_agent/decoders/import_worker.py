"""What of an import needs PyTorch and transformers, as a process of its own.

    python -m gpu_agent.decoders.import_worker '{"folder": ..., "gguf": ..., "precisions": [..]}'

Turns a GGUF file into a folder of config, tokenizer and safetensors, and has the onnxruntime-genai
builder make a graph per precision. Says on stdout, line by line, what it is doing. The libraries'
own chatter goes to stderr, which is shown only if something fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

_BUILDER = "onnxruntime_genai.models.builder"


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as float32 safetensors, with config and tokenizer.

    `transformers` reads the file, whatever its quantisation; the model it makes refuses to be
    saved as plain weights, so a plain one of the same class takes its tensors over.
    """
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers reads the whole file three times and maps names once per module: remembering
    # both saves two thirds of the time.
    for name in ("GGUFReader", "get_tensor_name_map"):
        vars(gguf)[name] = lru_cache(vars(gguf)[name])
    quantised = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    facts: dict[str, Any] = quantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        facts.pop(name, None)
    with torch.device("meta"):
        plain = type(quantised)(type(quantised.config)(**facts))
    plain.load_state_dict(quantised.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder, max_shard_size="1TB")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def build_graph(folder: Path, precision: str) -> None:
    """Writes `onnx-<precision>/` beside the weights."""
    with tempfile.TemporaryDirectory() as cache:
        sys.argv = [
            _BUILDER, "-i", str(folder), "-o", str(folder / f"onnx-{precision}"), "-p", precision,
            "-e", "cpu", "-c", cache,
        ]  # fmt: skip
        runpy.run_module(_BUILDER, run_name="__main__", alter_sys=True)


def main(job: dict[str, Any]) -> None:
    """Does what the job says."""
    folder = Path(job["folder"])
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # native code prints there, too
    with contextlib.redirect_stdout(sys.stderr):
        if job["gguf"]:
            results.write("reading the weights\n")
            convert_gguf(Path(job["gguf"]), folder)
        for precision in job["precisions"]:
            results.write(f"building the {precision} graph\n")
            build_graph(folder, precision)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
