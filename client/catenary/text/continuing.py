"""How one answer is brought to its end although gateways go away (no I/O).

Until the first piece, a request is sent again as any other. Behind it, an answer whose gateway is
not available any more goes on at another one: that is told which tokens are here, computes behind
them, and says so. A gateway too old to know of that would begin anew; then the error that ended the
answer is raised. Sampling depends on seed and position only, so with a seed, which is drawn here if
the caller has none, the answer is the one the first gateway would have given.
"""

from __future__ import annotations

import random
from typing import Any

from catenary.errors import CatenaryError, ProtocolError, UnavailableError
from catenary.rpc.attempts import Attempts
from catenary.rpc.calls import Call
from catenary.rpc.connection import Connection
from catenary.rpc.targets import Targets
from catenary.text.generation import Gathering, GeneratedText

TextCall = Call[GeneratedText]
_SEED_BITS = 63


class Course:
    """The course of one answer over however many attempts."""

    def __init__(self, call: TextCall, targets: Targets, gathering: Gathering) -> None:
        self._call = call
        self._gathering = gathering
        self._attempts = Attempts(call, targets)
        self._pieces_before = 0
        self._lost: CatenaryError | None = None
        """What ended the attempt before, until its successor has shown that it goes on."""
        sampling = call.request.sampling
        if targets.goes_on and not sampling.HasField("seed"):
            sampling.seed = random.SystemRandom().getrandbits(_SEED_BITS)

    @property
    def connection(self) -> Connection:
        """Where the present attempt goes."""
        return self._attempts.connection

    @property
    def deadline_s(self) -> float | None:
        """The gRPC deadline: what is left of the caller's own limit; None if there is none."""
        return None if self._call.timeout_s is None else self._attempts.remaining_s

    def take(self, reply: Any) -> GeneratedText:
        """Returns the next piece.

        Raises:
            CatenaryError: this gateway began anew; what ended the attempt before.
        """
        piece = self._call.read(reply)
        if self._lost is not None:
            if piece.generated_before != len(self._call.request.generated_token_ids):
                raise self._lost
            self._lost = None
        self._gathering.add(piece)
        return piece

    def check_end(self) -> None:
        """Returns if the answer is complete.

        Raises:
            ProtocolError: it is not, although the server ended it.
        """
        pieces = self._gathering.pieces
        if not pieces or not pieces[-1].finish_reason:
            raise ProtocolError("the server ended the answer without a finish reason")

    def wait_s(self, error: CatenaryError) -> float:
        """Returns the wait before another attempt.

        Raises:
            CatenaryError: there is none; the error itself.
        """
        pieces = len(self._gathering.pieces)
        if pieces > self._pieces_before:
            self._pieces_before = pieces
            self._attempts.progressed()
        wait_s = self._attempts.wait_s(error)
        if wait_s is None or error is self._lost:
            raise error
        if pieces and self._lost is None:
            if not isinstance(error, UnavailableError):
                raise error  # nothing is wrong with the gateway: another would say the same
            self._lost = error
        return wait_s

    def again(self) -> None:
        """Begins another attempt, behind the tokens that are here."""
        tokens = [token for piece in self._gathering.pieces for token in piece.token_ids]
        self._call.request.generated_token_ids[:] = tokens
        self._attempts.again()
