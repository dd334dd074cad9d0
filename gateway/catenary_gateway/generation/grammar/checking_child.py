"""The process that tries grammars out, so that none of them can hold up or end a gateway.

It reads a `GrammarOrder` on each line of its input, and writes a `GrammarAnswer` for it. A
vocabulary comes in an order of its own. A vocabulary or a grammar that takes more processor time
than it may, or more memory than there is, ends the process.
"""

from __future__ import annotations

import os
import resource
import sys
import threading

import msgspec
from llguidance import gbnf_to_lark

from catenary_services.domain.sampling import MAX_GRAMMAR_BYTES
from catenary_services.errors import InvalidInput
from catenary_services.grammar.vocabulary import FIELD, TokenVocabulary

READ_CPU_S = 10
"""The most seconds of processor time for reading a vocabulary; 50,000 tokens take half a second."""
KEPT = 4
"""Number of vocabularies that are kept; a further one takes the place of the oldest."""
_WORDS = 300
_STACK_BYTES = 2 << 20
"""Less than a thread of an agent has: what overflows there overflows here first."""


class GrammarOrder(msgspec.Struct, frozen=True):
    """A grammar to be tried out."""

    model: str
    """The name under which the vocabulary is kept."""
    tokenizer: str
    """The content of tokenizer.json; empty if the model's was sent before."""
    size: int
    grammar: str
    """Empty for an order that only brings a tokenizer."""
    answer: tuple[int, ...]
    """Tokens that an answer has already."""
    cpu_s: int
    """The most seconds of processor time."""


class GrammarAnswer(msgspec.Struct, frozen=True):
    """The result of trying a grammar out."""

    problem: str = ""
    """Empty if there is none."""
    translated: str = ""
    """The grammar in the form that agents know; empty if it was in that form."""


def main(memory_bytes: int) -> None:
    """Answers orders until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    threading.stack_size(_STACK_BYTES)
    vocabularies: dict[str, TokenVocabulary] = {}
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=GrammarOrder)
        answers: list[GrammarAnswer] = []
        thread = threading.Thread(target=_answer, args=(vocabularies, order, answers))
        thread.start()
        thread.join()
        sys.stdout.buffer.write(msgspec.json.encode(answers[0]) + b"\n")
        sys.stdout.buffer.flush()


def _answer(
    vocabularies: dict[str, TokenVocabulary], order: GrammarOrder, answers: list[GrammarAnswer]
) -> None:
    problem = translated = ""
    try:
        if order.tokenizer:
            _bound(READ_CPU_S)
            vocabularies.pop(order.model, None)
            vocabularies[order.model] = TokenVocabulary(order.tokenizer, order.size, ())
            if len(vocabularies) > KEPT:
                del vocabularies[next(iter(vocabularies))]
        if order.grammar:
            translated, problem = _tried(vocabularies[order.model], order)
    except InvalidInput as error:
        problem = error.message.partition(": ")[2]
        if error.field != FIELD:
            problem = f"needs a tokenizer that can be used: {error.message}"
    except MemoryError:
        os.abort()  # as the engine does when it gets no memory
    except BaseException as error:  # a panic of the engine is no `Exception`
        problem = f"cannot be compiled: {type(error).__name__}"
    answers.append(GrammarAnswer(problem, translated))


def _tried(vocabulary: TokenVocabulary, order: GrammarOrder) -> tuple[str, str]:
    """Returns a grammar in the form that agents know, if it was not, and what is wrong with it.

    Raises:
        InvalidInput: It cannot be compiled.
    """
    _bound(order.cpu_s)
    translated = ""
    if not order.grammar.lstrip().startswith("{") and "::=" in order.grammar:
        translated = _in_lark(order.grammar)
    matcher = vocabulary.matcher(translated or order.grammar)
    if order.answer:
        matcher.accept(order.answer)
    return translated, "" if matcher.allowed().any() else "matches no text that the model can say"


def _in_lark(rules: str) -> str:
    """Returns rules in EBNF, as llama.cpp and vLLM have them, in Lark.

    Raises:
        InvalidInput: They cannot be read, or are too long in Lark.
    """
    try:
        made: str = gbnf_to_lark.any_to_lark(rules)
    except Exception as error:  # the library raises whatever an odd text leads to
        raise InvalidInput(FIELD, f"cannot be read as EBNF: {error}"[:_WORDS]) from None
    size = len(made.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidInput(FIELD, f"has {size} bytes in Lark, at most {MAX_GRAMMAR_BYTES} may be")
    return made


def _bound(more_s: int) -> None:
    """Has the kernel end this process if it takes that much more processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + 1 + more_s
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(int(sys.argv[1]))
