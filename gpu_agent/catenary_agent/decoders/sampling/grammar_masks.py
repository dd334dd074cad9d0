"""The tokens that answers with a grammar may go on with, found beside the steps of a model.

    begin    a thread compiles the grammar; then the session may compute
    accept   another thread makes the mask of the next token
    take     the next step has the mask, or waits for it

A mask takes some 50 microseconds and a step takes milliseconds, so the mask of a token is mostly
there before the device has computed its logits. Compiling may take longer; it has a thread of its
own, and its session waits outside of all steps. So no grammar holds up other sessions for longer
than the limits of one mask allow.
"""

from __future__ import annotations

import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from catenary_services.errors import CatenaryError, InternalError
from catenary_services.log import get_logger

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from catenary_services.grammar.vocabulary import GrammarMatcher, TokenVocabulary

_TAKE_S = 20.0
"""The longest wait for a mask; its limits end it thousands of times earlier."""
_KEPT = 16
"""Number of compiled grammars that are kept for further sessions."""

_log = get_logger("catenary_agent.decoders")


class AnswerMask:
    """The tokens that one answer may go on with.

    One thread calls everything here. What others find out lies behind the lock of `GrammarMasks`.
    """

    def __init__(self, masks: GrammarMasks, session_id: int, grammar: str, min_tokens: int) -> None:
        self.session_id = session_id
        self.grammar = grammar
        self.min_tokens = min_tokens
        """An answer with fewer tokens goes on if its grammar lets it."""
        self.problem: CatenaryError | None = None
        """The reason why there is no mask any more."""
        self.coming: list[int] = []
        """Tokens of the answer that were not given to the matcher yet."""
        self.expected = 0
        """Number of tokens of the answer."""
        self.made = -1
        """The number of tokens that `allowed` comes behind; -1 before there is one."""
        self.allowed: NDArray[np.bool_] | None = None
        self.matcher: GrammarMatcher | None = None
        self.is_dropped = False
        self._masks = masks

    def accept(self, token_id: int) -> None:
        """Appends a token of the answer, and lets the next mask be made."""
        self._masks.accept(self, token_id)

    def take(self) -> NDArray[np.bool_] | None:
        """Returns the tokens that may come next, [vocabulary], after waiting for them.

        None if there is a problem.
        """
        return self._masks.take(self)

    def drop(self) -> None:
        """Lets no more masks be made."""
        self.is_dropped = True


class GrammarMasks:
    """The masks of all answers with a grammar at one partition that samples tokens."""

    def __init__(
        self,
        read: Callable[[], TokenVocabulary],
        ready: Callable[[int, CatenaryError | None], None],
    ) -> None:
        """Reads nothing and starts no thread before there is a grammar.

        Args:
            read: Returns the vocabulary of the model; called once, on a thread.
            ready: Called on a thread with a session whose first mask is there, or with the error
                that prevents it.
        """
        self._read = read
        self._ready = ready
        self._changed = threading.Condition()
        self._vocabulary: TokenVocabulary | None = None
        self._compiled: OrderedDict[str, GrammarMatcher] = OrderedDict()
        # Each holds a session a few times at most, since a session waits for its masks.
        self._to_compile: SimpleQueue[AnswerMask | None] = SimpleQueue()
        self._to_fill: SimpleQueue[AnswerMask | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(
        self, session_id: int, grammar: str, answer: Sequence[int], min_tokens: int
    ) -> AnswerMask:
        """Returns the mask of a session, which is being made.

        Args:
            session_id: The session.
            grammar: The grammar of its answer.
            answer: The tokens of the answer that were generated elsewhere.
            min_tokens: The least number of tokens, if the grammar lets the answer be so long.
        """
        made = AnswerMask(self, session_id, grammar, min_tokens)
        made.coming = list(answer)
        made.expected = len(made.coming)
        self._to_compile.put(made)
        if not self._threads:
            for work, queue in ((self._compile, self._to_compile), (self._fill, self._to_fill)):
                arguments = (work, queue)
                thread = threading.Thread(
                    target=_work_off, args=arguments, name="grammar", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return made

    def accept(self, mask: AnswerMask, token_id: int) -> None:
        """Appends a token to an answer; see `AnswerMask.accept`."""
        with self._changed:
            mask.coming.append(token_id)
            mask.expected += 1
            is_compiled = mask.matcher is not None
        if is_compiled:
            self._to_fill.put(mask)

    def take(self, mask: AnswerMask) -> NDArray[np.bool_] | None:
        """Returns the tokens that an answer may go on with; see `AnswerMask.take`."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: mask.problem is not None or mask.made == mask.expected, _TAKE_S
            )
            if not is_there:
                mask.problem = InternalError(f"no mask was made within {_TAKE_S:g} s")
            return mask.allowed if mask.problem is None else None

    def close(self) -> None:
        """Ends the threads once their present work is done."""
        self._to_compile.put(None)
        self._to_fill.put(None)

    def _compile(self, mask: AnswerMask) -> None:
        try:
            matcher = self._matcher(mask.grammar)
        except Exception as error:
            self._fail(mask, error)
            self._ready(mask.session_id, mask.problem)
            return
        with self._changed:
            mask.matcher = matcher
        # Only the other thread uses matchers.
        self._to_fill.put(mask)

    def _matcher(self, grammar: str) -> GrammarMatcher:
        """Returns a matcher at the beginning of an answer."""
        if self._vocabulary is None:
            self._vocabulary = self._read()
        found = self._compiled.pop(grammar, None) or self._vocabulary.matcher(grammar)
        self._compiled[grammar] = found
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return found.copy()

    def _fill(self, mask: AnswerMask) -> None:
        """Makes the mask behind all tokens of an answer that have come so far."""
        matcher = mask.matcher
        with self._changed:
            coming, mask.coming = mask.coming, []
            expected = mask.expected
        if matcher is None or mask.problem is not None or mask.made == expected:
            return
        is_first = mask.made < 0
        try:
            matcher.accept(coming)
            allowed = matcher.allowed()
            if expected < mask.min_tokens:
                allowed = self._without_end(allowed)
        except Exception as error:
            self._fail(mask, error)
        else:
            with self._changed:
                mask.allowed, mask.made = allowed, expected
                self._changed.notify_all()
        if is_first:
            self._ready(mask.session_id, mask.problem)

    def _without_end(self, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns a mask without the tokens that end a text, unless it has no others."""
        assert self._vocabulary is not None
        longer = allowed.copy()
        longer[[each for each in self._vocabulary.end_token_ids if each < len(longer)]] = False
        return longer if longer.any() else allowed

    def _fail(self, mask: AnswerMask, error: Exception) -> None:
        if not isinstance(error, CatenaryError):
            # Plain text: a renderer that shows local variables would print masks and grammars.
            text = "".join(traceback.format_exception(error))
            _log.error("grammar_failed", session=mask.session_id, traceback=text)
            error = InternalError("its grammar could not be used")
        with self._changed:
            mask.problem = error
            self._changed.notify_all()


def _work_off(work: Callable[[AnswerMask], None], queue: SimpleQueue[AnswerMask | None]) -> None:
    """Does `work` for every answer in a queue, until None comes."""
    while (mask := queue.get()) is not None:
        if not mask.is_dropped:
            work(mask)
