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

from tokenizers import AddedToken, Tokenizer

from catenary_gateway.generation.forms.conversations import Message
from catenary_gateway.generation.forms.model_forms import ModelForms, forms_of
from catenary_gateway.generation.forms.tool_use import ToolDefinition
from catenary_gateway.generation.grammar.checker import GrammarChecker
from catenary_gateway.generation.text.encoder_config import EncoderConfig
from catenary_gateway.generation.text.model_templates import ModelTemplates, templates_in
from catenary_gateway.generation.text.token_bytes import TokenBytes
from catenary_services.bounded_files import LARGEST_JSON_BYTES
from catenary_services.content.hashing import digests
from catenary_services.content.reading import VerifiedReading
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import RECOGNISED, ModelManifest
from catenary_services.errors import (
    InvalidInput,
    ModelNotFound,
    NoActivePlan,
    PlanError,
    Unavailable,
)
from catenary_services.log import get_logger
from catenary_services.models.model_repository import ModelRepository, manifest_in

_LONG_CHARACTERS = 2_000
"""Texts with more characters than this are encoded in a thread: a token takes about a
microsecond."""
_UNREADABLE = (OSError, ValueError, InvalidInput, PlanError, ModelNotFound, Unavailable)
"""Errors of files that cannot be read; they are no mistake of a caller."""

_USUAL = EncoderConfig()

_log = get_logger("catenary_gateway.generation")


class TextCodec:
    """One model's tokenizer and chat templates, and the forms of its answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ModelTemplates | None,
        vocabulary_size: int = 0,
        manifest: ModelManifest | None = None,
        encoder: EncoderConfig = _USUAL,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.encoder = encoder
        """The use of its answers, if the model is an encoder."""
        self._templates = templates
        self.forms = _forms_of(tokenizer, templates, manifest)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = vocabulary_size or max(vocabulary.values(), default=-1) + 1
        """All token ids lie below this. It is the number of rows of the embedding, which may exceed
        the number of tokens."""
        self._longest_token = max(map(len, vocabulary), default=1)
        self._token_bytes = TokenBytes(tokenizer)

    @classmethod
    def load(
        cls,
        folder: Path,
        reading: VerifiedReading | None = None,
        manifest: ModelManifest | None = None,
    ) -> TextCodec:
        """Reads the files of a model's folder, which takes a while.

        Args:
            folder: The folder of the model.
            reading: The check of the files; None to use them unchecked.
            manifest: The model's settings; None if it has none.

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
        templates = templates_in(files, config)
        described = _document(files, "config.json")
        size = described.get("vocab_size")
        return cls(
            tokenizer,
            templates,
            size if isinstance(size, int) else 0,
            manifest,
            EncoderConfig.of(described),
        )

    @property
    def chats(self) -> bool:
        """True if there is a chat template."""
        return self._templates is not None

    def most_characters(self, tokens: int) -> int:
        """Returns the most characters of a text of `tokens` tokens.

        A longer text never fits and need not be encoded.
        """
        return tokens * self._longest_token

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        tools: Sequence[ToolDefinition] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns a conversation as the text that the model continues.

        Raises:
            InvalidInput: There is no template, or it refuses the conversation; or there are tools,
                and the model calls none.
        """
        if self._templates is None:
            raise InvalidInput("messages", "this model has no chat template; send it a prompt")
        if tools and self.forms.tools is None:
            raise InvalidInput("tools", "this model calls no tools (its tool_parser is none)")
        return self._templates.render(
            messages,
            variables,
            tools,
            self.forms.tools,
            add_generation_prompt=add_generation_prompt,
        )

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Returns the tokens of a text.

        Args:
            text: The text, in which special tokens are recognised.
            special_tokens: Whether to add the tokens that the tokenizer puts around a text; False
                for the text of a chat template, which has them.
        """
        if len(text) <= _LONG_CHARACTERS:
            return self.encode_now(text, special_tokens=special_tokens)
        (ids,) = await asyncio.to_thread(self._encode_aside, [text], special_tokens)
        return ids

    async def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text, without any around it."""
        return await asyncio.to_thread(self._encode_aside, texts, False)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns what a token adds to a text, in UTF-8; it may be a part of a character."""
        return self._token_bytes.of(token_id)

    def encode_now(self, text: str, *, special_tokens: bool) -> list[int]:
        """Returns the tokens of a text, encoded on this thread."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def _encode_aside(self, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
        # Only the library's functions for batches release the interpreter lock.
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)
        return [each.ids for each in encoded]


class TextCodecs:
    """The codecs of all requested models, whose files are read once, in a thread."""

    def __init__(self, repository: Path) -> None:
        self.repository = ModelRepository(repository)
        """The models; whatever brings in missing files supplies them to it."""
        self.grammars = GrammarChecker()
        """The process that tries out the grammars that answers are to match."""
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
        except _UNREADABLE as error:
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
            try:
                manifest = manifest_in(reading, model)
            except FileNotFoundError:
                manifest = None
            return TextCodec.load(self.repository.folder(model), reading, manifest)

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


def _forms_of(
    tokenizer: Tokenizer, templates: ModelTemplates | None, manifest: ModelManifest | None
) -> ModelForms:
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return forms_of(
        templates.tools.source if templates is not None else "",
        {token.content: number for number, token in added.items() if token.special},
        shows_tools=templates is not None and templates.tools.shows_tools,
        tool_parser=manifest.tool_parser if manifest is not None else RECOGNISED,
        reasoning_parser=manifest.reasoning_parser if manifest is not None else RECOGNISED,
    )
