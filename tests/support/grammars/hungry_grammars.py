"""The process that tries grammars out, with grammars that its engine does not bound."""

import os
import signal
import sys
from collections.abc import Sequence

from catenary_gateway.generation.grammar import checking_child
from catenary_services.grammar.vocabulary import GrammarMatcher, TokenVocabulary


class HungryVocabulary(TokenVocabulary):
    """Takes the name of what it should do for a grammar; a vocabulary of one token ends it."""

    def __init__(self, tokenizer: str, size: int, end_token_ids: Sequence[int]) -> None:
        if size == 1:
            os.kill(os.getpid(), signal.SIGABRT)
        super().__init__(tokenizer, size, end_token_ids)

    def matcher(self, grammar: str) -> GrammarMatcher:
        if grammar == "spins":
            while True:
                pass
        if grammar == "eats":
            held = []
            while True:
                held.append(bytearray(64 << 20))
        if grammar == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().matcher(grammar)


if __name__ == "__main__":
    checking_child.TokenVocabulary = HungryVocabulary  # type: ignore[misc]
    checking_child.main(int(sys.argv[1]))
