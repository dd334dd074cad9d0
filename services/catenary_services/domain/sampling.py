"""Sampling parameters of a session, with the names and ranges of OpenAI and vLLM.

The gateway checks them once; the last agent of the session's ring samples by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from catenary_services.errors import InvalidInput

MAX_SEED = (1 << 64) - 1
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BIASED_TOKENS = 1024
MAX_GRAMMAR_BYTES = 65_536
MAX_LOGPROBS = 20
"""Most of the likeliest tokens that are reported for one place."""
MAX_PROMPT_LOGPROBS = 1 << 17
"""Most log probabilities of one prompt: those of its tokens and of the likeliest at each place."""
MAX_LISTED_TOKENS = 1024
"""Most tokens that a session may be limited to, or that may end it."""
MAX_BAD_WORDS = 128
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
"""A word is encoded at the beginning of a text, and within one."""
MAX_BAD_TOKENS = 4096
"""Most tokens of all sequences that are not to be generated."""
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """The way a session chooses its tokens, as its caller asked; checked when made.

    Raises:
        InvalidInput: A value is outside its range; the error names its field.
    """

    max_tokens: int = 0
    """The most tokens to generate; 0 for as many as there is room for (see `resolved`)."""
    min_tokens: int = 0
    """End-of-text tokens are not chosen before this many tokens were generated."""
    temperature: float = 0.0
    """Logits are divided by this; 0 chooses the most likely token."""
    top_p: float = 1.0
    """Tokens are chosen from the smallest set of likeliest ones whose probabilities reach this; 1:
    all."""
    top_k: int = 0
    """Tokens are chosen from this many of the likeliest ones; 0: from all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by it if positive, multiplied if negative.
    """
    stop: tuple[str, ...] = ()
    """Texts before the first of which the answer ends; the gateway watches for them."""
    seed: int | None = None
    """Equal seeds give equal tokens; None if it is not chosen yet (see `resolved`)."""
    ignore_eos: bool = False
    """Whether the answer goes on after an end-of-text token."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the answer contains."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time the answer contains it."""
    min_p: float = 0.0
    """Tokens with less than this share of the likeliest one's probability are left out; with 0
    none, with 1 all but the likeliest."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each at most once, with the values added to their logits before anything else."""
    grammar: str = ""
    """The grammar that the answer must match, in the serial form of llguidance: JSON with
    "grammars", or Lark. Empty: anything matches."""
    logprobs: int | None = None
    """Every token of the answer comes with its log probability and those of so many of the
    likeliest ones; None: none does."""
    prompt_logprobs: int | None = None
    """The same of the tokens of the prompt, all but the first."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, also with `ignore_eos`."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that are chosen; empty: all may be."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not generated; the gateway turns them into `bad_token_ids`."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens whose last one is not chosen behind the others."""
    include_stop_str_in_output: bool = False
    """Whether the answer's text ends with the stop text or stop token that ended it."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the answer's text."""

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, _MAX_TOKENS)
        _check_integer("min_tokens", self.min_tokens, _MAX_TOKENS)
        if 0 < self.max_tokens < self.min_tokens:
            raise InvalidInput(
                "min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}"
            )
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidInput("top_p", "0 leaves no token; it lies in (0, 1]")
        _check_integer("top_k", self.top_k, _MAX_TOKENS)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_bias(self.logit_bias)
        _check_grammar(self.grammar)
        if self.seed is not None:
            _check_integer("seed", self.seed, MAX_SEED)
        if len(self.stop) > MAX_STOP_TEXTS:
            raise InvalidInput("stop", f"{len(self.stop)} texts, at most {MAX_STOP_TEXTS} allowed")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidInput("stop", f"a text has not 1..{MAX_STOP_CHARACTERS} characters")
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _check_integer(field, getattr(self, field), MAX_LOGPROBS)
        _check_tokens("stop_token_ids", self.stop_token_ids, MAX_LISTED_TOKENS)
        _check_tokens("allowed_token_ids", self.allowed_token_ids, MAX_LISTED_TOKENS)
        _check_bad_words(self.bad_words)
        _check_bad_tokens(self.bad_token_ids)

    def check_vocabulary(self, size: int) -> None:
        """Raises InvalidInput if a named token is outside a vocabulary of `size` tokens."""
        named: dict[str, Iterable[int]] = {
            "logit_bias": (token for token, _ in self.logit_bias),
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_token_ids": (token for each in self.bad_token_ids for token in each),
        }
        for field, tokens in named.items():
            if max(tokens, default=0) >= size:
                raise InvalidInput(field, f"token ids of this model lie in 0..{size - 1}")

    @property
    def takes_drafts(self) -> bool:
        """True if tokens can be chosen before it is known which ones come before them.

        The others need every token of the answer in its turn, for penalties, words, grammars, or
        log probabilities of each.
        """
        return not (self.penalised or self.bad_token_ids or self.grammar or self.scored)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is chosen, as it is for temperatures close to zero."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """True if tokens of the prompt or the answer change the logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def scored(self) -> bool:
        """True if log probabilities are asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    def resolved(self, prompt_tokens: int, session_tokens: int, seed: int) -> SamplingParameters:
        """Returns the parameters for the agents, with definite values of `max_tokens` and `seed`.

        Args:
            prompt_tokens: Tokens of the prompt.
            session_tokens: Most tokens of a session, prompt and answer together.
            seed: The seed if the caller gave none.

        Raises:
            InvalidInput: The prompt leaves no room, or the answer may be longer than the room.
        """
        room = session_tokens - prompt_tokens
        if room < 1:
            raise InvalidInput(
                "prompt",
                f"has {prompt_tokens} tokens; a session of this model has {session_tokens} in all",
            )
        if self.max_tokens > room:
            raise InvalidInput(
                "max_tokens",
                f"{self.max_tokens} and a prompt of {prompt_tokens} tokens are more than "
                f"the {session_tokens} tokens a session of this model has",
            )
        return replace(
            self,
            max_tokens=self.max_tokens or room,
            min_tokens=min(self.min_tokens, self.max_tokens or room),
            seed=seed if self.seed is None else self.seed,
        )


def _check_bias(bias: tuple[tuple[int, float], ...]) -> None:
    if len(bias) > MAX_BIASED_TOKENS:
        text = f"{len(bias)} tokens, at most {MAX_BIASED_TOKENS} allowed"
        raise InvalidInput("logit_bias", text)
    for token, value in bias:
        _check_integer("logit_bias", token, _MAX_TOKENS)
        _check_number("logit_bias", value, -100.0, 100.0)
    if len({token for token, _ in bias}) < len(bias):
        raise InvalidInput("logit_bias", "names a token twice")


def _check_tokens(field: str, tokens: tuple[int, ...], most: int) -> None:
    if len(tokens) > most:
        raise InvalidInput(field, f"{len(tokens)} tokens, at most {most} allowed")
    for token in tokens:
        _check_integer(field, token, _MAX_TOKENS)


def _check_bad_words(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidInput("bad_words", f"{len(words)} texts, at most {MAX_BAD_WORDS} allowed")
    for text in words:
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidInput("bad_words", f"a text has not 1..{MAX_STOP_CHARACTERS} characters")


def _check_bad_tokens(sequences: tuple[tuple[int, ...], ...]) -> None:
    if len(sequences) > MAX_BAD_SEQUENCES:
        what = f"{len(sequences)} sequences, at most {MAX_BAD_SEQUENCES} allowed"
        raise InvalidInput("bad_token_ids", what)
    if not all(sequences):
        raise InvalidInput("bad_token_ids", "a sequence has no tokens")
    tokens = tuple(token for each in sequences for token in each)
    _check_tokens("bad_token_ids", tokens, MAX_BAD_TOKENS)


def _check_grammar(grammar: str) -> None:
    try:
        size = len(grammar.encode())
    except UnicodeEncodeError:
        raise InvalidInput("grammar", "has halves of characters (lone surrogates)") from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidInput("grammar", f"{size} bytes, at most {MAX_GRAMMAR_BYTES} allowed")


def _check_integer(field: str, value: int, highest: int) -> None:
    if type(value) is not int or not 0 <= value <= highest:
        raise InvalidInput(field, f"{value!r} is not an integer in 0..{highest}")


def _check_number(field: str, value: float, lowest: float, highest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(field, f"{value!r} is not a number")
    # Parameters travel as float32, so that a bound itself may arrive slightly outside the range.
    slack = 1e-6 * max(1.0, abs(lowest), abs(highest))
    if not lowest - slack <= value <= highest + slack:
        raise InvalidInput(field, f"{value!r} is not in {lowest:g}..{highest:g}")
