"""Caches that another process of the host reads in lent memory, as in a move within a machine."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks.gpu.stage import Context
from catenary_agent.generation.context import CacheLimits
from catenary_agent.kv import CacheSendProgress, CacheSpan

_GIGA = 1e9
_END_S = 30.0


def time_lending(here: Context, executor: Any, span: CacheSpan, rows: np.ndarray) -> None:
    """Times the way of a session's cache to the slots of another process, piece by piece.

    Args:
        here: The stage.
        executor: An executor that has the session 0.
        span: What it has cached of it.
        rows: The same as an array.
    """
    limits, lending = CacheLimits(), executor.lending
    pieces = _pieces(span, executor.sizes.cache_bytes_per_token, limits)
    memory = lending.memory.make(limits.lent_bytes)
    shape = executor._shape
    facts = {
        "device": str(shape.device),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "row": [shape.heads, shape.head_size],
        "blocks": span.blocks,
        "tokens": span.tokens,
        "handle": base64.b64encode(memory.handle).decode(),
        "nbytes": memory.nbytes,
        "place": lending.memory.place,
    }
    other = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(facts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def asked(line: str) -> str:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(f"{line}\n")
        other.stdin.flush()
        return other.stdout.readline().strip()

    def move() -> None:
        for piece in pieces:
            datatype = lending.lend_cache(0, piece, memory)
            part = [piece.first_block, piece.last_block, piece.first_token, piece.last_token]
            answer = asked(json.dumps([*part, datatype]))
            if answer != "read":
                raise RuntimeError(f"the other process says {answer!r}")

    what = f"cache of {span.tokens} tokens lent"
    try:
        opened = asked("open")
        here.row(f"{what}: way", lending.memory.way, note=opened)
        taken = here.time(move, 4)
        digest = hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()
        here.row(f"{what}: bytes differ", float(asked("digest") != digest), at_most=0)
        here.row(
            f"{what} to another process",
            rows.nbytes / taken.wall_s / _GIGA,
            "GB/s",
            note=f"{taken.wall_s * 1e3:.2f} ms in {len(pieces)} pieces",
        )
        alone = here.time(lambda: [lending.lend_cache(0, each, memory) for each in pieces], 4)
        here.row(f"{what}: writing alone", rows.nbytes / alone.wall_s / _GIGA, "GB/s")
        asked("close")
    finally:
        other.kill()
        other.communicate(timeout=_END_S)
        memory.close()


def _pieces(span: CacheSpan, row_bytes: int, limits: CacheLimits) -> list[CacheSpan]:
    """Returns the parts in which a move lends a cache."""
    sending = CacheSendProgress(0, "", span.first_block, span.last_block)
    sending.extend(span.last_token)
    found = []
    while sending.has_more:
        run = sending.take(row_bytes, limits.frame_bytes, limits.lent_bytes - limits.frame_bytes)
        first, last = run[0], run[-1]
        tokens = (first.first_token, first.last_token)
        found.append(CacheSpan(first.first_block, last.last_block, *tokens))
    return found


def _borrow(facts: dict[str, Any]) -> None:
    """Reads pieces, as it is told on the standard input."""
    import torch

    from catenary_agent.decoders.torch.torch_cache import CachePool, TokenCacheShape
    from catenary_agent.decoders.transfers.lent_memory import memory_of

    device, blocks = torch.device(facts["device"]), facts["blocks"]
    shape = TokenCacheShape(*facts["row"], getattr(torch, facts["dtype"]), device)
    pool = CachePool(blocks * facts["tokens"], facts["tokens"], blocks, shape)
    (cache,) = pool.opened([facts["tokens"]])
    handle = base64.b64decode(facts["handle"])
    memory = memory_of(device).open(handle, facts["nbytes"], facts["place"])
    for line in sys.stdin:
        match line.strip():
            case "open":
                answer = f"{memory.nbytes >> 20} MiB"
            case "digest":
                rows = pool.read(cache, CacheSpan(0, blocks, 0, facts["tokens"]), 0)
                answer = hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()
            case "close":
                memory.close()
                answer = "closed"
            case piece:
                *part, datatype = json.loads(piece)
                pool.borrow(cache, CacheSpan(*part), 0, memory.tensor, datatype)
                answer = "read"
        print(answer, flush=True)


if __name__ == "__main__":
    _borrow(json.loads(sys.argv[1]))
