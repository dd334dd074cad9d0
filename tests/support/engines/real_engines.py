"""SmolLM2 for the engines that `make engines` has installed, and the engines' own servers."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from catenary_agent.decoders.importing.adapters import add_adapters
from catenary_agent.decoders.importing.engine_models import import_engine_model, keep_gguf
from catenary_agent.decoders.importing.importing import ImportOptions
from catenary_agent.decoders.model_files.adapters import CONFIG_FILE, WEIGHTS_FILE
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.demo_language_model import weights_file
from language_model import install

ROOT = Path(__file__).resolve().parents[3]
LOUD = "loud"
"""The name of an adapter that SmolLM2 has in vLLM."""


@dataclass(frozen=True)
class RealEngine:
    """An engine that is installed, and how it serves SmolLM2."""

    name: str
    arguments: tuple[str, ...]
    is_exact: bool
    """Whether it has the weights of the blocks, in float32."""
    long_tokens: int
    """Tokens of an answer that does not end before it has moved twice."""

    @property
    def python(self) -> Path:
        return ROOT / ".venv-engines" / self.name / "bin" / "python"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an agent that has it; skips the test where nobody has installed it."""
        if not self.python.exists():
            pytest.skip(f"needs {self.name}: make engines")
        return {"device": "cpu", "decoder": self.name, "engine_python": str(self.python)}

    def install(self, models: Path, session_tokens: int, sessions: int) -> ModelKey:
        """Puts SmolLM2 into a repository, so that this engine serves it, and blocks as well."""
        key, repository = install(models), ModelRepository(models)
        manifest = replace(
            repository.manifest(key),
            engine_arguments=self.arguments,
            session_tokens=session_tokens,
            max_batch=sessions,
        )
        repository.write_manifest(manifest)
        if self.name == "llama_server":
            keep_gguf(repository, key, weights_file(), copies=False)
        else:
            repository.record_content(key)
        return key

    def install_alone(self, models: Path, session_tokens: int, sessions: int) -> ModelKey:
        """Puts SmolLM2 into a repository for this engine alone; for vLLM with the adapter `LOUD`."""
        blocks = models.with_name("blocks")
        key, repository = install(blocks), ModelRepository(models)
        is_gguf = self.name == "llama_server"
        source = weights_file() if is_gguf else ModelRepository(blocks).folder(key)
        options = ImportOptions(session_tokens=session_tokens, max_sessions=sessions)
        import_engine_model(repository, source, key, self.name, options)
        if not is_gguf:
            write_adapter(models.with_name("adapter"), source)
            add_adapters(repository, key, {LOUD: models.with_name("adapter")}, copies=False)
        manifest = replace(repository.manifest(key), engine_arguments=self.arguments)
        repository.write_manifest(manifest)
        repository.record_content(key)
        return key


def write_adapter(folder: Path, model: Path) -> None:
    """Writes a LoRA adapter of random weights, so large that a model says something else."""
    config, random = json.loads((model / "config.json").read_text()), np.random.default_rng(5)
    hidden, rank = config["hidden_size"], 4
    key_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", hidden), ("v_proj", key_size)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (rank, hidden)), ("B", (size, rank))):
                weights = random.normal(0, shape[1] ** -0.5, shape)
                tensors[f"{place}.lora_{part}.weight"] = weights.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / CONFIG_FILE).write_text(json.dumps(said))


REAL_ENGINES = {
    "llama_server": RealEngine("llama_server", (), is_exact=False, long_tokens=500),
    "vllm": RealEngine(
        "vllm", ("--enforce-eager", "--dtype", "float32"), is_exact=True, long_tokens=500
    ),
}


class EngineConnection(http.client.HTTPConnection):
    """A connection to the Unix socket of an engine."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=300)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def answer_of_the_engine(data_dir: Path, asked: dict[str, object]) -> str:
    """Returns what an engine itself answers to a chat, by its own tokenizer and template."""
    (path, *_) = (data_dir / "run").glob("engine-*/engine.sock")
    connection = EngineConnection(path)
    # The only model of either; llama-server takes any name.
    body = json.dumps({"model": "model", **asked})
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    return str(json.loads(connection.getresponse().read())["choices"][0]["message"]["content"])
