"""A model's templates and tokenizer in this process, for tests of what they say and not of jails."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from catenary_gateway.generation.text.jailed.model_text import ModelText
from catenary_gateway.generation.text.jailed.orders import TextFiles, TextOrder
from catenary_gateway.generation.text.text_codec import TextCodec
from catenary_gateway.generation.text.token_table import TokenTable


class TextHere:
    """Answers what a worker answers, by calls."""

    def __init__(self, text: ModelText) -> None:
        self._text = text

    async def call(self, order: bytes, more_cpu_s: float = 0.0) -> bytes:
        """Returns the encoded answer to an encoded order."""
        decoded = msgspec.msgpack.decode(order, type=TextOrder)
        return msgspec.msgpack.encode(self._text.answer(decoded))


def files_of(folder: Path, **settings: object) -> TextFiles:
    """Returns the files of a model's folder."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
    found = [(folder / n).read_bytes() if (folder / n).exists() else None for n in names]
    return TextFiles(*found, **settings)  # type: ignore[arg-type]


def model_text(folder: Path, **settings: object) -> ModelText:
    """Reads a model's folder as its worker does."""
    return ModelText.load(files_of(folder, **settings))


def codec_of(text: ModelText | Tokenizer) -> TextCodec:
    """Returns the codec of a model whose worker is this process."""
    text = text if isinstance(text, ModelText) else ModelText(text)
    return TextCodec("here", TextHere(text), text.description())


def table_of(tokenizer: Tokenizer) -> TokenTable:
    """Returns the tokens of a tokenizer."""
    return TokenTable(ModelText(tokenizer).description())
