"""The part of an encoder's import that runs in the jail: it reads files of strangers.

`transformers` loads the network, and PyTorch's exporter writes it as a graph from tokens to the
answer, with what sentence-transformers would do behind the network (pooling, normalisation) as its
last nodes. What the configuration says and this module does not understand is refused by its name.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from catenary_services.bounded_files import LARGEST_CONFIG_BYTES, read_bounded
from catenary_services.errors import InvalidInput
from catenary_services.jail.child import JailWorkspace

if TYPE_CHECKING:
    import torch

GRAPH_FILE = "model.onnx"
COPIED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
FAMILIES = ("bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")
"""The values of `model_type` that are imported."""
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}
_CLASSIFIER = "ForSequenceClassification"
_WITHOUT_HEAD = ("Model", "ForMaskedLM", "ForPreTraining")
"""The endings of classes whose output is made of the vectors of tokens."""
_OF_PAIRS = ("sbert_ce_default_activation_function", "sentence_transformers")
"""Keys that sentence-transformers writes for models that judge pairs of texts."""
_UNUSED = ("pooler.",)
"""The beginnings of tensors whose absence changes nothing, since nobody reads what they make."""
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_LEAST = 1e-9
"""The least number that a sum is divided by, as in sentence-transformers."""


class ImportedEncoder(msgspec.Struct, frozen=True):
    """The answer of the jail; the graph and the tokenizer are in its output folder."""

    text_tokens: int


class EncoderAnswer(msgspec.Struct, frozen=True):
    """The way in which an answer is made of the output of an encoder's network."""

    output: str = "sentence_embedding"
    """The name of the model's output: as above, or "logits" of classes."""
    pooling: str = "mean"
    """The way in which one vector is made of those of all tokens: "mean", "max" or "cls"."""
    normalises: bool = False
    """True if the vector is divided by its length."""


def export_in_jail(_: bytes, room: JailWorkspace) -> bytes:
    """Writes the graph of the model in the first input; answers with `ImportedEncoder`."""
    source, folder = room.inputs[0], room.output
    config = _document(source, "config.json")
    if config.get("model_type") not in FAMILIES:
        text = f"model_type {config.get('model_type')!r} is none of {', '.join(FAMILIES)}"
        raise InvalidInput("config.json", text)
    _check_config(source, config)
    if not (source / "tokenizer.json").is_file():
        raise InvalidInput("source", "has no tokenizer.json")
    head, tokens = head_of(source, config), text_tokens(source, config)
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    room.tell("writing the graph")
    _export(source, config, head, folder / GRAPH_FILE)
    return msgspec.json.encode(ImportedEncoder(tokens))


def _check_config(source: Path, config: dict[str, Any]) -> None:
    """Raises InvalidInput if a file says something that would be left out of the graph."""
    positions = config.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        text = f"position_embedding_type {positions!r} is not computed by transformers"
        raise InvalidInput("config.json", text)
    for key in _OF_PAIRS:
        if config.get(key):
            text = f"{key!r} is of a model that judges pairs of texts; a request has single ones"
            raise InvalidInput("config.json", text)
    prompt = _document(source, "config_sentence_transformers.json").get("default_prompt_name")
    if prompt is not None:
        text = f"default_prompt_name {prompt!r} would put a prompt before each text"
        raise InvalidInput("config_sentence_transformers.json", text)


def head_of(source: Path, config: dict[str, Any]) -> EncoderAnswer:
    """Returns what the files of a model say is done with the output of its network.

    Raises:
        InvalidInput: They say something that is not understood; the field is the file.
    """
    classes = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith(_CLASSIFIER) for name in classes):
        return EncoderAnswer(output="logits")
    if not (source / "modules.json").is_file():
        for name in classes:
            if not name.endswith(_WITHOUT_HEAD):
                raise InvalidInput("config.json", f"the head of {name!r} is not exported")
        return EncoderAnswer()  # as sentence-transformers takes a folder without its own files
    modules = _document(source, "modules.json", list)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in _KNOWN_MODULES:
            raise InvalidInput("modules.json", f"{kind!r} is none of {', '.join(_KNOWN_MODULES)}")
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise InvalidInput("modules.json", f"has {', '.join(kinds)} in this order")
    pooling = _document(source, f"{modules[1].get('path')}/config.json")
    said = pooling.get("pooling_mode")
    chosen = [said] if said else [name for name, on in pooling.items() if on is True]
    chosen = [str(_POOLINGS.get(name, name)) for name in chosen if name != "include_prompt"]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS.values():
        raise InvalidInput("pooling", f"{', '.join(chosen) or 'nothing'} is not mean, max or cls")
    return EncoderAnswer(pooling=chosen[0], normalises="Normalize" in kinds)


