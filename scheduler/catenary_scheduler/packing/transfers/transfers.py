"""Division of moves among caches, tokens, and waiting for the next epoch.

Source: Mell, adaptive migration: every link has a communication boundary (bytes per epoch), every
target a computation boundary (tokens it can read again per epoch). Each move is put into one of
two bins, *kv* (its bytes on every link of its path) or *tokens* (its tokens at the target), or is
deferred.

In the paper every instance divides all moves of the cluster, and all have to agree. Here one
scheduler divides, and a successor comes to the same result because only the arguments matter: moves
are processed by (size, id), in whatever order they are given.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TransferKind = Literal["kv", "tokens"]
"""Ways in which a session can move: as its caches ("kv"), or as tokens to read again."""

KINDS: tuple[TransferKind, TransferKind] = ("kv", "tokens")
"""Order in which the paper tries the kinds of transfer."""
_TOKENS_FIRST: tuple[TransferKind, TransferKind] = ("tokens", "kv")
_OTHER: dict[TransferKind, TransferKind] = {"kv": "tokens", "tokens": "kv"}
_MOST_LEFT = 32
"""Number of the moves left over, the smallest first, that get a second try. It bounds the time."""


@dataclass(frozen=True, slots=True)
class TransferMove:
    """A session that is to move.

    Attributes:
        id: Unique number; of two moves of one size the lower is processed first.
        source: The chain where it is.
        target: The chain where it goes, which would read its tokens.
        kv: Bytes of its caches, on every link that they pass.
        tokens: Tokens to read again at the target.
        links: Links that its caches pass, each once; empty if they stay where they are.
        link_bytes: Bytes on each of `links` if they differ (between chains that are cut
            differently, ranges of blocks take different paths). Empty stands for `kv` on each.
    """

    id: int
    source: Hashable
    target: Hashable
    kv: int
    tokens: int
    links: tuple[str, ...]
    link_bytes: tuple[int, ...] = ()

    def link_claims(self) -> list[tuple[str, int]]:
        """Returns the bytes on each link if the session moves as caches."""
        if not self.link_bytes:
            return [(link, self.kv) for link in self.links]
        return list(zip(self.links, self.link_bytes, strict=True))

    def claims(self, kind: TransferKind) -> Sequence[tuple[Hashable, int]]:
        """Returns the amounts by boundary that the move takes if it goes this way."""
        return self.link_claims() if kind == "kv" else [(self.target, self.tokens)]

    def keys(self, kind: TransferKind) -> set[Hashable]:
        """Returns the boundaries of which the move takes something if it goes this way."""
        return set(self.links) if kind == "kv" else {self.target}


@dataclass(frozen=True, slots=True)
class TransferDivision:
    """Ids of the moves by the kind of transfer, or deferred; each tuple is in ascending order."""

    kv: tuple[int, ...]
    tokens: tuple[int, ...]
    deferred: tuple[int, ...]

    @classmethod
    def of(cls, kinds: Mapping[int, TransferKind | None]) -> TransferDivision:
        """Returns the division in which moves take these kinds; None stands for waiting."""

        def put(where: TransferKind | None) -> tuple[int, ...]:
            return tuple(sorted(move for move, kind in kinds.items() if kind == where))

        return cls(put("kv"), put("tokens"), put(None))

    def kinds(self) -> dict[int, TransferKind]:
        """Returns the kind of transfer of every move that does not wait."""
        return {**dict.fromkeys(self.kv, "kv"), **dict.fromkeys(self.tokens, "tokens")}


def divide(
    moves: Iterable[TransferMove],
    link_capacity: Mapping[str, int],
    compute_capacity: Mapping[Hashable, int],
) -> TransferDivision:
    """Returns a division that keeps every boundary and defers no more moves than the greedy one.

    The greedy division of the paper takes the largest caches first. A session moves as caches if
    every link has room, else as tokens if the target has room, else it is deferred. The departure
    from the paper applies only if that defers any: the smallest first and tokens first are tried as
    well, and a move that is left over may push another one to the other way. The division with the
    fewest deferred moves wins, then that with the fewest deferred bytes, then the greedy one.

    Args:
        moves: Moves with different ids.
        link_capacity: Bytes that each link takes this epoch. A link that is missing takes none.
        compute_capacity: Tokens that each target reads this epoch. A target that is missing reads
            none.
    """
    ordered = sorted(moves, key=lambda move: (-move.kv, move.id))
    first = _greedy(ordered, link_capacity, compute_capacity, KINDS)
    if not first.deferred:
        return first.division()
    tried = [first]
    for order, kinds in (
        (ordered, _TOKENS_FIRST),
        (ordered[::-1], KINDS),
        (ordered[::-1], _TOKENS_FIRST),
    ):
        tried.append(_greedy(order, link_capacity, compute_capacity, kinds))
    for each in tried:
        each.improve(_MOST_LEFT)
    return min(tried, key=_Bins.loss).division()


class _Bins:
    """The bins "kv" and "tokens" while they are filled, and the moves left over."""

    def __init__(self, links: Mapping[str, int], targets: Mapping[Hashable, int]) -> None:
        self._room: dict[TransferKind, dict[Hashable, int]] = {
            "kv": dict(links.items()),
            "tokens": {},
        }
        self._room["tokens"].update(targets)
        self._placed: dict[int, tuple[TransferMove, TransferKind]] = {}
        self.deferred: list[TransferMove] = []

    def place(self, move: TransferMove, kinds: Sequence[TransferKind]) -> bool:
        """Puts a move into the first bin of `kinds` that has room for it; False if none has."""
        for kind in kinds:
            room, claims = self._room[kind], move.claims(kind)
            if all(size <= room.get(key, 0) for key, size in claims):
                for key, size in claims:
                    room[key] = room.get(key, 0) - size
                self._placed[move.id] = move, kind
                return True
        return False

    def withdraw(self, move: TransferMove) -> TransferKind:
        """Removes a placed move from its bin, and returns that bin's kind."""
        _, kind = self._placed.pop(move.id)
        for key, size in move.claims(kind):
            self._room[kind][key] += size
        return kind

    def improve(self, most: int) -> None:
        """Places moves that were left over, the smallest first.

        For the first `most` of them another move may change its way to make room.
        """
        left, self.deferred = sorted(self.deferred, key=lambda move: (move.kv, move.id)), []
        for at, move in enumerate(left):
            if not (self.place(move, KINDS) or (at < most and self._make_room(move))):
                self.deferred.append(move)

    def loss(self) -> tuple[int, int]:
        """Returns the quantity to minimise: the number of deferred moves, then their bytes."""
        return len(self.deferred), sum(move.kv for move in self.deferred)

    def division(self) -> TransferDivision:
        kinds: dict[int, TransferKind | None] = {move.id: None for move in self.deferred}
        kinds.update((number, kind) for number, (_, kind) in self._placed.items())
        return TransferDivision.of(kinds)

    def _make_room(self, move: TransferMove) -> bool:
        """Places a move that fits nowhere by moving one other to the other way.

        Returns False if that fails.
        """
        for kind in KINDS:
            room, other_room = self._room[kind], self._room[_OTHER[kind]]
            lacking = {key: size - room.get(key, 0) for key, size in move.claims(kind)}
            lacking = {key: size for key, size in lacking.items() if size > 0}
            for other, its_way in self._placed.values():
                if its_way != kind or not lacking.keys() <= other.keys(kind):
                    continue
                frees = dict(other.claims(kind))
                if all(frees[key] >= size for key, size in lacking.items()) and all(
                    size <= other_room.get(key, 0) for key, size in other.claims(_OTHER[kind])
                ):
                    self.withdraw(other)
                    return self.place(other, (_OTHER[kind],)) and self.place(move, (kind,))
        return False


def _greedy(
    moves: Sequence[TransferMove],
    links: Mapping[str, int],
    targets: Mapping[Hashable, int],
    kinds: tuple[TransferKind, TransferKind],
) -> _Bins:
    bins = _Bins(links, targets)
    for move in moves:
        if not bins.place(move, kinds):
            bins.deferred.append(move)
    return bins
