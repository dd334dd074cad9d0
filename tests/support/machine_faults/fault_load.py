"""Load from outside while something fails, and what became of every single request.

Open loop: photographs and streams of text begin at their moments whatever happens to the others.
Every request must end, in a right answer or in a stated error, and what a stream brings must have
neither a gap nor a repeat.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

import catenary
import figures
from catenaryd.demo.demo_models import preprocess, sample_photographs
from fault_cluster import IMAGES, TEXTS, FaultCluster

Kind = Literal["image", "text"]
TOKENS = 96
_PHOTOGRAPHS = ("chelsea", "coffee", "rocket")
_PROMPT = "w5 w6 w7 w8 w9"
_TEXT_TIMEOUT_S = 60.0


@dataclass
class Outcome:
    """What became of one request; moments in seconds since the load began."""

    kind: Kind
    sent_s: float
    ended_s: float = 0.0
    error: str = ""
    right: bool = False
    moments_s: list[float] = field(default_factory=list)
    """When pieces of a text came."""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def longest_pause_s(self) -> float:
        """Of a text: between two pieces, the wait for the first one included."""
        moments = [self.sent_s, *self.moments_s]
        return max((b - a for a, b in pairwise(moments)), default=0.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is asked for, and how soon it must be there."""

    images_per_s: float = 6.0
    images_at_once: int = 1
    """They come in groups of so many: a lone one always goes to the same of two idle agents."""
    texts_per_s: float = 1.0
    slo_ms: float = 20_000.0
    tokens: int = TOKENS


