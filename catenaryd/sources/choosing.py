"""The files of a source that are the model, chosen by their names alone.

The first rule that fits decides:

1. a file that was asked for;
2. config.json and safetensors: the weights that transformers would load, tokenizer and template;
3. GGUF files: the only one, else the first by `GGUF_ORDER`;
4. ONNX files: model.onnx, onnx/model.onnx, or the only one, with the files of its weights;
5. the only .pt2 file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from catenary_agent.decoders.importing.import_worker import COPIED
from catenary_services.errors import InvalidInput
from catenaryd.sources.listing import ListedFile

GGUF_ORDER = ("q4_k_m", "q4_k_s", "q4_0", "q8_0", "f16", "bf16", "f32")
"""The ends of names in the order in which one of several GGUF files is taken."""
_TEXTS = (
    *COPIED,
    "vocab.txt",
    # how sentence-transformers makes embeddings
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PARTS = re.compile(r"-\d+-of-\d+\.gguf$")
_PATH = re.compile(r"[^/\\\x00-\x1f]+(/[^/\\\x00-\x1f]+){0,15}")
_SHOWN = 12


class ModelForm(StrEnum):
    """The forms a model may come in."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    ONNX = "onnx"
    EXPORTED = "pt2"


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """The files of a source that are the model."""

    form: ModelForm
    main: str
    """The path that names the model: config.json, or its only file."""
    files: tuple[ListedFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(each.size for each in self.files)


def choose(files: Sequence[ListedFile], wanted: str, source: str) -> ChosenFiles:
    """Returns the files of a source that are the model.

    Args:
        files: All files of the source.
        wanted: The path of the one that was asked for; empty if the rules choose.
        source: The source, for errors.

    Raises:
        InvalidInput: There is no model, or several and nothing says which one is meant.
    """
    known = {each.path: each for each in files if _is_plain(each.path)}
    if wanted:
        return _asked_for(known, wanted, source)
    top = [path for path in known if "/" not in path]
    if "config.json" in known and any(path.endswith(".safetensors") for path in top):
        return _weights(known, top)
    if ggufs := sorted(path for path in known if path.endswith(".gguf")):
        return _chosen(known, _gguf(ggufs, source))
    for form in (".onnx", ".pt2"):
        if graphs := sorted(path for path in known if path.endswith(form)):
            return _chosen(known, _graph(graphs, source))
    shown = ", ".join(sorted(known)[:_SHOWN]) or "nothing"
    raise InvalidInput(
        "source",
        f"{source} has no config.json with safetensors, no GGUF, ONNX or .pt2 file; it has {shown}",
    )


def _is_plain(path: str) -> bool:
    parts = path.split("/")
    return bool(_PATH.fullmatch(path)) and not any(part in ("", ".", "..") for part in parts)


def _asked_for(known: dict[str, ListedFile], wanted: str, source: str) -> ChosenFiles:
    if wanted not in known:
        shown = ", ".join(sorted(known)[:_SHOWN]) or "nothing"
        raise InvalidInput("file", f"{source} has no file {wanted!r}; it has {shown}")
    if wanted.endswith(".safetensors"):
        raise InvalidInput("file", "one file of safetensors is no model: name the folder it is in")
    return _chosen(known, wanted)


def _chosen(known: dict[str, ListedFile], main: str) -> ChosenFiles:
    """Returns a model of one file, with the files of an ONNX model's weights beside it."""
    forms = {".gguf": ModelForm.GGUF, ".onnx": ModelForm.ONNX, ".pt2": ModelForm.EXPORTED}
    form = next((form for ending, form in forms.items() if main.endswith(ending)), None)
    if form is None:
        raise InvalidInput("file", f"{main!r} ends with none of {', '.join(forms)}")
    if _PARTS.search(main):
        raise InvalidInput("file", f"{main!r} is a part of a GGUF model: join the parts first")
    paths = [main]
    if form is ModelForm.ONNX:
        # Exporters name the files of weights after the graph: model.onnx.data, model.onnx_data_1.
        stem = main.removesuffix(".onnx")
        beside = {f"{stem}.data", f"{stem}.bin"}
        paths += sorted(
            path for path in known if path != main and (path.startswith(main) or path in beside)
        )
    return ChosenFiles(form, main, tuple(known[path] for path in paths))


def _weights(known: dict[str, ListedFile], top: list[str]) -> ChosenFiles:
    # Some repositories have the same weights a second time, under other names.
    weights = [path for path in top if _WEIGHTS.fullmatch(path)]
    weights = weights or [path for path in top if path.endswith(".safetensors")]
    if _INDEX in known and len(weights) > 1:
        weights = [path for path in weights if path != "model.safetensors"]
    texts = [path for path in (*_TEXTS, _INDEX) if path in known]
    paths = [*texts, *sorted(weights)]
    return ChosenFiles(ModelForm.SAFETENSORS, "config.json", tuple(known[path] for path in paths))


def _gguf(paths: list[str], source: str) -> str:
    whole = [path for path in paths if not _PARTS.search(path)]
    if len(whole) == 1:
        return whole[0]
    for name in GGUF_ORDER:
        for path in whole:
            if path.lower().removesuffix(".gguf").endswith((f"-{name}", f".{name}", f"_{name}")):
                return path
    raise _ambiguous(whole or paths, source)


def _graph(paths: list[str], source: str) -> str:
    for usual in ("model.onnx", "onnx/model.onnx"):
        if usual in paths:
            return usual
    if len(paths) > 1:
        raise _ambiguous(paths, source)
    return paths[0]


def _ambiguous(paths: list[str], source: str) -> InvalidInput:
    shown = ", ".join(paths[:_SHOWN]) + (" .." if len(paths) > _SHOWN else "")
    return InvalidInput("file", f"{source} has several models, name one of {shown}")
