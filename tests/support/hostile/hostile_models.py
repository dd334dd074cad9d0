"""Models of strangers in folders of their own, and what happens if somebody prepares or imports one.

`make` writes them; `tried` runs the command a person would.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

MODEL = "m"
CHOSEN = "chosen"
"""The file next to the models that some of them want to write."""
SECRET = "secret"
"""The one that some of them want to read."""
_UNTOUCHED = bytes(400)
_PRIVATE = b"what nobody may read " * 20
_LONGEST_S = 120


def make(folder: Path) -> None:
    """Writes every model; takes some seconds."""
    from hostile import hostile_programs as programs

    folder.mkdir(parents=True)
    chosen, secret = folder / CHOSEN, folder / SECRET
    chosen.write_bytes(_UNTOUCHED)
    secret.write_bytes(_PRIVATE)
    plain = programs.export(programs.Plain(), folder / "m.pt2")

    def from_file(path: Path, *, shared: bool) -> programs.Edit:
        return programs.calls(
            "torch.ops.aten.from_file.default",
            programs.argument("filename", as_string=str(path)),
            programs.argument("shared", as_bool=shared),
            programs.argument("size", as_int=100),
        )

    edits = {
        "writes": from_file(chosen, shared=True),
        "reads": from_file(secret, shared=False),
        "tower": programs.sized(programs.SIZES["a tower of powers"]),
        "terabyte": programs.OPERATORS["a terabyte"],
        "deep": programs.OPERATORS["very deep nesting"],
        "code": programs.OPERATORS["code"],
    }
    for name, edit in edits.items():
        programs.rewritten(plain, _model_file(folder / name, "pytorch_exported"), edit)
    _write_onnx(_model_file(folder / "elsewhere", "onnxruntime_onnx"), secret)
    _write_language_model(folder / "links", secret)


def tried(folder: Path, name: str) -> Counter[str]:
    """Returns what became of one model: "denied" if nothing else did."""
    repository = folder / name
    before = _files_of(repository)
    command = ["prepare", MODEL]
    if name == "links":
        command = ["import-model", str(repository / "source"), "--name", MODEL]
    command += ["--model-repository", str(repository)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "catenaryd", *command],
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Counter(["hangs"])
    if (folder / CHOSEN).read_bytes() != _UNTOUCHED:
        return Counter(["written"])
    if _PRIVATE.decode() in done.stdout + done.stderr or _files_of(repository) != before:
        return Counter(["left something"])
    if "Traceback" in done.stderr:
        return Counter(["fell over"])
    return Counter(["taken" if done.returncode == 0 else "denied"])


def _files_of(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _model_file(repository: Path, platform: str) -> Path:
    from catenary_services.domain.ids import ModelKey
    from catenary_services.domain.model import ModelManifest
    from catenary_services.models.model_repository import ModelRepository

    key, file = ModelKey(MODEL, "1"), f"m.{'pt2' if platform.startswith('py') else 'onnx'}"
    models = ModelRepository(repository)
    models.write_manifest(ModelManifest(key, platform, file, 10**9, 4, False))
    return models.model_file(key)


def _write_onnx(path: Path, secret: Path) -> None:
    """A graph whose weights are another file's bytes, reached from its folder."""
    import onnx

    up = "/".join([".."] * len(path.parent.parts))
    weights = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[100])
    weights.data_location = onnx.TensorProto.EXTERNAL
    for name, value in {"location": f"{up}{secret}", "length": "400"}.items():
        weights.external_data.add(key=name, value=value)
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 100])
        for name in ("x", "y")
    ]
    node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:], [weights])
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())


def _write_language_model(repository: Path, secret: Path) -> None:
    """A tokenizer that is a link to another file, and weights that are all the same bytes."""
    source = repository / "source"
    source.mkdir(parents=True)
    sizes = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }
    (source / "config.json").write_text(json.dumps(sizes))
    (source / "tokenizer.json").symlink_to(secret)
    entry = {"dtype": "F32", "shape": [32, 8], "data_offsets": [0, 1024]}
    header = json.dumps({f"model.layers.{n}.w": entry for n in range(1000)}).encode()
    (source / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(1024)
    )