def text_tokens(source: Path, config: dict[str, Any]) -> int:
    """Returns the most tokens of a text, as the model's own library takes them.

    Raises:
        InvalidInput: A file says something that is not understood.
    """
    positions = int(config.get("max_position_embeddings", 512))
    # These families count positions from behind the padding's number on.
    first = int(config.get("pad_token_id", 1)) + 1 if "roberta" in str(config["model_type"]) else 0
    most = [positions - first]
    told = _document(source, "tokenizer_config.json").get("model_max_length")
    sentences = _document(source, "sentence_bert_config.json")
    if sentences.get("do_lower_case"):
        text = "do_lower_case is not done before the tokenizer, which may do it itself"
        raise InvalidInput("sentence_bert_config.json", text)
    limits = [sentences.get("max_seq_length"), told]
    most += [int(limit) for limit in limits if isinstance(limit, int | float)]
    return min(most)


def _export(source: Path, config: dict[str, Any], head: EncoderAnswer, file: Path) -> None:
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if head.output == "logits" else AutoModel
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        # The exporter warns about its own internals, which do not concern the user.
        warnings.simplefilter("ignore")
        try:
            network, loaded = kind.from_pretrained(
                source,
                output_loading_info=True,
                dtype=torch.float32,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except Exception as error:  # transformers raises whatever its readers raise
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise InvalidInput(source.name, f"cannot be loaded: {text}") from None
        _check_loaded(loaded)
        names = ["input_ids", "attention_mask"]
        if config.get("type_vocab_size", 0) > 1 and config["model_type"] in ("bert", "electra"):
            names.append("token_type_ids")
        ones = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
        sizes = {0: "batch", 1: "length"}
        torch.onnx.export(
            _with_head(network.eval(), names, head).eval(),
            ones,
            str(file),
            input_names=names,
            output_names=[head.output],
            # One entry for the one variadic argument.
            dynamic_shapes=(tuple(dict(sizes) for _ in names),),
            dynamo=True,
            verbose=False,
        )


def _check_loaded(loaded: dict[str, Any]) -> None:
    """Raises InvalidInput unless layers have exactly the tensors that the files have.

    `transformers` makes up missing ones, and leaves out those it has no use for.
    """
    for name in sorted(map(str, loaded["missing_keys"])):
        if not any(f".{part}" in f".{name}" for part in _UNUSED):
            raise InvalidInput(name, "is not in the model's files")
    for name in sorted(map(str, loaded["unexpected_keys"])):
        if ".layer." in f".{name}":
            raise InvalidInput(name, "is in the model's files, and nobody computes with it")


def _with_head(network: Any, names: list[str], head: EncoderAnswer) -> torch.nn.Module:
    import torch

    class Encoder(torch.nn.Module):
        """The network, with what is done with its output."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, *tokens: torch.Tensor) -> torch.Tensor:
            given = dict(zip(names, tokens, strict=True))
            answer = self.network(**given)
            if head.output == "logits":
                logits: torch.Tensor = answer.logits
                return logits
            vectors: torch.Tensor = answer.last_hidden_state
            vector = pooled(vectors, given["attention_mask"], head.pooling)
            return torch.nn.functional.normalize(vector, dim=1) if head.normalises else vector

    return Encoder()


def pooled(vectors: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Returns one vector for each text, made of those of its tokens."""
    if pooling == "cls":
        return vectors[:, 0]
    counts = mask.unsqueeze(-1).to(vectors.dtype)
    if pooling == "max":
        return vectors.masked_fill(counts == 0, -1e9).max(1).values
    return (vectors * counts).sum(1) / counts.sum(1).clamp(min=_LEAST)


def _document(source: Path, name: str, kind: type[Any] = dict) -> Any:
    """Returns a JSON file of the source; an empty one where it is absent."""
    try:
        path = (source / name).resolve()
        if not path.is_relative_to(source.resolve()):
            raise ValueError("is outside the folder")
        document = json.loads(read_bounded(path, LARGEST_CONFIG_BYTES))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(name, f"cannot be read: {error}") from None
    if not isinstance(document, kind):
        raise InvalidInput(name, f"is no JSON {kind.__name__}")
    return document
