"""Results of the last rows of a step's sessions: tokens, or the logits themselves.

An error in the choice of one session's token fails only that session; an error of the device fails
the whole step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.base import StepItem
from catenary_agent.decoders.sampling.array_backend import Asked
from catenary_agent.decoders.sampling.choosing import TokenSampler
from catenary_agent.decoders.sampling.sampling import NO_MASK, NOT_CHOSEN
from catenary_agent.devices.device_errors import DeviceErrorKind, error_kind_of
from catenary_services.log import get_logger

_SCORED_ROWS = 4
"""Rows of a prompt whose logits exist at a time; they fit into the memory that choosing takes."""

_log = get_logger("catenary_agent.decoders")


def row_results(
    chooser: TokenSampler, logits: Any, items: Sequence[StepItem]
) -> list[NDArray[Any]]:
    """Returns each item's result for its rows, on the host.

    Args:
        chooser: The sampler of the executor.
        logits: float32 [rows, vocabulary] on any device; not changed. Of each item one row, and one
            more for each of its drafts.
        items: Items that want "token" or "logits".
    """
    rows: list[int] = []
    asked: list[Asked] = []
    firsts: list[int] = []
    tokens: dict[int, int] = {}
    row = 0
    for item in items:
        firsts.append(row)
        row += 1 + len(item.drafts)
        if item.want != "token" or item.sampler is None:
            continue
        # Here a device may still be computing the logits.
        if item.sampler.take_mask():
            rows += range(firsts[-1], row)
            asked.append((item.session, item.sampler))
            asked += [(item.session, item.sampler.ahead(n)) for n in range(1, len(item.drafts) + 1)]
        else:
            tokens[firsts[-1]] = NO_MASK
    if rows:
        tokens.update(zip(rows, _tokens(chooser, logits, asked, rows), strict=True))
        _score(chooser, logits, items, firsts, tokens)
    return [
        np.array(_accepted(first, item, tokens)) if first in tokens else chooser.host(logits[first])
        for first, item in zip(firsts, items, strict=True)
    ]


def _accepted(first: int, item: StepItem, tokens: Mapping[int, int]) -> list[int]:
    """Returns the tokens of an item up to the first one that its next draft does not equal."""
    accepted = [tokens[first]]
    for row, draft in enumerate(item.drafts, first + 1):
        if accepted[-1] != draft or row not in tokens:
            break
        accepted.append(tokens[row])
    return accepted


def score_prompt(
    chooser: TokenSampler, logits_of: Callable[[Any], Any], hidden: Any, item: StepItem
) -> None:
    """Scores the tokens of a prompt that follow an item's inputs.

    Args:
        chooser: The sampler of the executor.
        logits_of: Returns float32 [rows, vocabulary] of hidden states after the last block.
        hidden: These states of the item's inputs, [n, hidden], where `logits_of` takes them.
        item: The item, which has scores; they are filled in.
    """
    scores = item.scores
    assert scores is not None
    for at in range(0, len(scores.following), _SCORED_ROWS):
        tokens = scores.following[at : at + _SCORED_ROWS]
        logits = logits_of(hidden[at : at + len(tokens)])
        scores.prompt += chooser.score(logits, range(len(tokens)), tokens, scores.prompt_top)


def _score(
    chooser: TokenSampler,
    logits: Any,
    items: Sequence[StepItem],
    firsts: Sequence[int],
    tokens: Mapping[int, int],
) -> None:
    """Scores the tokens that were chosen first, of the sessions that ask for it."""
    wanted = [
        (row, scores, scores.token_top)
        for row, item in zip(firsts, items, strict=True)
        if (scores := item.scores) is not None
        and scores.token_top is not None
        and tokens.get(row, -1) >= 0
    ]
    if not wanted:
        return
    rows = [row for row, _, _ in wanted]
    most = max(top for _, _, top in wanted)
    scored = chooser.score(logits, rows, [tokens[row] for row in rows], most)
    for (_, scores, top), each in zip(wanted, scored, strict=True):
        scores.token = each._replace(top=each.top[:top])


def _tokens(
    chooser: TokenSampler, logits: Any, asked: Sequence[Asked], rows: Sequence[int]
) -> list[int]:
    try:
        return chooser.choose(logits, asked, rows)
    except Exception as error:
        if error_kind_of(error) is not DeviceErrorKind.OTHER:
            raise
        if len(asked) > 1:
            return [
                token
                for row, each in zip(rows, asked, strict=True)
                for token in _tokens(chooser, logits, [each], [row])
            ]
        # Plain text: a renderer that shows local variables would print tensors and prompts.
        _log.error("no_token_chosen", session=asked[0][0], traceback=traceback.format_exc())
        return [NOT_CHOSEN]
