"""Conversion of text to tokens and back with the files of a model's folder in the repository.

Templates and tokenizers are programs of whoever made the model, so a process of the model's own
runs them (`jailed`, `text_worker`). What gateways themselves do with a model's files is look up
tokens in a table (`token_table`).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from catenary_gateway.generation.forms.conversations import Message
from catenary_gateway.generation.forms.model_forms import forms_of
from catenary_gateway.generation.forms.tool_use import ToolDefinition
from catenary_gateway.generation.grammar.checker import GrammarChecker
from catenary_gateway.generation.text.jailed.orders import (
    EncodeOrder,
    Encodings,
    Rendering,
    RenderOrder,
    RowsOrder,
    TextDescription,
    TextFiles,
    TextOrder,
    unpacked,
)
from catenary_gateway.generation.text.text_worker import (
    USUAL_LIMITS,
    TextLimits,
    TextWorker,
    unusable,
)
from catenary_gateway.generation.text.token_bytes import TokenBytes
from catenary_gateway.generation.text.token_table import TokenTable
from catenary_services.bounded_files import LARGEST_JSON_BYTES, LARGEST_TEMPLATE_BYTES
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

_UNREADABLE = (OSError, ValueError, InvalidInput, PlanError, ModelNotFound, Unavailable)
"""Errors of files that cannot be read; they are no mistake of a caller."""
_ROW_CPU_S = 1e-4
"""Processor time that each row may take beyond what its text may."""
_MOST_STARTS = 4
"""Processes of models that are started at a time."""

_Answer = TypeVar("_Answer", Rendering, Encodings)

_log = get_logger("catenary_gateway.generation")


class TextService(Protocol):
    """Answers orders with a model's templates and tokenizer, as a `TextWorker` does."""

    async def call(self, order: bytes, more_cpu_s: float = 0.0) -> bytes:
        """Returns the encoded answer to an encoded order."""
        ...


class RenderedPrompt(NamedTuple):
    """A conversation as text and tokens: both empty if it has too many characters."""

    characters: int
    text: str
    ids: array[int]


