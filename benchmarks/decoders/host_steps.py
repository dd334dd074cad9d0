"""The host's part of a replayed step: `python -m benchmarks.decoders.host_steps`.

The device is stubbed out: replays, logits and the choice of tokens do nothing. What remains is
Python, for which a device waits that has nothing else to do.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.models.choosing import sampler
from benchmarks.gpu.models.models import Wanted, decode_items, decoder, make
from benchmarks.gpu.models.plain_flash import emulated_graphs
from benchmarks.gpu.stage import Context
from catenary_agent.decoders.base import StepItem
from catenary_agent.decoders.torch.torch_attention import AttentionKernel

LAYERS, TOKENS, STEPS = 32, 320, 200


def main() -> None:
    """Prints the time of steps of various sessions, alone and beside a chunk of 64 tokens."""
    with tempfile.TemporaryDirectory() as folder, emulated_graphs():
        here = Context(Path(folder), tiny=True)
        made = make(here, Wanted("tiny", TOKENS, layers=LAYERS))
        for sessions in (1, 8, 64, 256):
            executor = decoder(here, made, sessions + 1, TOKENS)
            executor._kernel = AttentionKernel.FLASH
            executor._renew_graphs(capture=False)
            for graph in executor._graphs._graphs.values():
                graph.replay = _nothing
            _time(executor, sessions)
            executor.close()


def _time(executor: Any, sessions: int) -> None:
    for session in range(sessions + 1):
        executor.open_session(session, 0)
    ways = [sampler(np.arange(3), seed, 0.0) for seed in range(sessions)]
    chosen = mock.patch.object(executor._chooser, "choose", return_value=[0] * sessions)
    logits = mock.patch.object(executor._model, "logits", lambda rows: rows[:, :1])
    with chosen, logits, torch.inference_mode():
        for chunk in (0, 64):
            prompt = np.full(chunk, 5)
            taken = 0.0
            for number in range(STEPS + 10):
                items = decode_items(executor, sessions, "token", ways)
                if chunk:
                    executor._book.cached[sessions] = 0
                    items.append(StepItem(sessions, 0, prompt, "nothing"))
                began = time.process_time()
                executor.step(items)
                taken += time.process_time() - began if number >= 10 else 0.0
                if number % 100 == 99:
                    for session in range(sessions):
                        executor._book.cached[session] = 0
            beside = f" and a chunk of {chunk}" if chunk else ""
            print(f"{sessions} sessions{beside}: {taken / STEPS * 1e3:.3f} CPU-ms a step")


def _nothing() -> None:
    """Stands for a replay."""


if __name__ == "__main__":
    main()
