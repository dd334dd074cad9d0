"""Models with published shapes and random weights, for benchmarks: `catenaryd make-model`.

They are written in the form in which models are published: a folder of config.json, tokenizer and
safetensors shards. At most a piece of one tensor is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from catenary_agent.decoders.model_files.weights import INDEX_FILE, WEIGHTS_FILE, header_bytes
from catenary_agent.decoders.synthetic.model_shapes import RandomTensor, shape_of, tensors_of
from catenary_agent.decoders.synthetic.random_weights import (
    ITEM_BYTES,
    constant_bytes,
    random_pieces,
)
from catenary_services.errors import InvalidInput

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The name of each datatype in safetensors files, by its name in `transformers`."""
SHARD_BYTES = 1 << 30
BEGIN, END, PAD = 0, 1, 2
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
_BYTES = 256
_LETTERS = 26
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """The description of a model to be written."""

    like: str
    """The name of a shape in `model_shapes.SHAPES`."""
    seed: int = 0
    dtype: str = "bfloat16"
    """A datatype in `DTYPES`."""
    layers: int = 0
    """Number of layers; 0 for that of the published model."""
    shard_bytes: int = SHARD_BYTES
    """The largest shard, except one that contains a single tensor."""


def write_random_model(
    folder: Path, model: RandomModel, progress: Callable[[str], None] = lambda _: None
) -> int:
    """Writes a model into a folder that is absent or empty; returns the bytes of its weights.

    Raises:
        InvalidInput: The shape or datatype is unknown, or the folder is not empty.
    """
    if model.dtype not in DTYPES:
        raise InvalidInput("dtype", f"{model.dtype!r} is none of {', '.join(DTYPES)}")
    config = shape_of(model.like, model.layers)
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput("folder", f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, config["vocab_size"])
    shards = _shards(list(tensors_of(config)), model)
    names = _shard_names(len(shards))
    for name, tensors in zip(names, shards, strict=True):
        progress(f"writing {name} of {len(shards)}")
        _write_shard(folder / name, tensors, model)
    total = sum(_bytes(tensor, model) for shard in shards for tensor in shard)
    if len(shards) > 1:
        places = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})
    facts = {"torch_dtype": model.dtype, "bos_token_id": BEGIN, "eos_token_id": END}
    # Written last: a folder with a config is complete.
    _write_json(folder / "config.json", config | facts | {"pad_token_id": PAD})
    return total


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS_FILE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _shards(tensors: Sequence[RandomTensor], model: RandomModel) -> list[list[RandomTensor]]:
    shards: list[list[RandomTensor]] = [[]]
    size = 0
    for tensor in tensors:
        more = _bytes(tensor, model)
        if shards[-1] and size + more > model.shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += more
    return shards


def _bytes(tensor: RandomTensor, model: RandomModel) -> int:
    return prod(tensor.shape) * ITEM_BYTES[DTYPES[model.dtype]]


def _write_shard(file: Path, tensors: Sequence[RandomTensor], model: RandomModel) -> None:
    kind = DTYPES[model.dtype]
    with file.open("wb") as out:
        out.write(header_bytes({t.name: (kind, t.shape, _bytes(t, model)) for t in tensors}))
        for tensor in tensors:
            for piece in _pieces(tensor, model):
                out.write(piece)


def _pieces(tensor: RandomTensor, model: RandomModel) -> Iterator[bytes | memoryview]:
    kind, count = DTYPES[model.dtype], prod(tensor.shape)
    if tensor.spread == 0:
        yield constant_bytes(1.0, count, kind)
        return
    yield from random_pieces(model.seed, tensor.name, count, tensor.spread, kind)


def _write_tokenizer(folder: Path, words: int) -> None:
    """Writes a tokenizer that reads text byte by byte, and has a word for every other token.

    A model with random weights generates any token of its vocabulary, so each must have a text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {text: number for number, text in enumerate(_SPECIAL)}
    letters = _letters_of_bytes()
    vocabulary |= {letters[byte]: len(_SPECIAL) + byte for byte in range(_BYTES)}
    space = letters[ord(" ")]
    vocabulary |= {space + _word(number): number for number in range(len(vocabulary), words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    begin, end, pad = _SPECIAL
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": begin,
            "eos_token": end,
            "pad_token": pad,
            "add_bos_token": False,
        },
    )
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def _letters_of_bytes() -> dict[int, str]:
    """Returns the letters that GPT-2 has for bytes: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(_BYTES) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(_BYTES + at) for at, byte in enumerate(others)}


def _word(number: int) -> str:
    """Returns letters that are unique to a number."""
    text = ""
    while number:
        number, letter = divmod(number - 1, _LETTERS)
        text = chr(ord("a") + letter) + text
    return text


def _write_json(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=1) + "\n")
