"""Small random language models of every family, in the form they are published in."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from catenary_agent.decoders.importing import engine_models, importing
from catenary_agent.decoders.onnx import building
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from small_models.jail_here import run_here

VOCABULARY = 160
LAYERS = 6
FAMILIES = ("llama2", "llama3", "mistral", "qwen2", "qwen3")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def random_model(family: str) -> Any:
    """Returns a model with weights that make its tokens depend on the whole context."""
    import torch
    import transformers as t

    configs = {
        "llama2": lambda: t.LlamaConfig(**{**_SIZES, "num_key_value_heads": 4}),
        "llama3": lambda: t.LlamaConfig(
            **_SIZES | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}
        ),
        "mistral": lambda: t.MistralConfig(**_SIZES, head_dim=16, sliding_window=None),
        "qwen2": lambda: t.Qwen2Config(**_SIZES | {"tie_word_embeddings": True}),
        "qwen3": lambda: t.Qwen3Config(**_SIZES, head_dim=32),
    }
    torch.set_num_threads(1)  # two on cores that others use are slower than one
    torch.manual_seed(7)
    model = t.AutoModelForCausalLM.from_config(configs[family](), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("bias"):  # they begin as zeros: nobody would notice them missing
                weights.normal_(0.0, 0.3)
    return model


def write_folder(folder: Path, family: str, *, dtype: str = "float32", shards: bool = False) -> Any:
    """Writes config, weights and tokenizer as published models have them; returns the model."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = random_model(family).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return model.float()


def copied_llama(target: Path) -> tuple[ModelRepository, ModelKey]:
    """Copies the repository of `imported_llama` to `target`, for a test that changes it."""
    source, key, _ = imported_llama()
    shutil.copytree(source.root, target, ignore=shutil.ignore_patterns(".*"))
    return ModelRepository(target), key


@contextmanager
def worker_in_this_process() -> Iterator[None]:
    """The jail of imports as a call: no process that loads PyTorch again for each model."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (importing, building, engine_models):
            patch.setattr(module, "run_jailed", run_here)
        yield


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Returns the likeliest tokens after `prompt`, by the whole model, without any cache."""
    import torch

    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@cache
def imported_llama() -> tuple[ModelRepository, ModelKey, Any]:
    """Returns a tiny model both libraries run, and the same as `transformers` runs it.

    It is imported once for all tests of this process, which change nothing of it.
    """
    folder = Path(tempfile.mkdtemp(prefix="cat-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    whole = write_folder(folder / "source", "llama3")
    repository, key = ModelRepository(folder / "models"), ModelKey("tiny", "1")
    with worker_in_this_process():
        options = importing.ImportOptions(session_tokens=64)
        importing.import_decoder(repository, folder / "source", key, options)
    return repository, key, whole


PROMPTS = {n: [(7 * n + 3 * i * i) % 150 + 3 for i in range(2 + 5 * n)] for n in range(1, 7)}
"""By session, for `imported_llama`."""
TOKENS = 16


@cache
def llama_answers() -> dict[int, list[int]]:
    """Returns the first tokens that the whole model says after each of `PROMPTS`."""
    _, _, whole = imported_llama()
    answers = {session: greedy(whole, prompt, TOKENS) for session, prompt in PROMPTS.items()}
    assert len({tuple(answer) for answer in answers.values()}) == len(PROMPTS)
    assert all(len(set(answer)) > 3 for answer in answers.values())  # worth comparing
    return answers
