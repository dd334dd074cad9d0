"""What of an import needs PyTorch and transformers; it runs in the jail.

Turns a GGUF file into a folder of config, tokenizer and safetensors, and has the onnxruntime-genai
builder make a graph per precision. The libraries' chatter is shown only if something fails.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from services.jail.child import Room

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
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    facts: dict[str, Any] = quantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        facts.pop(name, None)
    with torch.device("meta"):
        plain = type(quantised)(type(quantised.config)(**facts))
    plain.load_state_dict(quantised.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder, max_shard_size="1TB")
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder)


def build_graph(folder: Path, precision: str, target: Path) -> None:
    """Writes `onnx-<precision>/` into `target`."""
    with tempfile.TemporaryDirectory() as cache:
        sys.argv = [
            _BUILDER, "-i", str(folder), "-o", str(target / f"onnx-{precision}"), "-p", precision,
            "-e", "cpu", "-c", cache, "--extra_options", "hf_remote=false",
        ]  # fmt: skip
        runpy.run_module(_BUILDER, run_name="__main__", alter_sys=True)


def graph_in_jail(job: bytes, room: Room) -> bytes:
    """Writes `onnx-<precision>/` for the model in the first input; the job names the precision."""
    precision = job.decode()
    room.tell(f"building the {precision} graph")
    build_graph(room.inputs[0], precision, room.output)
    return b""
