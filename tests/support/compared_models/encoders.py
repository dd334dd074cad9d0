"""Encoders of every family, what their own library answers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FAMILIES = ("bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EncoderCase:
    """A model of a family, and what is done with the output of its network."""

    family: str
    pooling: str = "mean"
    """The pooling: "mean", "cls" or "max"; "" for a head that classifies."""
    normalises: bool = True
    is_slow: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What `write_encoder` is to write beside the network."""
        if not self.pooling:
            return {"labels": 3}
        kinds = _MODULES if self.normalises else _MODULES[:2]
        folders = ("", "1_Pooling", "2_Normalize")
        return {
            "modules": list(zip(kinds, folders, strict=False)),
            "1_Pooling__config": {f"pooling_mode_{_NAMES[self.pooling]}": True},
        }


_NAMES = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
CASES = {
    **{f"{family}, mean": EncoderCase(family) for family in FAMILIES},
    "bert, cls": EncoderCase("bert", "cls", normalises=False),
    "bert, max": EncoderCase("bert", "max", normalises=False),
    **{
        f"{family}, classes": EncoderCase(family, "", is_slow=family != "bert")
        for family in FAMILIES
    },
}
"""By what is special of them, as docs/families.md has it."""


def tokens_of(folder: Path, texts: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """The tokens that the model's own tokenizer makes, filled up to the longest text."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]"
    )
    tokenizer.backend_tokenizer.no_truncation()
    made = tokenizer(list(texts), padding=True, return_tensors="pt", return_token_type_ids=True)
    return {name: made[name] for name in names}


def expected(folder: Path, tokens: dict[str, Any], case: EncoderCase) -> np.ndarray:
    """What `transformers`, and the README of a sentence transformer behind it, answers."""
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification

    with torch.no_grad():
        if not case.pooling:
            model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
            return np.asarray(model(**tokens).logits)
        vectors = AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).expand(vectors.size()).float()
        vector = vectors[:, 0]
        if case.pooling == "mean":
            vector = (vectors * mask).sum(1) / torch.clamp(mask.sum(1), min=1e-9)
        elif case.pooling == "max":
            vectors[mask == 0] = -1e9
            vector = vectors.max(1)[0]
        if case.normalises:
            vector = torch.nn.functional.normalize(vector, p=2, dim=1)
    return np.asarray(vector)


# ---- what is refused ----


def _file(name: str, document: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(document))

    return change


def _config(**values: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def _pooling(**modes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        _file("modules.json", _modules("Transformer", "Pooling"))(folder)
        _file("1_Pooling/config.json", modes)(folder)

    return change


def _modules(*kinds: str) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling"} for kind in kinds]


def _without_tensor(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


REFUSED: dict[str, Callable[[Path], object]] = {
    "another family": _config(model_type="deberta-v2"),
    "Dense": _file("modules.json", _modules("Transformer", "Pooling", "Dense")),
    "modules in another order": _file("modules.json", _modules("Pooling", "Transformer")),
    "a weighted mean": _pooling(pooling_mode_weightedmean_tokens=True),
    "two poolings": _pooling(pooling_mode_cls_token=True, pooling_mode_max_tokens=True),
    "pairs of texts": _config(sbert_ce_default_activation_function="torch.nn.Sigmoid"),
    "a prompt before each text": _file(
        "config_sentence_transformers.json",
        {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
    ),
    "lower case before the tokenizer": _file("sentence_bert_config.json", {"do_lower_case": True}),
    "relative positions": _config(position_embedding_type="relative_key"),
    "a head for each token": _config(architectures=["BertForTokenClassification"]),
    "more layers than the files have": _config(num_hidden_layers=4),
    "fewer layers than the files have": _config(num_hidden_layers=2),
    "a tensor is missing": _without_tensor,
    "no tokenizer": _without_tokenizer,
}
"""Changes of the folder of a BERT, by what is special of it."""
