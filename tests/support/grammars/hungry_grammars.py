"""The process that tries grammars out, with grammars that its engine does not bound."""

import os
import signal
import sys

from catenary_gateway.generation.grammar import checking_child
from catenary_services.grammar.vocabulary import GrammarMatcher, TokenVocabulary


class HungryVocabulary(TokenVocabulary):
    """Takes the name of what it should do for a grammar."""

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
