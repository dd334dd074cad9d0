"""The kinds of cases that can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from catenaryd.replay.fields import JsonFields
from catenaryd.replay.packing import packing_words, replay_packing
from catenaryd.replay.placement import placement_words, replay_placement
from catenaryd.replay.rebalance import rebalance_words, replay_rebalance
from catenaryd.replay.transfers import replay_transfers, transfers_words

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplayKind:
    """One kind of case.

    Attributes:
        name: Name of the command.
        help: Help text of the command, with an example.
        replay: Turns a case into the result that `--json` prints; raises InvalidInput.
        words: Turns a result into one line for people.
    """

    name: str
    help: str
    replay: Callable[[JsonFields], Result]
    words: Callable[[Result], str]


KINDS = (
    ReplayKind(
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
    ReplayKind(
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
    ReplayKind(
        "packing",
        """Packs the requests of every case in FILE (- for standard input) on GPUs by Mell's rules.

        FILE is {"cases": [{C, mode, steps}]}, sizes in the unit of the capacity C. A sequential
        case has steps {op: ["allocate", id, size] | ["update", id, size] | ["depart", id]}, or
        such operations under ops; a batched one {depart: [id], update: [[id, size]], allocate:
        [[id, size]]}. The answer has, per case and step, how many GPUs are in use, which requests
        are together, and how many requests changed their GPU.

        Example: catenaryd replay packing mell_sequences.json --json
        """,
        replay_packing,
        packing_words,
    ),
    ReplayKind(
        "transfers",
        """Divides the moves of every case in FILE (- for standard input) by how they travel.

        FILE is {"cases": [{moves: [{id, src, dst, kv, tokens, links}], link_cap, compute_cap}]}:
        bytes on every link that a session's caches pass, tokens its target would read again, and
        what links and targets take in one epoch. The answer has, per case, the moves that go as
        caches (kv), as tokens, and those deferred to the next epoch.

        Example: catenaryd replay transfers mell_transfer_split.json --json
        """,
        replay_transfers,
        transfers_words,
    ),
)
