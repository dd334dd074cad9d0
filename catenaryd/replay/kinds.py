"""The kinds of cases that can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from catenaryd.replay.fields import Fields
from catenaryd.replay.placement import placement_words, replay_placement
from catenaryd.replay.rebalance import rebalance_words, replay_rebalance

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of case.

    Attributes:
        name: Of the command.
        help: Of the command, an example included.
        replay: Turns a case into what `--json` prints of it; raises InvalidInput.
        words: Says the same for people, in one line.
    """

    name: str
    help: str
    replay: Callable[[Fields], Result]
    words: Callable[[Result], str]


KINDS = (
    Kind(
        "placement",
        """Places the request of every case in FILE (- for standard input) by best fit.

        FILE is {"cases": [{perf, params, workers, request}]}, times in milliseconds. The answer
        has, per case, the worker ("new", or null if no worker could take it) and how every
        worker stands with constraints b-e.

        Example: catenaryd replay placement aladdin_placement.json --json
        """,
        replay_placement,
        placement_words,
    ),
    Kind(
        "rebalance",
        """Re-balances the new requests of every case in FILE (- for standard input).

        FILE is {"cases": [{perf, workers, events, new, ongoing, params}]}: what predictions got
        wrong on each worker, and where best fit placed the new requests. With ongoing and params,
        constraints b-e hold on every worker that gains a request.

        Example: catenaryd replay rebalance aladdin_rebalance.json --json
        """,
        replay_rebalance,
        rebalance_words,
    ),
)
