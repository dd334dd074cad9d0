"""What the last rows of a step's sessions come to: tokens, or the logits themselves.

What goes wrong with one session's choice is that session's failure; what is wrong with the device
is the step's.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.base import StepItem
from catenary_agent.decoders.sampling.choosing import Asked, Chooser
from catenary_agent.decoders.sampling.sampling import NOT_CHOSEN
from catenary_agent.devices.device_errors import Trouble, trouble_of
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.decoders")


def row_results(chooser: Chooser, logits: Any, items: Sequence[StepItem]) -> list[NDArray[Any]]:
    """Returns what each item wants of its row, on the host.

    Args:
        chooser: Of the executor.
        logits: float32 [items, vocabulary], wherever it is; not changed.
        items: Each wants "token" or "logits".
    """
    rows, asked = [], []
    for row, item in enumerate(items):
        if item.want == "token" and item.sampler is not None:
            rows.append(row)
            asked.append((item.session, item.sampler))
    tokens: dict[int, int] = {}
    if rows:
        tokens = dict(zip(rows, _tokens(chooser, logits, asked, rows), strict=True))
    return [
        np.array([tokens[row]]) if row in tokens else chooser.host(logits[row])
        for row in range(len(items))
    ]


def _tokens(
    chooser: Chooser, logits: Any, asked: Sequence[Asked], rows: Sequence[int]
) -> list[int]:
    try:
        return chooser.choose(logits, asked, rows)
    except Exception as error:
        if trouble_of(error) is not Trouble.OTHER:
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
