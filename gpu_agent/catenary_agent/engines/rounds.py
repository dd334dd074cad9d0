"""The steps of an engine, as far as they can be told from when tokens come.

An engine computes one step for all its sequences, so their tokens come together. A *round* is what
came up to a second token of the same session. It began when the round before was complete, or when
the engine was asked while it had nothing to do. While a prompt is read beside running sessions,
their steps take longer; what they take beyond the fitted time is counted to that prompt.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from catenary_agent.generation.state.partition_batcher import StepSize
from catenary_agent.supervision.steps import RunningSteps, StepKind

if TYPE_CHECKING:
    from catenary_agent.decoders.base import DecoderCost
    from catenary_agent.engines.streams import EngineStream
    from catenary_services.domain.ids import Nanoseconds, PartitionKey

_MOST_ROUNDS = 65_536
"""The most rounds kept until somebody counts them."""

EngineRound = tuple[StepSize, tuple[int, int]]
"""The work of a step of the engine, and when it began and ended."""


class EngineRounds:
    """The rounds of one engine, and its running step for the watchdog."""

    def __init__(self, partition: PartitionKey, steps: RunningSteps) -> None:
        """Begins with an idle engine.

        Args:
            partition: The partition that the engine serves.
            steps: Where the engine's step is noted while it has something to do.
        """
        self.cost: DecoderCost | None = None
        """The fitted times; None before they are measured."""
        self._partition = partition
        self._steps = steps
        self._lock = threading.Lock()
        self._prompts: dict[EngineStream, int] = {}
        """Tokens of the prompts of which no token has come."""
        self._depths: dict[EngineStream, int] = {}
        """Tokens of each running sequence."""
        self._came: dict[EngineStream, int] = {}
        """The sequences of the round that is going on, with their cached tokens; of a prompt, its
        tokens with a minus."""
        self._began_ns = 0
        self._latest_ns = 0
        self._owed_ns = 0
        """The time that rounds took beyond their fitted one while a prompt was read."""
        self._rounds: deque[EngineRound] = deque(maxlen=_MOST_ROUNDS)
        self._step: int | None = None

    @property
    def is_idle(self) -> bool:
        """True if the engine has nothing to do."""
        return not self._prompts and not self._depths

    def asked(self, stream: EngineStream) -> None:
        """Notes that the engine is asked for the tokens of a stream."""
        with self._lock:
            if self.is_idle:
                self._began_ns = self._latest_ns = time.monotonic_ns()
            self._prompts[stream] = len(stream.request.token_ids)
            self._watch()

    def came(self, stream: EngineStream, tokens: int, now_ns: Nanoseconds) -> bool:
        """Notes that tokens of a stream have come; several in one line are of one step.

        Returns:
            True if no further token of this round is awaited: all running sequences have theirs.
        """
        with self._lock:
            if stream in self._came:
                self._complete()
            prompt = self._prompts.pop(stream, None)
            if prompt is not None:
                self._came[stream] = -prompt
                self._depths[stream] = prompt + tokens
            elif stream in self._depths:
                self._came[stream] = self._depths[stream]
                self._depths[stream] += tokens
            self._latest_ns = now_ns
            self._watch()
            return len(self._came) >= len(self._depths)

    def over(self, stream: EngineStream) -> None:
        """Notes that no more tokens of a stream come."""
        with self._lock:
            self._prompts.pop(stream, None)
            self._depths.pop(stream, None)
            if self.is_idle:
                self._complete()
                self._owed_ns = 0
            self._watch()

    def take(self) -> Sequence[EngineRound]:
        """Returns the complete rounds since the last call."""
        with self._lock:
            found = list(self._rounds)
            self._rounds.clear()
            return found

    def close(self) -> None:
        """Forgets everything that is going on."""
        with self._lock:
            self._prompts.clear()
            self._depths.clear()
            self._watch()

    def _complete(self) -> None:
        """Ends the round that is going on. The lock is held."""
        if not self._came:
            return
        rows = [depth for depth in self._came.values() if depth >= 0]
        chunks = tuple(-depth for depth in self._came.values() if depth < 0)
        self._came.clear()
        began, ended = self._began_ns, max(self._latest_ns, self._began_ns + 1)
        self._began_ns = ended
        if chunks:
            began, self._owed_ns = began - self._owed_ns, 0
        elif self._prompts and self.cost is not None:
            most = max(1, round(self.cost.decode(len(rows), sum(rows))))
            self._owed_ns += max(0, ended - began - most)
            began = max(began, ended - most)
        self._rounds.append((StepSize(len(rows), sum(rows), chunks), (began, ended)))

    def _watch(self) -> None:
        """Notes the engine's next step, begun now; what it takes is a guess. The lock is held."""
        if self._step is not None:
            self._steps.end(self._step)
            self._step = None
        if not self.is_idle:
            prompts = tuple(self._prompts.values())
            size = StepSize(len(self._depths), sum(self._depths.values()), prompts)
            booked_ns = size.booked_ns(self.cost)
            self._step = self._steps.begin(StepKind.GENERATION, self._partition, booked_ns)
