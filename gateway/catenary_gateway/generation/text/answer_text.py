"""Conversion of generated tokens to text: whole characters only, and nothing of a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from catenary_gateway.generation.text.token_table import TokenTable

_WIDEST = 128
"""Most tokens that are decoded together while they make no whole character."""
_MOST_RESTARTS = 16
_NEAR_TOKENS = 4096
"""A stream that gave up looks back over answers up to this length."""


class AnswerText:
    """The text of one answer, decoded as its tokens come.

    Text that may be the beginning of a stop text is held back until it is clear whether it is. The
    returned pieces together equal what the tokenizer decodes from all tokens at once, up to the
    stop text, or to its end if that is asked for.
    """

    def __init__(
        self,
        table: TokenTable,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        keeps_stop: bool = False,
        skips_special: bool = True,
        shown_tokens: Collection[int] = (),
    ) -> None:
        """Begins without tokens.

        Args:
            table: The tokens of the model.
            stop: The texts that end the answer.
            min_tokens: Stop texts count only after this many tokens.
            keeps_stop: Whether the stop text that ended the answer is part of it.
            skips_special: Whether special tokens have no text.
            shown_tokens: Special tokens that have one in any case.
        """
        self._stop = tuple(stop)
        self._keeps_stop = keeps_stop
        self._hidden: Collection[int] = table.special if skips_special else ()
        if skips_special and shown_tokens:
            self._hidden = table.special.difference(shown_tokens)
        self._stream: _ByteStream | _WindowStream = (
            _ByteStream(table) if table.is_bytewise else _WindowStream(table)
        )
        self._min_tokens = min_tokens
        self._longest_beginning = max(map(len, self._stop), default=1) - 1
        self._tokens = 0
        self._held = ""
        self.length = 0
        """Number of characters decoded so far, those held back included."""
        self.stop_text = ""
        """The stop text that was found; empty while none was."""

    @property
    def stopped(self) -> bool:
        """True once a stop text was found."""
        return bool(self.stop_text)

    def push(self, token_id: int) -> str:
        """Returns the text that is certain after one more token; it is often empty."""
        self._tokens += 1
        fresh = "" if token_id in self._hidden else self._stream.step(token_id)
        if not fresh:
            return ""
        self.length += len(fresh)
        if not self._stop or self._tokens <= self._min_tokens:
            # As in vLLM, stop texts count only after the least number of tokens.
            return fresh
        return self._until_stop(fresh)

    def end(self) -> str:
        """Returns the rest of the text, after the last token."""
        if self.stopped:
            return ""
        fresh = self._stream.end()
        certain = self._until_stop(fresh) if self._stop else fresh
        rest, self._held = self._held, ""
        return certain if self.stopped else certain + rest

    def _until_stop(self, fresh: str) -> str:
        text = self._held + fresh
        found = [
            (at, at + len(stop) if self._keeps_stop else at, stop)
            for stop in self._stop
            if (at := text.find(stop)) >= 0
        ]
        if found:
            _, end, self.stop_text = min(found)
            self._held = ""
            return text[:end]
        keep = next(
            (
                size
                for size in range(min(self._longest_beginning, len(text)), 0, -1)
                if any(stop.startswith(text[-size:]) for stop in self._stop)
            ),
            0,
        )
        certain, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return certain


class _ByteStream:
    """The text of tokens that are bytes."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        """Returns the characters that are whole after one more token."""
        return self._decoder.decode(self._table.bytes_of(token_id))

    def end(self) -> str:
        """Returns what stands for half a character at the end."""
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """The text of tokens whose decoder looks at several of them.

    As `DecodeStream` of the library `tokenizers`, it decodes the last tokens with and without a new
    one; what the new one adds is the difference.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._all: list[int] = []
        self._said: list[str] = []
        self._window: list[int] = []
        self._prefix = ""
        self._prefix_tokens = 0
        self._restarts = 0

    def step(self, token_id: int) -> str:
        """Returns the text that is certain after one more token."""
        self._all.append(token_id)
        self._window.append(token_id)
        text = self._table.decode(self._window)
        if len(text) <= len(self._prefix):
            return ""
        if not text.startswith(self._prefix):
            return self._restarted()
        if text.endswith("\ufffd") and len(self._window) < _WIDEST:
            return ""
        return self._say(text)

    def end(self) -> str:
        """Returns what is left, with replacement characters."""
        text = self._table.decode(self._window)
        return text[len(self._prefix) :] if text.startswith(self._prefix) else ""

    def _say(self, text: str) -> str:
        fresh = text[len(self._prefix) :]
        added = len(self._window) - self._prefix_tokens
        self._window = self._window[self._prefix_tokens :]
        self._prefix = self._table.decode(self._window)
        self._prefix_tokens = added
        self._said.append(fresh)
        return fresh

    def _restarted(self) -> str:
        """Returns the text that all tokens have beyond what was said, where it was taken back."""
        self._restarts += 1
        said, whole = "", ""
        if self._restarts <= _MOST_RESTARTS and len(self._all) <= _NEAR_TOKENS:
            said, whole = "".join(self._said), self._table.decode(self._all)
        self._window = self._window[-1:]
        self._prefix, self._prefix_tokens = self._table.decode(self._window), 1
        missing = whole[len(said) :] if whole.startswith(said) else self._prefix
        self._said.append(missing)
        return missing
