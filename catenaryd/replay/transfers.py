"""Replay of transfers: which sessions move as caches, which as tokens, and which wait."""

from __future__ import annotations

from typing import Any

from catenary_scheduler.packing.transfers.transfers import TransferMove, divide
from catenaryd.replay.fields import JsonFields


def replay_transfers(case: JsonFields) -> dict[str, Any]:
    """Returns the division of one case: ids under `kv`, `tokens` and `deferred`."""
    moves = [_move(each) for each in case.objects("moves")]
    if len({move.id for move in moves}) < len(moves):
        raise case.wrong("moves", "two moves have the same id")
    done = divide(moves, case.wholes("link_cap"), dict(case.wholes("compute_cap").items()))
    return {"kv": done.kv, "tokens": done.tokens, "deferred": done.deferred}


def transfers_words(result: dict[str, Any]) -> str:
    return ", ".join(
        f"{' '.join(map(str, result[key])) or 'none'} {words}"
        for key, words in (("kv", "as caches"), ("tokens", "as tokens"), ("deferred", "deferred"))
    )


def _move(move: JsonFields) -> TransferMove:
    links = tuple(move.texts("links"))
    if len(set(links)) < len(links):
        raise move.wrong("links", "names a link twice")
    return TransferMove(
        id=move.whole("id"),
        source=str(move.whole("src")),
        target=str(move.whole("dst")),
        kv=move.whole("kv"),
        tokens=move.whole("tokens"),
        links=links,
    )
