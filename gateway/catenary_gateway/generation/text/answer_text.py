"""Conversion of generated tokens to text: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class AnswerText:
    """The text of one answer, decoded as its tokens come.

    Text that may be the beginning of a stop text is held back until it is clear whether it is. The
    returned pieces together equal what the tokenizer decodes from all tokens at once, up to the
    stop text, or to its end if that is asked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        keeps_stop: bool = False,
        skips_special: bool = True,
        shown_tokens: Collection[int] = (),
    ) -> None:
        """Begins without tokens.

        Args:
            tokenizer: The tokenizer of the model.
            stop: The texts that end the answer.
            min_tokens: Stop texts count only after this many tokens.
            keeps_stop: Whether the stop text that ended the answer is part of it.
            skips_special: Whether special tokens have no text.
            shown_tokens: Special tokens that have one in any case.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keeps_stop = keeps_stop
        # The library leaves out all special tokens or none.
        self._skips = skips_special and not shown_tokens
        self._hidden: Collection[int] = ()
        if skips_special and shown_tokens:
            self._hidden = _special_tokens(tokenizer) - set(shown_tokens)
        self._min_tokens = min_tokens
        self._longest_beginning = max(map(len, self._stop), default=1) - 1
        self._ids: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=self._skips)
        self._decoded: list[str] = []
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
        self._ids.append(token_id)
        fresh = "" if token_id in self._hidden else self._decode(token_id)
        if not fresh:
            return ""
        self._decoded.append(fresh)
        self.length += len(fresh)
        if not self._stop or len(self._ids) <= self._min_tokens:
            # As in vLLM, stop texts count only after the least number of tokens.
            return fresh
        return self._until_stop(fresh)

    def end(self) -> str:
        """Returns the rest of the text, after the last token."""
        if self.stopped:
            return ""
        fresh = self._missing()
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

    def _decode(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:
            # The library raises where a decoder would take back text it has returned. Then only the
            # text that decoding all tokens adds is certain, and a new stream continues after it.
            self._stream = DecodeStream(skip_special_tokens=self._skips)
            missing = self._missing()
            return "" if missing.endswith("\ufffd") else missing

    def _missing(self) -> str:
        """Returns the text that decoding all tokens gives beyond the text decoded one by one."""
        ids = [token for token in self._ids if token not in self._hidden]
        whole: str = self._tokenizer.decode(ids, skip_special_tokens=self._skips)
        decoded = "".join(self._decoded)
        return whole[len(decoded) :] if whole.startswith(decoded) else ""


def _special_tokens(tokenizer: Tokenizer) -> set[int]:
    added = tokenizer.get_added_tokens_decoder()
    return {number for number, token in added.items() if token.special}
