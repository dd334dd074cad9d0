"""Completion of one answer although gateways go away. Without I/O.

Until the first piece arrives, a request is repeated like any other. After it, an answer whose
gateway is no longer available goes on at another one. That gateway is told which tokens have
arrived, computes behind them, and confirms it. A gateway too old to know of that would begin anew;
in that case the error that ended the answer is raised. Sampling depends on seed and position only,
so with a seed, which is drawn here if the caller has none, the answer is that of the first gateway.
"""

from __future__ import annotations

import random
from typing import Any

from catenary.errors import CatenaryError, ProtocolError, UnavailableError
from catenary.rpc.attempts import RetryAttempts
from catenary.rpc.calls import RpcCall
from catenary.rpc.connection import Connection
from catenary.rpc.targets import Targets
from catenary.text.generation import GeneratedText, ResultBuilder

TextCall = RpcCall[GeneratedText]
_SEED_BITS = 63


class ResumedAnswer:
    """The course of one answer over any number of attempts."""

    def __init__(self, call: TextCall, targets: Targets, gathering: ResultBuilder) -> None:
        self._call = call
        self._gathering = gathering
        self._attempts = RetryAttempts(call, targets)
        self._pieces_before = 0
        self._lost: CatenaryError | None = None
        """The error that ended the previous attempt, until the present one has shown that it goes
        on."""
        sampling = call.request.sampling
        if targets.goes_on and not sampling.HasField("seed"):
            sampling.seed = random.SystemRandom().getrandbits(_SEED_BITS)

    @property
    def connection(self) -> Connection:
        """The connection of the present attempt."""
        return self._attempts.connection

    @property
    def deadline_s(self) -> float | None:
        """The gRPC deadline, which is what remains of the caller's own limit; None without one."""
        return None if self._call.timeout_s is None else self._attempts.remaining_s

    def take(self, reply: Any) -> GeneratedText:
        """Returns the next piece of the answer.

        Raises:
            CatenaryError: The gateway began anew. The error is that of the previous attempt.
        """
        piece = self._call.read(reply)
        if self._lost is not None:
            if piece.generated_before != len(self._call.request.generated_token_ids):
                raise self._lost
            self._lost = None
        self._gathering.add(piece)
        return piece

    def check_end(self) -> None:
        """Checks that the answer is complete.

        Raises:
            ProtocolError: The server ended the answer before it was complete.
        """
        pieces = self._gathering.pieces
        if not pieces or not pieces[-1].finish_reason:
            raise ProtocolError("the server ended the answer without a finish reason")

    def wait_s(self, error: CatenaryError) -> float:
        """Returns the seconds to wait before another attempt.

        Raises:
            CatenaryError: There is no further attempt; `error` itself is raised.
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
                raise error  # the gateway is well: another would say the same
            self._lost = error
        return wait_s

    def again(self) -> None:
        """Begins another attempt, behind the tokens that have arrived."""
        tokens = [token for piece in self._gathering.pieces for token in piece.token_ids]
        self._call.request.generated_token_ids[:] = tokens
        self._attempts.again()
