"""Chooses the worker of a request: the least loaded, the fullest, or the one it harms least.

Algorithm 1 (Aladdin, 4.2) takes the fullest worker on which all constraints hold, which leaves
added workers idle. So it is followed only where attainment is safe and workers can be given back
(`fullest`). Otherwise the worker that would generate fastest is taken among those on which c, d and
e hold (`least_loaded`): b orders them instead of excluding them, because waiting does not make a
cluster emptier. If all of them are excluded the request waits, since what others have saved grows
with every step; when its first token would be late, it goes where the fewest sessions are expected
to miss their objective because of it (`least_harm`, reading R14).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, Nanoseconds

NOBODY: Final = -1
"""Index that stands for: no worker will do."""
SAVED_WEIGHT: Final = 4.0
"""The time a chain saves by what it has cached of a conversation counts this many times, because it
is also that of requests to come, and of the next turns. In simulation
(`scenarios/placement/shared-beginnings.yaml`), 90 % and more of the possible hits need 4, which
leaves the mean time of answers as it is; with 5, chains are loaded less evenly."""
COMMON_WEIGHT: Final = 1.0
"""The same of the part that many prompts have in common. It is read once on each chain and then of
no weight; with more, all requests would go where it was read first."""
_DUE_MARGIN = 0.08
"""Share of the first-token objective that is kept for what is not known: the way to the worker, and
the position within a step there."""
_COMPANY = 0.03
"""A worker where prompts are about to run is preferred up to this share of a step, because one pass
more costs c1 once more."""
_IDLE = 0.5
"""The step of an idle worker counts by this factor, so it is preferred to faster ones with load."""
_HARM_MARGIN = 0.5
"""Share of a per-token objective by which sessions may miss what is expected of them."""
_HELD_UP_AT_ONCE = 0.2
"""Probability with which a session held up right after its first token is taken to miss its
objective."""
_WEIGHT_OF_LOAD = 0.02
"""A worker that is slower by the whole objective counts as this many more sessions harmed."""
_NOTICE_NS = 20 * NANOSECONDS_PER_MILLISECOND
"""A request is placed this much earlier than it must be."""

IsFree = Callable[[int], bool]
LoadOf = Callable[[int], float]


_NOTHING: Mapping[Worker, int] = {}


class PlacementRequest:
    """A request to be placed, at one moment. It does not change.

    One is made in each decision, so it is no dataclass, whose fields cost a call each.

    Attributes:
        prompt_tokens: Tokens of the prompt to be run.
        predicted_tokens: Predicted tokens of the rest of the answer.
        first_token_ns: Objective for the first token; 0: none.
        due_ns: Moment at which the first token is due; 0: none.
        per_token_ns: Objective per token; 0: none.
        cached: How many tokens of the prompt workers should have cached; those that have none are
            left out.
        common_tokens: How many of its first tokens many prompts have in common.
    """

    __slots__ = (
        "cached",
        "common_tokens",
        "due_ns",
        "first_token_ns",
        "per_token_ns",
        "predicted_tokens",
        "prompt_tokens",
    )

    def __init__(
        self,
        prompt_tokens: int,
        predicted_tokens: float,
        first_token_ns: Nanoseconds = 0,
        due_ns: Nanoseconds = 0,
        per_token_ns: Nanoseconds = 0,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.predicted_tokens = predicted_tokens
        self.first_token_ns = first_token_ns
        self.due_ns = due_ns
        self.per_token_ns = per_token_ns
        self.cached = _NOTHING
        self.common_tokens = 0

    def with_cached(self, cached: Mapping[Worker, int], common_tokens: int) -> PlacementRequest:
        """Returns the same request where workers have cached some of its prompt."""
        request = PlacementRequest(
            self.prompt_tokens,
            self.predicted_tokens,
            self.first_token_ns,
            self.due_ns,
            self.per_token_ns,
        )
        request.cached = cached
        request.common_tokens = common_tokens
        return request

    def prompt_on(self, worker: Worker) -> int:
        """Returns how many tokens of the prompt a worker has to run."""
        return self.prompt_tokens - self.cached.get(worker, 0)

    def saved_ns(self, worker: Worker) -> float:
        """Returns the time that a worker saves by what it has cached of the prompt."""
        if worker not in self.cached:
            return 0.0
        whole = worker.prompt_ns(self.prompt_tokens, 0.0)
        return whole - worker.prompt_ns(self.prompt_on(worker), 0.0)

    def weighed_ns(self, worker: Worker) -> float:
        """Returns that time as it counts beside other times, by the two weights."""
        cached = self.cached.get(worker, 0)
        if not cached:
            return 0.0
        common = min(cached, self.common_tokens)
        whole = worker.prompt_ns(self.prompt_tokens, 0.0)
        behind_common = worker.prompt_ns(self.prompt_tokens - common, 0.0)
        left = worker.prompt_ns(self.prompt_tokens - cached, 0.0)
        return COMMON_WEIGHT * (whole - behind_common) + SAVED_WEIGHT * (behind_common - left)

    @property
    def margin_ns(self) -> float:
        """Time by which its first token is planned before it is due."""
        return _DUE_MARGIN * self.first_token_ns


def least_loaded(
    workers: Sequence[Worker],
    placement_request: PlacementRequest,
    now: Nanoseconds,
    theta: float,
    is_free: IsFree,
    load_of: LoadOf | None = None,
) -> int:
    """Returns the worker with the least load among those on which c, d and e hold.

    Args:
        workers: The usable workers; ties go to the first (R9).
        placement_request: The request.
        now: The moment.
        theta: Share of what others have saved that a prompt may use up (d).
        is_free: True if the worker of this index has a slot left.
        load_of: The load of the worker of an index with this request; None: the time of its steps.
    """
    best, least = NOBODY, math.inf
    for index, worker in enumerate(workers):
        worker.look(now)
        stall_ns = worker.stall_ns(placement_request.prompt_on(worker))
        if stall_ns > theta * worker.least_saved_ns:
            continue
        load = _load(worker, placement_request) if load_of is None else load_of(index)
        if (
            load < least
            and _in_time(worker, placement_request, now)
            and worker.has_cache(
                placement_request.prompt_tokens, placement_request.predicted_tokens
            )
            and is_free(index)
        ):
            best, least = index, load
    return best


def fullest(
    workers: Sequence[Worker],
    placement_request: PlacementRequest,
    now: Nanoseconds,
    theta: float,
    is_free: IsFree,
    stall_share: float = 0.0,
) -> int:
    """Returns the worker with the largest norm on which b, c, d and e hold (Algorithm 1).

    Args:
        workers: The usable workers; ties go to the first (R9).
        placement_request: The request.
        now: The moment.
        theta: Share of b and d that may be used.
        is_free: True if the worker of this index has a slot left.
        stall_share: Share of the time of each worker that prompts take.
    """
    best, largest = NOBODY, -1.0
    for index, worker in enumerate(workers):
        norm = math.hypot(len(worker.running_sequences), worker.context_tokens)
        if norm <= largest:
            continue
        worker.look(now)
        if (
            _in_time(worker, placement_request, now)
            and worker.stall_ns(placement_request.prompt_on(worker))
            <= theta * worker.least_saved_ns
            and worker.has_context(
                placement_request.prompt_tokens,
                placement_request.predicted_tokens,
                placement_request.per_token_ns,
                theta,
                stall_share,
            )
            and worker.has_cache(
                placement_request.prompt_tokens, placement_request.predicted_tokens
            )
            and is_free(index)
        ):
            best, largest = index, norm
    return best


def least_harm(
    workers: Sequence[Worker],
    placement_request: PlacementRequest,
    now: Nanoseconds,
    is_free: IsFree,
) -> int:
    """Returns the worker on which the fewest sessions will miss their objective by this request.

    Args:
        workers: The usable workers; ties go to the first (R9).
        placement_request: The request.
        now: The moment.
        is_free: True if the worker of this index has a slot left.
    """
    best, least = NOBODY, math.inf
    for index, worker in enumerate(workers):
        worker.look(now)
        tightest = min(worker.tightest_ns, float(placement_request.per_token_ns or math.inf))
        harm = 0.0
        if tightest < math.inf:
            harm = worker.harm(
                worker.stall_ns(placement_request.prompt_on(worker)), _HARM_MARGIN * tightest
            )
            harm += _WEIGHT_OF_LOAD * _load(worker, placement_request) / tightest
        else:
            harm = 1e-12 * _load(worker, placement_request)
        ready = now + worker.ready_ns(placement_request.prompt_on(worker))
        if placement_request.due_ns and ready > placement_request.due_ns:
            harm += 1.0
        if worker.first_due_ns and ready > worker.first_due_ns:
            harm += worker.joining
        elif not worker.may_join(placement_request.prompt_on(worker)):
            harm += _HELD_UP_AT_ONCE * worker.joining
        if (
            harm < least
            and worker.has_cache(
                placement_request.prompt_tokens, placement_request.predicted_tokens
            )
            and is_free(index)
        ):
            best, least = index, harm
    return best


def last_moment(placement_request: PlacementRequest, worker: Worker) -> Nanoseconds:
    """Returns when a request must be placed lest its first token be late; 0 if that is now.

    Args:
        placement_request: The request.
        worker: A typical worker; one of its steps passes before the prompt runs.
    """
    if not placement_request.due_ns:
        return 0
    step = max(worker.step_ns, float(placement_request.per_token_ns))
    before = (
        placement_request.margin_ns
        + worker.prompt_ns(placement_request.prompt_tokens, step)
        + step
        + _NOTICE_NS
    )
    return max(0, placement_request.due_ns - round(before))


def _load(worker: Worker, placement_request: PlacementRequest) -> float:
    """Returns the step a worker would have, shortened where prompts are about to run.

    What is saved by what it has cached of the prompt is spread over the steps of the answer.
    """
    step = worker.planned_step_ns(
        placement_request.prompt_tokens, placement_request.predicted_tokens
    )
    step -= placement_request.weighed_ns(worker) / placement_request.predicted_tokens
    if not worker.running_sequences:
        return _IDLE * step
    if worker.joining:
        step -= _COMPANY * min(worker.tightest_ns, step)
    return step + len(worker.running_sequences)  # decides where no times are known


def _in_time(worker: Worker, placement_request: PlacementRequest, now: Nanoseconds) -> bool:
    """True if neither its first token nor those of the prompts it joins would be late (c)."""
    ready = now + worker.ready_ns(placement_request.prompt_on(worker))
    if placement_request.due_ns and ready > placement_request.due_ns - placement_request.margin_ns:
        return False
    if not worker.may_join(placement_request.prompt_on(worker)):
        return False
    return not worker.first_due_ns or ready <= worker.first_due_ns - placement_request.margin_ns / 2
