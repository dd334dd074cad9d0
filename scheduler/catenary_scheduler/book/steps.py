"""Steps of language models on devices that compute batches too, as a share of the devices' time.

An agent that serves both kinds lets them take turns: between two batches that are ready it computes
one step of its sessions, and between two steps one batch (`catenary_agent.supervision.turns`). So
a batch that takes C waits for a step of S at most once, and where steps ask for a share u of the
device alone, it waits on average no longer than they fill beside it:

    booked = C + min(S, C * u / (1 - u))

The sum of both kinds never exceeds the device: while batches are always ready, steps have the rest
of what is booked for each. The same holds with the roles exchanged, which is how long a step waits.

What is reserved is derived from the cache slots that sessions hold, so it is entered, corrected,
released and restored with these. A prompt is a reservation of its own: until it has run, steps are
as long as a step with one of its chunks. It expires by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from catenary_scheduler.book.core import Timeline
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

RATIO_ONE = 1024
"""u / (1 - u) is kept as a whole number of this fraction, so that both twins of the probe agree."""
_MOST_RATIO = 64 * RATIO_ONE
_WINDOW_NS = 2.0 * NANOSECONDS_PER_SECOND
"""Batches count in the load of a device by an exponential window of this length."""
_MOST_LOAD = 0.98


@dataclass(frozen=True, slots=True)
class StepLine:
    """Times of one partition's part of a step on one agent, in nanoseconds.

    Attributes:
        blocks: Blocks of the partition; a session that enters late holds fewer slots than that.
        step_ns: Per step.
        session_ns: Per session of the batch.
        context_token_ns: Per token that its sessions have cached.
        lone_ns: A step of one session; 0 if the line holds for it, too.
        prompt_ns: Per chunk of a prompt.
        prompt_token_ns: Per token of a prompt.
        chunk_tokens: Most tokens of a chunk; 0 if prompts are not divided.
        share: Share of the way of a token through its chain that is spent here, 0 to 1.
        most: The share of this device's time that a chain asks for if it is full: less than 1 where
            another agent of it is slower.
    """

    blocks: int
    step_ns: float
    session_ns: float
    context_token_ns: float
    lone_ns: float = 0.0
    prompt_ns: float = 0.0
    prompt_token_ns: float = 0.0
    chunk_tokens: int = 0
    share: float = 1.0
    most: float = 1.0

    def step(self, used: int, tokens: int) -> float:
        """Returns the time of a step of sessions that hold `used` slots and so many tokens in them.

        Args:
            used: Slots of all sessions.
            tokens: Tokens cached, counted once per block.
        """
        if used <= 0:
            return 0.0
        sessions = used / self.blocks
        if sessions <= 1.0 and self.lone_ns:
            return self.lone_ns
        return (
            self.step_ns
            + self.session_ns * max(1.0, sessions)
            + self.context_token_ns * (tokens / self.blocks)
        )

    def asked(self, used: int) -> float:
        """Returns the share of the device that sessions with `used` slots ask for, 0 to 1."""
        if used <= 0:
            return 0.0
        return min(1.0, self.most, self.share * max(1.0, used / self.blocks))

    def passes(self, tokens: int) -> int:
        """Returns the number of chunks of a prompt."""
        return -(-tokens // self.chunk_tokens) if self.chunk_tokens else 1

    def chunk(self, tokens: int) -> float:
        """Returns the time of the longest chunk of a prompt."""
        length = min(tokens, self.chunk_tokens) if self.chunk_tokens else tokens
        return self.prompt_ns + self.prompt_token_ns * length


class CacheSteps:
    """The steps of the sessions in one cache, on the device of their agent.

    Attributes:
        line: What they take; None while that is unknown, and nothing is reserved for them.
    """

    __slots__ = ("asked", "device", "line", "step_ns", "used")

    def __init__(self, device: DeviceSteps) -> None:
        self.device = device
        self.line: StepLine | None = None
        self.used = 0
        self.step_ns = 0.0
        self.asked = 0.0
        device.parts.append(self)

    def count(self, used: int, tokens: int) -> None:
        """Takes in the slots that sessions hold now, and the tokens cached in them."""
        self.used = used
        line = self.line
        self.step_ns = line.step(used, tokens) if line is not None else 0.0
        self.asked = line.asked(used) if line is not None and self.step_ns else 0.0
        self.device.update()

    def leave(self) -> None:
        """Reserves nothing any more; the cache is forgotten."""
        self.device.parts.remove(self)
        self.device.update()

    def prompt(self, tokens: int, now: Nanoseconds) -> None:
        """Reserves the time of a prompt from now on, behind the prompts before it."""
        line = self.line
        if line is None or tokens <= 0:
            return
        chunk = line.chunk(tokens)
        each = chunk + self.step_ns
        took = line.passes(tokens) * (each + self.device.wait_ns(each, now))
        self.device.prompt(round(chunk), round(took), now)

    def wait_ns(self, now: Nanoseconds) -> float:
        """Returns how long a step of these sessions waits for batches, if there are any now."""
        line = self.line
        if line is None:
            return 0.0
        return self.device.wait_ns(self.step_ns or line.step(line.blocks, 0), now)


class DeviceSteps:
    """One device that computes batches and steps: what steps reserve, and the load of batches.

    Invariant: what the timeline adds to a batch follows from `parts` and the prompts that were
    announced, in whatever order they came.

    Attributes:
        parts: The caches on the device.
        step_ns: The longest step that a batch may wait for.
        asked: Share of the device that steps ask for, 0 to 1.
    """

    __slots__ = (
        "_at",
        "_batches",
        "_busy_ns",
        "_chunk_ns",
        "_prompts_until",
        "asked",
        "parts",
        "step_ns",
        "timeline",
    )

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.parts: list[CacheSteps] = []
        self.step_ns: Nanoseconds = 0
        self.asked = 0.0
        self._chunk_ns: Nanoseconds = 0
        self._prompts_until: Nanoseconds = 0
        self._busy_ns = 0.0
        self._batches = 0.0
        self._at: Nanoseconds = 0

    def update(self) -> None:
        """Tells the timeline what to add to batches from now on."""
        step, asked, used = 0.0, 0.0, 0
        for part in self.parts:
            # Partitions take turns, so that one of them at most is ahead of a batch.
            step = max(step, part.step_ns)
            asked += part.asked
            used += part.used
        self.step_ns, self.asked = round(step), min(1.0, asked)
        if not used:
            self._chunk_ns = self._prompts_until = 0
        self.timeline.take_steps(
            self.step_ns,
            ratio_of(self.asked),
            self.step_ns + self._chunk_ns if self._chunk_ns else 0,
            self._prompts_until,
        )

    def prompt(self, chunk_ns: Nanoseconds, took_ns: Nanoseconds, now: Nanoseconds) -> None:
        """Reserves chunks of a prompt that will have run after `took_ns`."""
        is_over = self._prompts_until <= now
        self._chunk_ns = chunk_ns if is_over else max(chunk_ns, self._chunk_ns)
        self._prompts_until = max(now, self._prompts_until) + took_ns
        self.update()

    def computed(self, start: Nanoseconds, end: Nanoseconds) -> None:
        """Counts a batch that was really computed."""
        self._fade(end)
        self._busy_ns += end - start
        self._batches += 1.0

    def load(self, now: Nanoseconds) -> float:
        """Returns the share of the device's time that batches take now."""
        return min(_MOST_LOAD, self._busy_ns * self._faded(now) / _WINDOW_NS)

    def wait_ns(self, step_ns: float, now: Nanoseconds) -> float:
        """Returns how long a step waits for batches: for one at most, for their share on average.

        Args:
            step_ns: The time of the step.
            now: The moment.
        """
        if self._batches <= 0.0:
            return 0.0
        load = self.load(now)
        return min(self._busy_ns / self._batches, step_ns * load / (1.0 - load))

    def _fade(self, now: Nanoseconds) -> None:
        if now > self._at:
            faded = self._faded(now)
            self._busy_ns *= faded
            self._batches *= faded
            self._at = now

    def _faded(self, now: Nanoseconds) -> float:
        return math.exp((self._at - now) / _WINDOW_NS) if now > self._at else 1.0


def ratio_of(asked: float) -> int:
    """Returns how much is added to a batch beside steps that ask for this share of the device."""
    if asked >= 1.0:
        return _MOST_RATIO
    return min(_MOST_RATIO, round(RATIO_ONE * asked / (1.0 - asked)))