class Load:
    """Asks the gateways of a cluster; each request goes to the next client in turn."""

    def __init__(self, clients: Sequence[catenary.AsyncClient], shape: Shape | None = None) -> None:
        self._clients = clients
        self._shape = shape or Shape()
        self._images = [preprocess(sample_photographs()[name]) for name in _PHOTOGRAPHS]
        self._labels: list[int] = []
        self._tokens: tuple[int, ...] = ()
        self._began_s = time.monotonic()
        self._stopping = asyncio.Event()
        self.outcomes: list[Outcome] = []

    @property
    def now_s(self) -> float:
        """Since the load began."""
        return time.monotonic() - self._began_s

    async def prepare(self) -> None:
        """Learns the right answers, undisturbed."""
        client = self._clients[0]
        self._labels = [await self._label(client, image) for image in self._images]
        if self._shape.texts_per_s:
            outcome = Outcome("text", 0.0)
            self._tokens = await self._text(client, outcome)
            assert len(self._tokens) == self._shape.tokens

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Asks for as long as the block takes, then waits until every request has ended."""
        self._stopping.clear()
        self._began_s = time.monotonic()
        asking = asyncio.create_task(self._ask())
        try:
            yield
        finally:
            self._stopping.set()
            await asking

    async def for_s(self, seconds: float) -> None:
        """Lets the load run on; fails at once if it broke down."""
        await asyncio.sleep(seconds)

    async def _ask(self) -> None:
        due: dict[Kind, float] = {}
        every_s: dict[Kind, float] = {}
        if self._shape.images_per_s:
            every_s["image"] = self._shape.images_at_once / self._shape.images_per_s
        if self._shape.texts_per_s:
            every_s["text"] = 1.0 / self._shape.texts_per_s
        due = dict.fromkeys(every_s, 0.0)
        tasks: list[asyncio.Task[None]] = []
        while not self._stopping.is_set():
            kind = min(due, key=lambda each: due[each])
            try:
                async with asyncio.timeout(max(0.0, due[kind] - self.now_s)):
                    await self._stopping.wait()
            except TimeoutError:
                pass
            else:
                break
            due[kind] += every_s[kind]
            for _ in range(self._shape.images_at_once if kind == "image" else 1):
                tasks.append(asyncio.create_task(self._one(kind, len(self.outcomes))))
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    async def _one(self, kind: Kind, number: int) -> None:
        outcome = Outcome(kind, self.now_s)
        self.outcomes.append(outcome)
        client = self._clients[number % len(self._clients)]
        try:
            if kind == "image":
                at = number % len(self._images)
                outcome.right = await self._label(client, self._images[at]) == self._labels[at]
            else:
                outcome.right = await self._text(client, outcome) == self._tokens
        except catenary.CatenaryError as error:
            outcome.error = f"{type(error).__name__} {error.reason}: {error.message}"
        outcome.ended_s = self.now_s

    async def _label(self, client: catenary.AsyncClient, image: np.ndarray) -> int:
        slo_ms = self._shape.slo_ms
        answer = await client.infer(
            IMAGES, {"image": image}, slo_ms=slo_ms, timeout_s=slo_ms / 1000 + 5
        )
        return int(np.argmax(next(iter(answer.outputs.values()))[0]))

    async def _text(self, client: catenary.AsyncClient, outcome: Outcome) -> tuple[int, ...]:
        stream = client.generate(
            TEXTS,
            _PROMPT,
            stream=True,
            max_tokens=self._shape.tokens,
            ignore_eos=True,
            timeout_s=_TEXT_TIMEOUT_S,
        )
        async for _ in stream:
            outcome.moments_s.append(self.now_s)
        return stream.so_far.token_ids

    # ---- what came of it ----

    def of(self, kind: Kind, since_s: float = 0.0, until_s: float = float("inf")) -> list[Outcome]:
        """Returns the requests of a kind that were sent in a span of time."""
        return [o for o in self.outcomes if o.kind == kind and since_s <= o.sent_s < until_s]

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes if outcome.error)

    def every_request_ended(self) -> None:
        """Fails if a request hangs, is answered wrongly, or a stream has a gap or a repeat."""
        assert self.outcomes
        assert all(outcome.ended_s > 0 for outcome in self.outcomes), "a request never ended"
        wrong = [o for o in self.outcomes if not o.error and not o.right]
        assert not wrong, f"{len(wrong)} wrong answers, the first: {wrong[0]}"

    def nothing_was_lost(self) -> None:
        """Fails if any request ended in an error, too."""
        self.every_request_ended()
        assert not self.errors, self.errors

    def gap_s(self, kind: Kind, since_s: float) -> float:
        """Returns the longest time in which no request, or no piece of any text, came back."""
        ends = sorted(
            moment
            for outcome in self.outcomes
            if outcome.kind == kind and not outcome.error
            for moment in (outcome.moments_s if kind == "text" else [outcome.ended_s])
            if moment >= since_s
        )
        pairs = zip([since_s, *ends], ends, strict=False)
        return max((after - before for before, after in pairs), default=float("inf"))

    def report(self, test: str, fault_s: float) -> None:
        """Prints the figures that every fault is measured by."""
        images, texts = self.of("image"), self.of("text")
        figures.report(test, "requests", f"{len(images)} images, {len(texts)} texts")
        figures.report(test, "requests lost", sum(self.errors.values()), "", "= 0")
        for error, count in self.errors.most_common(3):
            print(f"{test}: {count} x {error}")
        if images:
            longest = max(o.took_s for o in images)
            figures.report(test, "longest answer of an image", longest, "s")
            figures.report(test, "no image answered for", self.gap_s("image", fault_s), "s")
        if texts:
            pauses = sorted(o.longest_pause_s for o in texts if o.ended_s >= fault_s)
            if pauses:
                figures.report(test, "longest pause of a stream", pauses[-1], "s")
                figures.report(test, "its median", pauses[len(pauses) // 2], "s")


@asynccontextmanager
async def prepared_load(
    cluster: FaultCluster, shape: Shape | None = None, gateways: Sequence[str] = ("gateway-0",)
) -> AsyncIterator[Load]:
    """Gives a load over some gateways that knows the right answers."""
    clients = [cluster.client(gateway) for gateway in gateways]
    try:
        load = Load(clients, shape)
        await load.prepare()
        yield load
    finally:
        for client in clients:
            await client.close()
