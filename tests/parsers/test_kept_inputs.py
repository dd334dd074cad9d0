"""No parser fails, takes long or takes much memory for inputs that reach most of its code.

`make fuzz-parsers` found them; among them are those for which a parser once did.
"""

from __future__ import annotations

import pytest

from parser_fuzzing import corpus
from parser_fuzzing.target import BrokenPromise, FuzzTarget, smaller, tried

TARGETS = [target for room in corpus.ROOMS for target in corpus.targets(room)]


@pytest.mark.parametrize("target", TARGETS, ids=[each.name for each in TARGETS])
def test_a_parser_copes_with_every_kept_input(target: FuzzTarget) -> None:
    for seed in target.seeds():
        tried(target, seed)  # what is made only once is no part of any input's time
    inputs = [*((f"seed {at}", data) for at, data in enumerate(target.seeds()))]
    kept = list(corpus.kept(target.name))
    assert kept, "no inputs are kept"
    found = [(name, tried(target, data)) for name, data in [*inputs, *kept]]
    wrong = [f"{name}: {finding.told}" for name, finding in found if finding is not None]
    assert not wrong, "\n".join(wrong[:3])


def read_badly(data: bytes) -> None:
    if b"ab" in data:
        raise BrokenPromise("ab")
    if b"long" in data:
        sum(range(3_000_000))
    if b"refused" in data:
        raise ValueError


BAD = FuzzTarget("bad", read_badly, (ValueError,), lambda: ())


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", None),
        (b"refused", None),
        (b"xaby", "BrokenPromise"),
        (b"long", "time"),
        (b"large", "memory"),
    ],
)
def test_what_a_parser_does_wrong_is_found(
    data: bytes, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parser_fuzzing.target.MOST_S", 0.01 if kind == "time" else 60.0)
    sizes_kib = iter((1_000, 100_000 if kind == "memory" else 1_000))
    monkeypatch.setattr("parser_fuzzing.target._largest_kib", lambda: next(sizes_kib))
    found = tried(BAD, data)
    if kind is None:
        assert found is None
    else:
        assert found is not None
        assert found.kind.startswith(kind)


def test_a_finding_is_made_short() -> None:
    assert smaller(b"some bytes ab and more", lambda data: tried(BAD, data) is not None) == b"ab"
