"""Tokens are counted once, end when they say, and are nowhere but in the join line."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from catenary_services.errors import InvalidInput, PermissionDenied
from catenaryd.enrolment.join_line import TOKEN
from catenaryd.enrolment.join_tokens import MOST_USES, JoinTokens


class Clock:
    def __init__(self) -> None:
        self.now = 1_795_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "enrolment" / "tokens.json"


@pytest.fixture
def tokens(file: Path, clock: Clock) -> JoinTokens:
    return JoinTokens(file, clock)


def state_of(tokens: JoinTokens, token: str) -> str:
    return next(state for each, state in tokens.list() if token.startswith(each.id))


def test_a_token_is_good_once(tokens: JoinTokens) -> None:
    token = tokens.create()
    tokens.check(token, "a")
    tokens.use(token, "pi4", "a")
    assert state_of(tokens, token) == "used"
    for check in (lambda: tokens.check(token, "b"), lambda: tokens.use(token, "pi5", "b")):
        with pytest.raises(PermissionDenied, match="as often as it may be"):
            check()


def test_a_token_of_three_uses_is_good_for_three_machines(tokens: JoinTokens) -> None:
    token = tokens.create(uses=3)
    for number in range(3):
        tokens.use(token, f"m{number}", str(number))
    with pytest.raises(PermissionDenied):
        tokens.use(token, "m3", "3")
    assert [use.machine for use in tokens.list()[0][0].used] == ["m0", "m1", "m2"]


def test_the_same_request_again_is_no_second_use(tokens: JoinTokens) -> None:
    token = tokens.create()
    tokens.use(token, "pi4", "a")
    tokens.check(token, "a")
    tokens.use(token, "pi4", "a")
    assert len(tokens.list()[0][0].used) == 1


def test_an_expired_token_is_refused_even_for_the_same_request(
    tokens: JoinTokens, clock: Clock
) -> None:
    token = tokens.create(life_s=60)
    tokens.use(token, "pi4", "a")
    clock.now += 60
    for request in ("a", "b"):
        with pytest.raises(PermissionDenied, match="has expired"):
            tokens.use(token, "pi4", request)


def test_a_revoked_token_is_refused(tokens: JoinTokens) -> None:
    token = tokens.create(uses=2)
    tokens.revoke(token.partition(".")[0])
    with pytest.raises(PermissionDenied, match="was revoked"):
        tokens.use(token, "pi4", "a")
    with pytest.raises(InvalidInput, match="none with the id"):
        tokens.revoke("unknown1")


def test_whoever_lacks_the_secret_learns_nothing(tokens: JoinTokens) -> None:
    token = tokens.create()
    tokens.revoke(token)
    wrong = token.partition(".")[0] + "." + "a" * 32
    said = []
    for each in (wrong, "zzzzzzzz." + "a" * 32, "nonsense", "", token.upper()):
        with pytest.raises(PermissionDenied) as refused:
            tokens.check(each, "a")
        said.append(refused.value.message)
    assert set(said) == {"this cluster knows no such token"}


def test_what_was_counted_is_known_after_a_restart(
    tokens: JoinTokens, file: Path, clock: Clock
) -> None:
    token = tokens.create()
    tokens.use(token, "pi4", "a")
    with pytest.raises(PermissionDenied):
        JoinTokens(file, clock).use(token, "pi5", "b")


def test_the_file_holds_hashes_and_is_its_owners_alone(tokens: JoinTokens, file: Path) -> None:
    token = tokens.create()
    assert TOKEN.fullmatch(token)
    assert token.partition(".")[2] not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_damaged_file_lets_nobody_in(tokens: JoinTokens, file: Path) -> None:
    token = tokens.create()
    whole = file.read_text()
    document = json.loads(whole)
    del document["tokens"][0]["uses"]
    for text in ("", "{}", whole[:-20], json.dumps(document), "[" * 100_000):
        file.write_text(text)
        with pytest.raises(InvalidInput, match="cannot be read"):
            tokens.use(token, "pi4", "a")


def test_ended_tokens_are_forgotten_after_a_day(tokens: JoinTokens, clock: Clock) -> None:
    tokens.create(life_s=60)
    clock.now += 86_400 + 61
    kept = tokens.create()
    assert [each.id for each, _ in tokens.list()] == [kept.partition(".")[0]]


@pytest.mark.parametrize(("uses", "life_s"), [(0, 60), (MOST_USES + 1, 60), (1, 0), (1, 1e9)])
def test_numbers_out_of_range_are_refused(tokens: JoinTokens, uses: int, life_s: float) -> None:
    with pytest.raises(InvalidInput):
        tokens.create(uses, life_s)


def _try(file: Path, token: str, number: int) -> bool:
    try:
        JoinTokens(file).use(token, f"m{number}", str(number))
    except PermissionDenied:
        return False
    return True


def test_processes_that_use_a_token_at_once_are_counted_one_by_one(file: Path) -> None:
    token = JoinTokens(file).create(uses=3)
    with ProcessPoolExecutor(4) as pool:
        done = list(pool.map(_try, [file] * 16, [token] * 16, range(16)))
    assert sum(done) == 3
