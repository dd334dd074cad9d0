"""What is asked of the cluster while it fails: photographs, texts, and some of each cancelled.

Open loop: requests begin at their moments whatever became of the others. The right answers are
learnt before anything fails, each from two gateways and several times over; they must agree.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import numpy as np

import catenary
from catenaryd.demo.demo_models import preprocess, sample_photographs
from fault_cluster import IMAGES, TEXTS
from faults.base import GATEWAYS
from faults.judge import IMAGE, TEXT, Outcome
from faults.world import World

_PHOTOGRAPHS = ("chelsea", "coffee", "rocket")
_PROMPTS = ("w5 w6 w7 w8 w9", "w40 w3 w77", "w100 w101 w17 w29 w150 w9 w8", "w11")
_TOLERANCE = 1e-3
_WARM_UPS = 3
SLACK_S = 5.0
"""A request that has not ended so long after its deadline hangs."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is asked for; of each kind a share is cancelled in the middle.

    They come in groups: a lone one would always go to the same of two idle agents, or chains.
    """

    images_per_s: float = 3.0
    texts_per_s: float = 1.5
    at_once: int = 3
    cancelled: float = 0.08
    image_timeout_s: float = 12.0
    text_timeout_s: float = 30.0
    tokens: int = 64


class MixedLoad:
    """Asks the gateways; every request is noted in `outcomes`."""

    def __init__(self, world: World, seed: int, shape: Shape | None = None) -> None:
        self._shape = shape or Shape()
        self._draw = random.Random(seed)
        policy = catenary.RetryPolicy(attempts=6, max_backoff_s=1.0)
        first, second = GATEWAYS
        self._clients = {
            name: world.client(order, retry=policy)
            for name, order in ((first, (first, second)), (second, (second, first)))
        }
        self._images = [preprocess(sample_photographs()[name]) for name in _PHOTOGRAPHS]
        self._scores: list[np.ndarray] = []
        self._tokens: list[tuple[int, ...]] = []
        self._began_s = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: list[Outcome] = []
        self.normal_s: dict[str, float] = {}

    @property
    def now_s(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began_s

    def begin(self) -> float:
        """Moments count from now on; returns this one on the monotonic clock."""
        self._began_s = time.monotonic()
        return self._began_s

    async def prepare(self) -> None:
        """Learns the right answers, undisturbed, and how long they take."""
        self._scores = [await self._agreed(self._scores_of, each) for each in self._images]
        self._tokens = [await self._agreed(self._tokens_of, each) for each in _PROMPTS]
        assert all(len(tokens) == self._shape.tokens for tokens in self._tokens)

    async def _agreed(self, ask, about):  # type: ignore[no-untyped-def]
        answers = [
            await ask(client, about) for client in self._clients.values() for _ in range(_WARM_UPS)
        ]
        for other in answers[1:]:
            assert np.allclose(answers[0], other, atol=_TOLERANCE), "undisturbed answers differ"
        return answers[0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Asks for as long as the block takes, then waits until every request has ended."""
        asking = asyncio.create_task(self._ask())
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def burst(self, images: int, texts: int, *, cancel: bool) -> None:
        """Asks for many at once; with `cancel` each is given up soon."""
        for _ in range(images):
            self._begin(IMAGE, cancel=cancel)
        for _ in range(texts):
            self._begin(TEXT, cancel=cancel)

    async def _ask(self) -> None:
        shape = self._shape
        every_s = {
            IMAGE: shape.at_once / shape.images_per_s,
            TEXT: shape.at_once / shape.texts_per_s,
        }
        due = dict.fromkeys(every_s, self.now_s)
        while True:
            kind = min(due, key=lambda each: due[each])
            await asyncio.sleep(max(0.0, due[kind] - self.now_s))
            due[kind] = max(due[kind] + every_s[kind], self.now_s - 2 * every_s[kind])
            for _ in range(shape.at_once):
                self._begin(kind, cancel=self._draw.random() < shape.cancelled)

    def _begin(self, kind: str, *, cancel: bool) -> None:
        name = GATEWAYS[len(self.outcomes) % len(GATEWAYS)]
        outcome = Outcome(kind, self.now_s, gateway=name)
        after_s = self._draw.uniform(0.0, 0.6) if cancel else 0.0
        task = asyncio.create_task(self._one(outcome, len(self.outcomes), after_s))
        self.outcomes.append(outcome)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, outcome: Outcome, number: int, cancel_s: float) -> None:
        image = outcome.kind == IMAGE
        limit_s = self._shape.image_timeout_s if image else self._shape.text_timeout_s
        asking = asyncio.create_task(
            self._image(outcome, number) if image else self._text(outcome, number)
        )
        done, _ = await asyncio.wait([asking], timeout=cancel_s or limit_s + SLACK_S)
        if not done:
            outcome.cancelled, outcome.hung = bool(cancel_s), not cancel_s
            asking.cancel()
            done, _ = await asyncio.wait([asking], timeout=SLACK_S)
            if not done:  # a call that cannot even be given up
                outcome.hung = True
            else:
                with suppress(asyncio.CancelledError):
                    asking.result()
            if outcome.cancelled and image:
                outcome.right = True
        outcome.ended_s = self.now_s

    async def _image(self, outcome: Outcome, number: int) -> None:
        at = number % len(self._images)
        client = self._clients[outcome.gateway]
        async with _noting(outcome):
            outcome.right = True  # an error is not a wrong answer
            scores = await self._scores_of(client, self._images[at])
            outcome.right = bool(np.allclose(scores, self._scores[at], atol=_TOLERANCE))

    async def _text(self, outcome: Outcome, number: int) -> None:
        at = number % len(_PROMPTS)
        client = self._clients[outcome.gateway]
        stream = self._stream(client, _PROMPTS[at])
        last_s = self.now_s
        try:
            async with _noting(outcome):
                async for _ in stream:
                    outcome.pieces += 1
                    outcome.longest_pause_s = max(outcome.longest_pause_s, self.now_s - last_s)
                    last_s = self.now_s
        finally:
            ids, wanted = stream.so_far.token_ids, self._tokens[at]
            whole = (
                not (outcome.reason or outcome.foreign) and not asyncio.current_task().cancelling()
            )
            outcome.right = ids == wanted if whole else ids == wanted[: len(ids)]

    async def _scores_of(self, client: catenary.AsyncClient, image: np.ndarray) -> np.ndarray:
        timeout_s = self._shape.image_timeout_s
        answer = await client.infer(
            IMAGES, {"image": image}, slo_ms=1000 * (timeout_s - 1), timeout_s=timeout_s
        )
        return next(iter(answer.outputs.values()))

    async def _tokens_of(self, client: catenary.AsyncClient, prompt: str) -> tuple[int, ...]:
        stream = self._stream(client, prompt)
        async for _ in stream:
            pass
        return stream.so_far.token_ids

    def _stream(self, client: catenary.AsyncClient, prompt: str) -> catenary.AsyncTextStream:
        return client.generate(
            TEXTS,
            prompt,
            stream=True,
            max_tokens=self._shape.tokens,
            ignore_eos=True,
            temperature=0.0,
            timeout_s=self._shape.text_timeout_s,
        )


@asynccontextmanager
async def _noting(outcome: Outcome) -> AsyncIterator[None]:
    try:
        yield
    except catenary.CatenaryError as error:
        outcome.reason, outcome.message = error.reason, error.message
        outcome.retryable = error.retryable
    except Exception as error:
        outcome.foreign, outcome.reason = True, type(error).__name__
        outcome.message = str(error)
