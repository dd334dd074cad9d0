"""A model's tokenizer and chat templates, read from its files: what the jailed process works with.

tokenizer.json is all the tokenizer needs; chat_template.jinja (else the "chat_template" of
tokenizer_config.json) turns a conversation into one text. Both are optional to the platform as a
whole: without a template a model completes texts only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, models

from catenary_gateway.generation.forms.conversations import Message
from catenary_gateway.generation.forms.model_forms import ModelForms, forms_of
from catenary_gateway.generation.forms.tool_use import ToolDefinition
from catenary_gateway.generation.text.encoder_config import EncoderConfig
from catenary_gateway.generation.text.jailed.content_tokens import ContentTokens
from catenary_gateway.generation.text.jailed.model_templates import ModelTemplates, templates_in
from catenary_gateway.generation.text.jailed.orders import (
    EncodeOrder,
    Encodings,
    Rendering,
    RenderOrder,
    RowsOrder,
    TextDescription,
    TextFiles,
    TextOrder,
    packed,
)
from catenary_services.errors import InvalidInput

MOST_TOKENS = 1 << 20
"""The most token ids of a vocabulary. The largest published one, of XLM-V, has 0.9 million."""
LONGEST_TOKEN = 1024
"""The most characters of a token. The longest ones of published vocabularies have 128 to 256."""


class ModelText:
    """One model's tokenizer and chat templates."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ModelTemplates | None = None,
        files: TextFiles | None = None,
        described: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes what was read.

        Args:
            tokenizer: The tokenizer.
            templates: The templates; None if there are none.
            files: The settings of their use.
            described: The document in config.json.
        """
        files = files or TextFiles(b"")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._templates = templates
        self._described = described or {}
        self.forms = _forms_of(tokenizer, templates, files)
        self._guard = None if files.special_from_content else ContentTokens(tokenizer)
        self._own_marks = _marks_of(self.forms)

    @classmethod
    def load(cls, files: TextFiles) -> ModelText:
        """Reads the files of a model, which takes a while.

        Raises:
            ValueError: A file is malformed.
        """
        try:
            tokenizer = Tokenizer.from_str(files.tokenizer.decode())
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # plain exceptions, and panics, which are not even these
            raise ValueError(f"tokenizer.json: {error}") from None
        config = _document(files.tokenizer_config, "tokenizer_config.json")
        templates = templates_in(files.template, config)
        return cls(tokenizer, templates, files, _document(files.config, "config.json"))

    def description(self) -> TextDescription:
        """Returns what a gateway itself needs to know.

        Raises:
            ValueError: There are too many tokens, or one is too long.
        """
        tokenizer = self._tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        token_of = {number: text for text, number in vocabulary.items()}
        token_of |= {number: token.content for number, token in added.items()}
        longest = max(map(len, token_of.values()), default=1)
        size = max(token_of, default=-1) + 1
        if size > MOST_TOKENS or longest > LONGEST_TOKEN:
            raise ValueError(
                f"tokenizer.json: ids up to {size} and tokens of up to {longest} characters;"
                f" at most {MOST_TOKENS} and {LONGEST_TOKEN} may be"
            )
        tokens, starts = bytearray(), [0]
        for number in range(size):
            text = token_of.get(number)
            tokens += b"" if text is None else b"\x01" + text.encode()
            starts.append(len(tokens))
        decoder = tokenizer.decoder
        rows = self._described.get("vocab_size")
        templates = self._templates
        return TextDescription(
            tokens=bytes(tokens),
            starts=packed(starts),
            added={number: token.content for number, token in added.items()},
            special=[number for number, token in added.items() if token.special],
            decoder=None if decoder is None else decoder.__getstate__().decode(),
            vocabulary_size=rows if isinstance(rows, int) and 0 < rows <= MOST_TOKENS else size,
            longest_token=longest,
            added_to_text=tokenizer.num_special_tokens_to_add(False),
            added_to_pair=tokenizer.num_special_tokens_to_add(True),
            chats=templates is not None,
            template=templates.tools.source if templates is not None else "",
            shows_tools=templates is not None and templates.tools.shows_tools,
            encoder=EncoderConfig.of(self._described),
        )

    def answer(self, order: TextOrder) -> Rendering | Encodings:
        """Returns the answer to an order.

        Raises:
            InvalidInput: The template refuses the conversation, or a text is no Unicode.
        """
        match order:
            case RenderOrder():
                return self._rendering(order)
            case EncodeOrder(texts, special):
                return Encodings([packed(ids) for ids in self._encode_all(texts, special)], [])
            case RowsOrder():
                return self._rows(order)

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

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Returns the tokens of a text, in which special tokens are recognised.

        Args:
            text: The text.
            special_tokens: Whether to add the tokens that the tokenizer puts around a text; False
                for the text of a chat template, which has them.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def _encode_all(self, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
        if len(texts) == 1:
            return [self.encode(texts[0], special_tokens=special_tokens)]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)
        return [each.ids for each in encoded]

    def _rendering(self, order: RenderOrder) -> Rendering:
        messages, variables, tools = order.messages, order.variables, order.tools
        marked = None
        if self._guard is not None and not order.special_tokens:
            shown = [[tool.name, tool.description, tool.parameters] for tool in tools]
            marked = self._guard.mark(messages, variables, shown, own=self._own_marks)
        if marked is not None:
            messages, variables, shown = marked.values
            tools = [
                ToolDefinition(name, description, parameters, tool.strict)
                for (name, description, parameters), tool in zip(shown, tools, strict=True)
            ]
        text = self.render(
            messages, variables, tools, add_generation_prompt=order.add_generation_prompt
        )
        plain = text if marked is None else marked.unmarked(text)
        if len(plain) > order.most_characters:
            return Rendering(len(plain), "", b"")
        if not _is_unicode(plain):
            raise InvalidInput("messages", "has halves of characters (lone surrogates)")
        if marked is None or self._guard is None:
            ids = self.encode(text, special_tokens=order.special_tokens)
        else:
            ids = self._guard.encode(text, marked)
        return Rendering(len(plain), plain, packed(ids))

    def _rows(self, order: RowsOrder) -> Encodings:
        most = order.most
        encoded = self._tokenizer.encode_batch(order.texts, add_special_tokens=False)
        # Of a pair the library cuts the longer text first, so cut texts keep their order of length.
        lengths = sorted({len(each) for each in encoded if len(each) > most})
        cut = {length: most + 1 + rank for rank, length in enumerate(lengths)}
        for each in encoded:
            if len(each) > most:
                each.truncate(cut[len(each)])
        finisher = _finisher(self._tokenizer, most)
        ids, type_ids = [], []
        for row in order.rows:
            second: Encoding | None = encoded[row[1]] if len(row) > 1 else None
            ready = finisher.post_process(encoded[row[0]], second)
            ids.append(packed(ready.ids))
            type_ids.append(packed(ready.type_ids) if any(ready.type_ids) else b"")
        return Encodings(ids, type_ids)


def _finisher(tokenizer: Tokenizer, most: int) -> Tokenizer:
    """Returns a tokenizer that only cuts encoded texts to `most` tokens, special ones included.

    The one of the model neither cuts nor has a vocabulary that is copied for this.
    """
    finisher = Tokenizer(models.WordLevel({}, unk_token=""))
    finisher.post_processor = tokenizer.post_processor
    finisher.enable_truncation(most, strategy="longest_first")
    return finisher


def _document(content: bytes | None, name: str) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        document = json.loads(content)
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"{name}: not a JSON object")
    return document


def _forms_of(
    tokenizer: Tokenizer, templates: ModelTemplates | None, files: TextFiles
) -> ModelForms:
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return forms_of(
        templates.tools.source if templates is not None else "",
        {token.content: number for number, token in added.items() if token.special},
        shows_tools=templates is not None and templates.tools.shows_tools,
        tool_parser=files.tool_parser,
        reasoning_parser=files.reasoning_parser,
    )


def _marks_of(forms: ModelForms) -> frozenset[str]:
    """Returns the texts that the model's own answers have around calls and reasoning."""
    marks = forms.tools.marks if forms.tools is not None else ()
    return frozenset((*marks, *(forms.reasoning.marks if forms.reasoning is not None else ())))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
