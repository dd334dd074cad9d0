"""Conversion of text to tokens with the files of a model's folder in the repository.

tokenizer.json is all the tokenizer needs; chat_template.jinja (else the "chat_template" of
tokenizer_config.json) turns a conversation into one text. Both are optional to the platform as a
whole: without a template a model completes texts only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from catenary_gateway.generation.grammar.checker import GrammarChecker
from catenary_gateway.generation.text.chat_template import ChatTemplate, Message
from catenary_services.bounded_files import LARGEST_JSON_BYTES, LARGEST_TEMPLATE_BYTES
from catenary_services.content.hashing import digests
from catenary_services.content.reading import VerifiedReading
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import (
    InvalidInput,
    ModelNotFound,
    NoActivePlan,
    PlanError,
    Unavailable,
)
from catenary_services.log import get_logger
from catenary_services.models.model_repository import ModelRepository

_LONG_CHARACTERS = 2_000
"""Texts with more characters than this are encoded in a thread: a token takes about a
microsecond."""
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The special tokens that `transformers` passes to templates."""

_log = get_logger("catenary_gateway.generation")


class TextCodec:
    """One model's tokenizer and chat template."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, vocabulary_size: int = 0
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self._template = template
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = vocabulary_size or max(vocabulary.values(), default=-1) + 1
        """All token ids lie below this. It is the number of rows of the embedding, which may exceed
        the number of tokens."""
        self._longest_token = max(map(len, vocabulary), default=1)

    @classmethod
    def load(cls, folder: Path, reading: VerifiedReading | None = None) -> TextCodec:
        """Reads the files of a model's folder, which takes a while.

        Args:
            folder: The folder of the model.
            reading: The check of the files; None to use them unchecked.

        Raises:
            OSError: There is no tokenizer.json.
            ValueError: A file is malformed.
            ContentMismatch: A file is not what was recorded.
        """
        files = reading or VerifiedReading(folder.name, folder, None, digests())
        text = files.content("tokenizer.json", LARGEST_JSON_BYTES).decode()
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"tokenizer.json: {error}") from None
        config = _document(files, "tokenizer_config.json")
        source = _template_source(files, config)
        try:
            template = None if source is None else ChatTemplate(source, _special_tokens(config))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error}") from None
        size = _document(files, "config.json").get("vocab_size")
        return cls(tokenizer, template, size if isinstance(size, int) else 0)

    @property
    def chats(self) -> bool:
        """True if there is a chat template."""
        return self._template is not None

    def most_characters(self, tokens: int) -> int:
        """Returns the most characters of a text of `tokens` tokens.

        A longer text never fits and need not be encoded.
        """
        return tokens * self._longest_token

    def render(self, messages: Sequence[Message], variables: Mapping[str, object]) -> str:
        """Returns a conversation as the text that the model continues.

        Raises:
            InvalidInput: There is no template, or it refuses the conversation.
        """
        if self._template is None:
            raise InvalidInput("messages", "this model has no chat template; send it a prompt")
        return self._template.render(messages, variables)

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Returns the tokens of a text.

        Args:
            text: The text, in which special tokens are recognised.
            special_tokens: Whether to add the tokens that the tokenizer puts around a text; False
                for the text of a chat template, which has them.
        """
        if len(text) <= _LONG_CHARACTERS:
            return self.encode_now(text, special_tokens=special_tokens)
        return await asyncio.to_thread(self._encode_aside, text, special_tokens)

    def encode_now(self, text: str, *, special_tokens: bool) -> list[int]:
        """Returns the tokens of a text, encoded on this thread."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def _encode_aside(self, text: str, special_tokens: bool) -> list[int]:
        # Only the library's functions for batches release the interpreter lock.
        (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        ids: list[int] = encoded.ids
        return ids


class TextCodecs:
    """The codecs of all requested models, whose files are read once, in a thread."""

    def __init__(self, repository: Path) -> None:
        self.repository = ModelRepository(repository)
        """The models; whatever brings in missing files supplies them to it."""
        self.grammars = GrammarChecker()
        """What tries out the grammars that answers are to match."""
        self.prepare: Callable[[ModelKey], None] = lambda model: None
        """Called on a thread before the files of a model are read."""
        self._loads: dict[ModelKey, asyncio.Future[TextCodec]] = {}
        self._expected: set[ModelKey] = set()

    def expect(self, models: Iterable[ModelKey]) -> None:
        """Begins to read the files of models that will be requested, once for each model."""
        for model in models:
            if model not in self._expected:
                self._expected.add(model)
                self._load(model)

    async def of(self, model: ModelKey) -> TextCodec:
        """Returns the codec of a model, after its files were read.

        Raises:
            NoActivePlan: This gateway cannot read the model's files.
        """
        try:
            # A caller that is cancelled must not cancel the reading that others wait for.
            return await asyncio.shield(self._load(model))
        except (OSError, ValueError, PlanError, ModelNotFound, Unavailable) as error:
            raise NoActivePlan(
                f"model {model} cannot be asked here: its tokenizer files cannot be read",
                details={"model": str(model)},
            ) from error

    def known(self, model: ModelKey) -> TextCodec | None:
        """Returns the codec of a model if its files were read already."""
        load = self._loads.get(model)
        return load.result() if load is not None and _is_good(load) else None

    def _load(self, model: ModelKey) -> asyncio.Future[TextCodec]:
        load = self._loads.get(model)
        if load is None:
            load = asyncio.ensure_future(asyncio.to_thread(self._read, model))
            self._loads[model] = load
            load.add_done_callback(lambda done: self._loaded(model, done))
        return load

    def _read(self, model: ModelKey) -> TextCodec:
        self.prepare(model)
        with self.repository.reading(model) as reading:
            return TextCodec.load(self.repository.folder(model), reading)

    def _loaded(self, model: ModelKey, load: asyncio.Future[TextCodec]) -> None:
        if load.cancelled() or load.exception() is not None:
            # The files may appear later, so the next caller tries again.
            del self._loads[model]
            self._expected.discard(model)  # nor may the scheduler know its content yet
            why = "cancelled" if load.cancelled() else str(load.exception())
            _log.warning("tokenizer_not_loaded", model=str(model), why=why)


def _is_good(load: asyncio.Future[TextCodec]) -> bool:
    return load.done() and not load.cancelled() and load.exception() is None


def _document(files: VerifiedReading, name: str) -> dict[str, Any]:
    try:
        document = json.loads(files.content(name, LARGEST_JSON_BYTES))
    except FileNotFoundError:
        return {}
    if not isinstance(document, dict):
        raise ValueError(f"{name}: not a JSON object")
    return document


def _template_source(files: VerifiedReading, config: Mapping[str, Any]) -> str | None:
    try:
        return files.content("chat_template.jinja", LARGEST_TEMPLATE_BYTES).decode()
    except FileNotFoundError:
        source = config.get("chat_template")
    if isinstance(source, list):
        named = {each["name"]: each["template"] for each in source}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise ValueError("tokenizer_config.json: chat_template is not a text")
    return source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found