class TextCodec:
    """One model's tokenizer and chat templates, and the forms of its answers."""

    def __init__(
        self,
        model: str,
        service: TextService,
        described: TextDescription,
        manifest: ModelManifest | None = None,
    ) -> None:
        """Takes what the service says of the model.

        Args:
            model: The model, as errors name it.
            service: The service.
            described: The description.
            manifest: The model's settings; None if it has none.

        Raises:
            ValueError: The description makes no sense.
        """
        self._model = model
        self._service = service
        self.table = TokenTable(described)
        self.encoder = described.encoder
        """The use of its answers, if the model is an encoder."""
        self.chats = described.chats
        """True if there is a chat template."""
        self.forms = forms_of(
            described.template,
            {self.table.added[number]: number for number in described.special},
            shows_tools=described.shows_tools,
            tool_parser=manifest.tool_parser if manifest is not None else RECOGNISED,
            reasoning_parser=manifest.reasoning_parser if manifest is not None else RECOGNISED,
        )
        self.vocabulary_size = described.vocabulary_size
        """All token ids lie below this. It is the number of rows of the embedding, which may exceed
        the number of tokens."""
        self._added_tokens = described.added_to_text, described.added_to_pair
        self._longest_token = described.longest_token
        self._token_bytes = TokenBytes(self.table)

    def most_characters(self, tokens: int) -> int:
        """Returns the most characters of a text of `tokens` tokens.

        A longer text never fits and need not be encoded.
        """
        return tokens * self._longest_token

    def added_tokens(self, *, to_pair: bool) -> int:
        """Returns how many tokens the tokenizer puts around a text, or a pair of texts."""
        return self._added_tokens[to_pair]

    async def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        tools: Sequence[ToolDefinition] = (),
        *,
        most_characters: int,
        add_generation_prompt: bool = True,
        special_tokens: bool = False,
    ) -> RenderedPrompt:
        """Returns a conversation as the text that the model continues, and its tokens.

        Args:
            messages: JSON objects with "role" and "content".
            variables: Further JSON values for the template.
            tools: The tools that the model is told of.
            most_characters: A longer text is not encoded.
            add_generation_prompt: False to leave out what stands before an answer.
            special_tokens: Whether to add the tokens that the tokenizer puts around a text, which
                templates do as a rule.

        Raises:
            InvalidInput: There is no template, or it refuses the conversation; or there are tools,
                and the model calls none.
            NoActivePlan: The model's files fail at it.
        """
        order = RenderOrder(
            [dict(message) for message in messages],
            dict(variables),
            list(tools),
            add_generation_prompt,
            special_tokens,
            most_characters,
        )
        made = _decoded(await self._asked(order, "messages"), Rendering, self._model)
        return RenderedPrompt(made.characters, made.text, self._ids(made.ids))

    async def encode(self, text: str, *, special_tokens: bool) -> array[int]:
        """Returns the tokens of a text, in which special tokens are recognised.

        Args:
            text: The text.
            special_tokens: Whether to add the tokens that the tokenizer puts around a text.

        Raises:
            NoActivePlan: The model's files fail at it.
        """
        (ids,) = await self.encode_all([text], special_tokens=special_tokens)
        return ids

    async def encode_all(
        self, texts: Sequence[str], *, special_tokens: bool = False
    ) -> list[array[int]]:
        """Returns the tokens of each text; see `encode`."""
        answer = await self._asked(EncodeOrder(texts, special_tokens), "prompt")
        made = _decoded(answer, Encodings, self._model)
        if len(made.ids) != len(texts):
            raise self._nonsense()
        return [self._ids(each) for each in made.ids]

    async def encode_rows(
        self, texts: Sequence[str], rows: Sequence[Sequence[int]], most: int
    ) -> list[tuple[array[int], array[int]]]:
        """Returns the tokens of rows, cut to `most`, and of which text of a pair each token is.

        Args:
            texts: The texts.
            rows: The index of a text, or of two, for each row.
            most: The most tokens of a row, those around texts included.

        Raises:
            NoActivePlan: The model's files fail at it.
        """
        answer = await self._asked(
            RowsOrder(texts, rows, most), "text", _ROW_CPU_S * (len(texts) + len(rows))
        )
        made = _decoded(answer, Encodings, self._model)
        if not len(made.ids) == len(made.type_ids) == len(rows):
            raise self._nonsense()
        found = []
        for ids, kinds in zip(made.ids, made.type_ids, strict=True):
            own = self._ids(ids)
            if len(own) > most or (kinds and len(kinds) != len(ids)):
                raise self._nonsense()
            found.append((own, unpacked(kinds or bytes(len(ids)))))
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Returns what a token adds to a text, in UTF-8; it may be a part of a character."""
        return self._token_bytes.of(token_id)

    async def _asked(self, order: TextOrder, field: str, more_cpu_s: float = 0.0) -> bytes:
        try:
            content = msgspec.msgpack.encode(order)
        except UnicodeEncodeError:
            raise InvalidInput(field, "has halves of characters (lone surrogates)") from None
        except (OverflowError, RecursionError):
            raise InvalidInput(field, "has a number or a depth that is too large") from None
        return await self._service.call(content, more_cpu_s)

    def _ids(self, content: bytes) -> array[int]:
        try:
            ids = unpacked(content)
        except ValueError:
            raise self._nonsense() from None
        if ids and max(ids) >= self.vocabulary_size:
            raise unusable(self._model, f"they give tokens beyond {self.vocabulary_size - 1}")
        return ids

    def _nonsense(self) -> NoActivePlan:
        return unusable(self._model, "what reads them says what makes no sense")


def _decoded(content: bytes, kind: type[_Answer], model: str) -> _Answer:
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise unusable(model, str(error)) from None


class TextCodecs:
    """The codecs of all requested models, each with a process of its own."""

    def __init__(
        self,
        repository: Path,
        limits: TextLimits = USUAL_LIMITS,
        *,
        special_from_content: bool = False,
    ) -> None:
        """Starts nothing yet.

        Args:
            repository: The folder of all models.
            limits: The limits of each order.
            special_from_content: Whether special tokens are recognised in what clients write in
                conversations.
        """
        self._limits = limits
        self._special_from_content = special_from_content
        self._starts = asyncio.Semaphore(_MOST_STARTS)
        self._workers: dict[ModelKey, TextWorker] = {}
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
        except NoActivePlan:
            raise
        except _UNREADABLE as error:
            raise NoActivePlan(
                f"model {model} cannot be asked here: its tokenizer files cannot be read",
                details={"model": str(model)},
            ) from error

    def known(self, model: ModelKey) -> TextCodec | None:
        """Returns the codec of a model if its files were read already."""
        load = self._loads.get(model)
        return load.result() if load is not None and _is_good(load) else None

    def tokenizer_text(self, model: ModelKey) -> str:
        """Returns the content of a model's tokenizer.json; it reads the file.

        Raises:
            NoActivePlan: It cannot be read.
        """
        try:
            with self.repository.reading(model) as reading:
                return reading.content("tokenizer.json", LARGEST_JSON_BYTES).decode()
        except _UNREADABLE as error:
            raise unusable(str(model), str(error)) from error

    async def close(self) -> None:
        """Ends all processes."""
        await self.grammars.close()
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))

    def _load(self, model: ModelKey) -> asyncio.Future[TextCodec]:
        load = self._loads.get(model)
        if load is None:
            load = asyncio.ensure_future(self._loading(model))
            self._loads[model] = load
            load.add_done_callback(lambda done: self._loaded(model, done))
        return load

    async def _loading(self, model: ModelKey) -> TextCodec:
        worker = self._workers.get(model)
        if worker is None:
            read = partial(self._read, model)
            worker = TextWorker(str(model), read, self._starts, self._limits)
            self._workers[model] = worker
        described = await worker.describe()
        manifest = await asyncio.to_thread(self._manifest, model)
        try:
            # A large table takes some milliseconds.
            return await asyncio.to_thread(TextCodec, str(model), worker, described, manifest)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"tokenizer.json: {error!r}") from None

    def _manifest(self, model: ModelKey) -> ModelManifest | None:
        with self.repository.reading(model) as reading:
            try:
                return manifest_in(reading, model)
            except FileNotFoundError:
                return None

    def _read(self, model: ModelKey) -> TextFiles:
        self.prepare(model)
        manifest = self._manifest(model)
        with self.repository.reading(model) as reading:
            return files_in(reading, manifest, special_from_content=self._special_from_content)

    def _loaded(self, model: ModelKey, load: asyncio.Future[TextCodec]) -> None:
        if load.cancelled() or load.exception() is not None:
            # The files may appear later, so the next caller tries again.
            del self._loads[model]
            self._expected.discard(model)  # nor may the scheduler know its content yet
            why = "cancelled" if load.cancelled() else str(load.exception())
            _log.warning("tokenizer_not_loaded", model=str(model), why=why)


def files_in(
    reading: VerifiedReading,
    manifest: ModelManifest | None = None,
    *,
    special_from_content: bool = False,
) -> TextFiles:
    """Returns the files of a model that its worker is to read.

    Raises:
        OSError: There is no tokenizer.json.
        InvalidInput: A file is too large.
        ContentMismatch: A file is not what was recorded.
    """
    return TextFiles(
        reading.content("tokenizer.json", LARGEST_JSON_BYTES),
        _content(reading, "tokenizer_config.json", LARGEST_JSON_BYTES),
        _content(reading, "chat_template.jinja", LARGEST_TEMPLATE_BYTES),
        _content(reading, "config.json", LARGEST_JSON_BYTES),
        manifest.tool_parser if manifest is not None else RECOGNISED,
        manifest.reasoning_parser if manifest is not None else RECOGNISED,
        special_from_content,
    )


def _is_good(load: asyncio.Future[TextCodec]) -> bool:
    return load.done() and not load.cancelled() and load.exception() is None


def _content(reading: VerifiedReading, name: str, most_bytes: int) -> bytes | None:
    try:
        return reading.content(name, most_bytes)
    except FileNotFoundError:
        return None
