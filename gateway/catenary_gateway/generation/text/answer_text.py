"""Conversion of generated tokens to text: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class AnswerText:
    """The text of one answer, decoded as its tokens come.

    Text that may be the beginning of a stop text is held back until it is clear whether it is. The
    returned pieces together equal what the tokenizer decodes from all tokens at once, up to the
    stop text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        min_tokens: int = 0,
        shown_tokens: Collection[int] = (),
    ) -> None:
        """Begins an answer.

        Args:
            tokenizer: The tokenizer of the model.
            stop: Stop texts.
            min_tokens: Stop texts count only after so many tokens.
            shown_tokens: Special tokens that are in the text; all others are left out.
        """
        self._tokenizer = tokenizer
        self._hides_all = not shown_tokens
        """True if the library leaves out special tokens; else those of `_hidden_tokens` are."""
        self._hidden_tokens = _special_tokens(tokenizer) - set(shown_tokens)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._longest_beginning = max(map(len, self._stop), default=1) - 1
        self._ids: list[int] = []
        self._stream = self._new_stream()
        self._decoded: list[str] = []
        self._held = ""
        self.stopped = False
        """True once a stop text was found."""

    def push(self, token_id: int) -> str:
        """Returns the text that is certain after one more token; it is often empty."""
        self._ids.append(token_id)
        fresh = self._decode(token_id) if self._is_shown(token_id) else ""
        if not fresh:
            return ""
        self._decoded.append(fresh)
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
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
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
            self._stream = self._new_stream()
            missing = self._missing()
            return "" if missing.endswith("\ufffd") else missing

    def _missing(self) -> str:
        """Returns the text that decoding all tokens gives beyond the text decoded one by one."""
        ids = list(filter(self._is_shown, self._ids))
        whole: str = self._tokenizer.decode(ids, skip_special_tokens=self._hides_all)
        decoded = "".join(self._decoded)
        return whole[len(decoded) :] if whole.startswith(decoded) else ""

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=self._hides_all)

    def _is_shown(self, token_id: int) -> bool:
        return self._hides_all or token_id not in self._hidden_tokens


def _special_tokens(tokenizer: Tokenizer) -> set[int]:
    added = tokenizer.get_added_tokens_decoder()
    return {number for number, token in added.items() if token.special}
