"""A process that measures, and the end of the one that ordered it to."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from catenary_agent.executors.device import Device
from catenary_agent.profiling import worker


@pytest.mark.parametrize("unread", [[], ["an answer"]])
def test_it_ends_quietly_with_its_parent_whose_answers_were_read_or_not(
    unread, monkeypatch, tmp_path: Path
) -> None:
    """Closing a socket that holds unread data resets the connection instead of ending it."""
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker, "configure_logging", lambda *_: None)
    context = multiprocessing.get_context("spawn")
    barriers = worker.SiblingBarriers(context.Barrier(1), context.Value("i", 0), 1)
    parent, orders = context.Pipe()
    for answer in unread:
        orders.send(answer)
    parent.close()
    worker.serve(orders, barriers, tmp_path, Device("cpu"))
    orders.close()
