"""A model's tokens as the bytes they stand for, and grammars matched over them by llguidance.

The state of a matcher is a function of its grammar and of the tokens of the answer so far. So an
answer that goes on elsewhere has the same mask there, once its tokens were accepted again.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

from catenary_services.bounded_files import LARGEST_JSON_BYTES
from catenary_services.content.reading import VerifiedReading
from catenary_services.errors import InvalidInput

TOKENIZER_FILE = "tokenizer.json"
FIELD = "grammar"
_WORDS_SHOWN = 300
_LIMITS = llguidance.LLParserLimits(
    # About 20 ms to compile, and about 15 ms for a mask, on the slowest machine that was measured.
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_grammar_size=200_000,
    # A state takes one or two kilobytes.
    max_lexer_states=20_000,
    # What is wrong is told to the caller, who knows the grammar.
    verbose_errors=False,
)


class TokenVocabulary:
    """The tokens of one model, from which answers that match a grammar are made."""

    def __init__(self, tokenizer: str, size: int, end_token_ids: Sequence[int]) -> None:
        """Sorts the tokens by their bytes, which takes a third of a second for 50,000.

        Args:
            tokenizer: The content of tokenizer.json.
            size: Number of rows of the logits. Those without a token are never allowed.
            end_token_ids: The tokens that end a text; they are allowed where an answer is complete.

        Raises:
            InvalidInput: The text is not a tokenizer.
        """
        self.size = size
        self.end_token_ids = tuple(end_token_ids)
        if not tokenizer.lstrip().startswith("{"):  # the library would open a file of that name
            raise InvalidInput(TOKENIZER_FILE, "is not a JSON object")
        try:
            self._tokens = llguidance.LLTokenizer(tokenizer, eos_token=list(end_token_ids) or None)
        except Exception as error:  # it raises whatever its parts do
            raise InvalidInput(TOKENIZER_FILE, _sentence(str(error))) from None

    @classmethod
    def read(
        cls, reading: VerifiedReading, size: int, end_token_ids: Sequence[int]
    ) -> TokenVocabulary:
        """Returns the vocabulary of a model whose files are being read.

        Raises:
            FileNotFoundError: There is no tokenizer.json.
            InvalidInput: It is not a tokenizer, or too large.
            ContentMismatch: It is not what was recorded.
        """
        text = reading.content(TOKENIZER_FILE, LARGEST_JSON_BYTES)
        return cls(text.decode(errors="replace"), size, end_token_ids)

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Returns a matcher for an answer that has no token yet.

        The lock of the interpreter is released meanwhile.

        Raises:
            InvalidInput: The grammar is wrong, or needs more than the limits allow.
        """
        made = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)
        return GrammarMatcher(made, self.size)


class GrammarMatcher:
    """An answer so far and its grammar, which say what tokens may come next."""

    def __init__(self, matcher: llguidance.LLMatcher, size: int) -> None:
        """Takes the library's matcher for a vocabulary of `size` rows of logits.

        Raises:
            InvalidInput: The grammar is wrong.
        """
        self._matcher = matcher
        self._size = size
        self._check()

    def copy(self) -> GrammarMatcher:
        """Returns a matcher that goes on from here on its own."""
        return GrammarMatcher(self._matcher.deep_copy(), self._size)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the answer.

        Raises:
            InvalidInput: They do not match, or need more than the limits allow.
        """
        self._matcher.consume_tokens(list(token_ids))
        self._check()

    def allowed(self) -> NDArray[np.bool_]:
        """Returns which tokens may come next, one entry for each row of the logits.

        The lock of the interpreter is released for most of the work.

        Raises:
            InvalidInput: It needs more than the limits allow.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        # Rows of the logits beyond the packed ones are padded with zeros.
        return np.unpackbits(packed, count=self._size, bitorder="little").view(np.bool_)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidInput(FIELD, _sentence(self._matcher.get_error()))


def _sentence(text: str) -> str:
    """Returns what the library says of an error, on one line."""
    return " ".join(text.split())[:_WORDS_SHOWN]
