"""Measurement of an engine's times when it has started, by requests like those of sessions.

Before that it is asked once for all it may be asked for, so that whatever it loads or compiles when
it is first needed is there: vLLM takes a quarter of a minute for its first log probabilities, and
nobody could tell that from a step that hangs.

Prompts of some lengths are read, each alone, and some numbers of sequences generate beside each
other. The lines through the times are those of all decoders (`catenary_agent.decoders.timing`).
Later reports correct them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from catenary_agent.decoders.base import DecoderCost
from catenary_agent.decoders.timing import context_slope, floored_line, line
from catenary_agent.engines.requests import EngineRequest
from catenary_agent.engines.streams import EngineStream
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import CatenaryError, InternalError, Unavailable
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_agent.engines.child import StartLimits
    from catenary_agent.engines.client import EngineClient
    from catenary_agent.engines.requests import EngineBooking, EngineProtocol, EngineTokens

PROMPT_TOKENS = (8, 64, 256)
SEQUENCES = (1, 2, 4, 8)
DECODED_TOKENS = 8
_SHORT_TOKENS = 8
_DEEP_TOKENS = 256
_WARM_TOKENS = 2
_POLL_S = 0.25
_MEASURED_SESSION = -1
_GREEDY = SamplingParameters(ignore_eos=True)
_EVERYTHING = SamplingParameters(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    grammar=r"start: /(.|\n)*/",
    logprobs=1,
    ignore_eos=True,
)
_log = get_logger("catenary_agent.engines")


class EngineTimer:
    """Asks an engine that has nothing else to do, and notes when tokens come."""

    def __init__(
        self,
        client: EngineClient,
        protocol: EngineProtocol,
        booking: EngineBooking,
        vocabulary_size: int,
        limits: StartLimits,
    ) -> None:
        """Measures nothing yet.

        Args:
            client: What talks to the engine.
            protocol: Its protocol.
            booking: The room that the engine has.
            vocabulary_size: Number of the model's tokens.
            limits: How long the engine is waited for.
        """
        self._client = client
        self._protocol = protocol
        self._booking = booking
        self._random = np.random.default_rng(0)
        self._vocabulary_size = vocabulary_size
        self._limits = limits
        self._changed = threading.Condition()
        self._came: dict[EngineStream, list[int]] = {}
        self._over = 0
        self._error: CatenaryError | None = None

    # -- what the client tells -------------------------------------------------------------------

    def asked(self, stream: EngineStream) -> None:
        """Needs nothing: the stream has the moment."""

    def came(self, stream: EngineStream, delta: EngineTokens, now_ns: int) -> None:
        with self._changed:
            if stream in self._came:  # else it was given up
                self._came[stream] += [now_ns] * len(delta.token_ids)
                self._changed.notify_all()

    def over(self, stream: EngineStream, error: CatenaryError | None) -> None:
        with self._changed:
            if stream in self._came:
                self._over += 1
                self._error = self._error or error
                self._changed.notify_all()

    # -- measurement -----------------------------------------------------------------------------

    def measure(self, budget_s: float = 10.0) -> DecoderCost:
        """Returns the times of the engine, as far as they can be measured within the budget.

        Raises:
            CatenaryError: The engine does not answer as it should.
        """
        longest = self._booking.session_tokens - DECODED_TOKENS
        self._warm_up(_shortest(_SHORT_TOKENS, longest))
        deadline_s = time.monotonic() + budget_s
        prompts = self._points(
            [tokens for tokens in PROMPT_TOKENS if tokens <= longest] or [max(1, longest)],
            lambda tokens: self._run([tokens], 1)[0],
            deadline_s,
        )
        counts = [count for count in SEQUENCES if count <= self._booking.sessions]
        short = _shortest(_SHORT_TOKENS, longest)
        shallow = self._points(counts, lambda count: self._step([short] * count), deadline_s)
        deep = []
        if longest >= _DEEP_TOKENS and time.monotonic() < deadline_s:
            deep = [(1, _DEEP_TOKENS - short, self._step([_DEEP_TOKENS]))]
        constant, slope, floor = floored_line(*zip(*prompts, strict=True))
        shared = [point for point in shallow if point[0] > 1]
        decode = line(*zip(*(shared if len(shared) > 1 else shallow), strict=True))
        return DecoderCost(
            prefill_ns=round(constant),
            prefill_token_ns=max(1, round(slope)),
            decode_ns=round(decode[0]),
            decode_session_ns=round(decode[1]),
            decode_context_token_ns=context_slope(shallow, deep),
            decode_lone_ns=max(1, round(shallow[0][1])),
            prefill_floor_ns=round(floor),
        )

    def _warm_up(self, prompt: int) -> None:
        sequences = min(2, self._booking.sessions)
        try:
            for count in range(1, sequences + 1):  # what was compiled for one holds for one only
                self._run([prompt] * count, _WARM_TOKENS, _EVERYTHING)
        except CatenaryError as error:
            # Not every engine has all of it; what it lacks is refused when somebody asks for it.
            _log.warning("engine_not_warm", reason=error.message)
        with self._changed:
            self._came, self._error = {}, None
        self._run([prompt], 1)

    def _points(
        self, sizes: Sequence[int], run: Callable[[int], float], deadline_s: float
    ) -> list[tuple[int, float]]:
        points: list[tuple[int, float]] = []
        for size in sizes:
            if points and time.monotonic() >= deadline_s:
                break
            points.append((size, run(size)))
        return points

    def _step(self, prompts: Sequence[int]) -> float:
        """Returns the median nanoseconds between two tokens of sequences side by side."""
        self._run(prompts, DECODED_TOKENS)
        gaps = [gap for came in self._came.values() for gap in np.diff(came)[1:]]
        return float(max(1.0, np.median(gaps))) if gaps else 1.0

    def _run(
        self,
        prompts: Sequence[int],
        most_tokens: int,
        parameters: SamplingParameters = _GREEDY,
    ) -> list[float]:
        """Generates tokens behind random prompts; returns the nanoseconds to each first token."""
        with self._changed:
            self._came, self._over = {}, 0
        streams = []
        for number, tokens in enumerate(prompts):
            ids = self._random.integers(0, self._vocabulary_size, tokens).tolist()
            request = EngineRequest(ids, tokens, most_tokens, parameters, 0, reuses_prompt=False)
            stream = EngineStream(_MEASURED_SESSION - number, request)
            streams.append(stream)
            self._came[stream] = []
        for stream in streams:
            self._client.begin(stream, self._protocol.body(stream.request), self)
        self._wait(len(streams), streams)
        return [float(self._came[stream][0] - stream.asked_ns) for stream in streams]

    def _wait(self, count: int, streams: Sequence[EngineStream]) -> None:
        with self._changed:
            heard_s = time.monotonic()
            while self._over < count and self._error is None:
                if self._changed.wait(_POLL_S):
                    heard_s = time.monotonic()
                    self._limits.progressed()
                elif self._limits.stopping.is_set():
                    self._error = Unavailable("this agent is stopping")
                elif time.monotonic() - heard_s > self._limits.silence_s:
                    self._error = InternalError(
                        f"the engine has generated nothing for {self._limits.silence_s:g} s"
                    )
        if self._error is not None:
            for stream in streams:
                self._client.abort(stream)
            raise self._error


def _shortest(tokens: int, most: int) -> int:
    return max(1, min(tokens, most))
