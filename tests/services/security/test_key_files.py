"""The file of API keys: limits, expiry, what is read again while a process runs."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from catenary_services.errors import InvalidInput, PermissionDenied, Unauthenticated
from catenary_services.security.key_file import LARGEST_FILE_BYTES, describe_keys, revoke_keys
from catenary_services.security.key_limits import KeyLimits, RateLimit
from catenary_services.security.keys import ANYONE, ApiKeys, Principal, add_key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def moment(hours: float) -> str:
    return (datetime.now(UTC) + timedelta(hours=hours)).isoformat()


def test_limits_of_a_key_are_those_in_the_file(file: Path) -> None:
    limits = {
        "max_priority": 3,
        "requests_per_s": 5.5,
        "burst": 9,
        "tokens_per_s": 100,
        "token_burst": 700,
        "share": 2.5,
        "expires": moment(1),
    }
    key = add_key(file, "ci", ["infer"], limits)
    assert ApiKeys.load(file).check(key).limits == KeyLimits(
        3, RateLimit(5.5, 9.0), RateLimit(100.0, 700.0), 2.5
    )


def test_a_key_without_limits_is_as_it_always_was(file: Path) -> None:
    key = add_key(file, "ci", ["infer"])
    assert ApiKeys.load(file).check(key).limits == KeyLimits(0, None, None, 1.0)


def test_a_burst_that_is_not_given_is_a_second_of_requests_and_ten_of_tokens(file: Path) -> None:
    key = add_key(file, "ci", [], {"requests_per_s": 2.5, "tokens_per_s": 40})
    limits = ApiKeys.load(file).check(key).limits
    assert (limits.requests, limits.tokens) == (RateLimit(2.5, 3.0), RateLimit(40.0, 400.0))


def test_an_expired_key_is_refused_at_its_moment(file: Path) -> None:
    over = add_key(file, "over", ["infer"], {"expires": moment(-0.01)})
    good = add_key(file, "good", ["infer"], {"expires": moment(1)})
    keys = ApiKeys.load(file)
    assert keys.check(good).name == "good"
    with pytest.raises(Unauthenticated, match="expired"):
        keys.check(over)


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"max_priority": 1.5}, "max_priority"),
        ({"max_priority": True}, "max_priority"),
        ({"max_priority": 2**40}, "max_priority"),
        ({"requests_per_s": 0}, "requests_per_s"),
        ({"requests_per_s": -1}, "requests_per_s"),
        ({"requests_per_s": "5"}, "requests_per_s"),
        ({"requests_per_s": float("nan")}, "requests_per_s"),
        ({"requests_per_s": float("inf")}, "requests_per_s"),
        ({"requests_per_s": 5, "burst": 0}, "burst"),
        ({"requests_per_s": 5, "burst": 1.5}, "burst"),
        ({"burst": 5}, "burst"),
        ({"token_burst": 5}, "token_burst"),
        ({"tokens_per_s": [1]}, "tokens_per_s"),
        ({"share": 0}, "share"),
        ({"share": True}, "share"),
        ({"share": 1e9}, "share"),
        ({"expires": "tomorrow"}, "expires"),
        ({"expires": "2030-01-01T00:00:00"}, "expires"),
        ({"expires": 5}, "expires"),
        ({"request_per_s": 5}, "request_per_s"),
        ({"name": "x" * 129}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"scopes": ["x" * 300]}, "scopes"),
    ],
)
def test_a_wrong_limit_is_refused_by_its_name(
    file: Path, entry: dict[str, Any], field: str
) -> None:
    whole = {"name": "n", "sha256": "00" * 32, "scopes": [], **entry}
    file.write_text(json.dumps({"keys": [whole]}))
    with pytest.raises(InvalidInput) as caught:
        ApiKeys.load(file)
    assert caught.value.field == f"api_keys_file.keys[0].{field}"


def test_a_file_beyond_the_largest_size_is_not_read(file: Path) -> None:
    file.write_text(" " * (LARGEST_FILE_BYTES + 1))
    with pytest.raises(InvalidInput, match="larger"):
        ApiKeys.load(file)


def test_deeply_nested_json_is_refused(file: Path) -> None:
    file.write_text('{"keys": ' + "[" * 100_000)
    with pytest.raises(InvalidInput):
        ApiKeys.load(file)


def test_overlapping_keys_of_one_name_must_have_the_same_limits(file: Path) -> None:
    add_key(file, "ci", ["infer"], {"share": 2})
    before = file.read_text()
    with pytest.raises(InvalidInput, match="other limits"):
        add_key(file, "ci", ["infer"])
    assert file.read_text() == before
    add_key(file, "ci", ["infer"], {"share": 2})


def test_a_key_that_is_added_is_known_and_one_that_is_removed_refused(file: Path) -> None:
    old = add_key(file, "old", ["infer"])
    keys = ApiKeys.load(file)
    assert not keys.refresh()
    new = add_key(file, "new", ["infer"])
    assert keys.refresh()
    assert keys.check(new).name == "new"
    assert revoke_keys(file, "old") == 1
    assert keys.check(old).name == "old"
    assert keys.refresh()
    with pytest.raises(Unauthenticated):
        keys.check(old)
    assert keys.names == {"new"}


@pytest.mark.parametrize("content", ["damaged", '{"keys": [5]}', None])
def test_a_broken_file_keeps_the_keys_and_says_so_once(
    file: Path, content: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    key = add_key(file, "ci", ["infer"])
    keys = ApiKeys.load(file)
    whole = file.read_text()
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    assert not keys.refresh()
    assert not keys.refresh()
    assert keys.check(key).name == "ci"
    heard = "".join(capfd.readouterr())
    assert heard.count("api_keys_not_reloaded") == 1
    file.write_text(whole)
    assert keys.refresh()


def test_a_file_replaced_within_one_tick_of_the_clock_is_noticed(file: Path) -> None:
    key = add_key(file, "aa", ["infer"])
    keys = ApiKeys.load(file)
    stamp = file.stat()
    other = file.with_name("other.json")
    other.write_text(file.read_text().replace('"aa"', '"bb"'))
    os.utime(other, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    other.replace(file)
    assert keys.refresh()
    assert keys.check(key).name == "bb"


def test_one_of_two_keys_of_a_name_is_revoked_by_its_hash(file: Path) -> None:
    old, new = add_key(file, "ci", ["infer"]), add_key(file, "ci", ["infer"])
    listed = describe_keys(file)
    assert [entry["name"] for entry in listed] == ["ci", "ci"]
    assert revoke_keys(file, "ci", str(listed[0]["sha256"])) == 1
    keys = ApiKeys.load(file)
    assert keys.check(new).name == "ci"
    with pytest.raises(Unauthenticated):
        keys.check(old)
    with pytest.raises(InvalidInput, match="no key called"):
        revoke_keys(file, "nobody")


def test_a_list_shows_no_whole_hash(file: Path) -> None:
    add_key(file, "ci", ["infer"])
    whole = json.loads(file.read_text())["keys"][0]["sha256"]
    shown = str(describe_keys(file))
    assert whole not in shown
    assert whole[:12] in shown


def test_admin_may_look_and_who_may_look_is_no_admin() -> None:
    admin, viewer = Principal("a", frozenset({"admin"})), Principal("v", frozenset({"view"}))
    assert admin.allows("view")
    assert viewer.allows("view")
    assert not viewer.allows("admin")
    assert not viewer.allows("infer")
    assert not Principal("i", frozenset({"infer"})).allows("view")


@pytest.mark.parametrize(
    ("most", "asked", "given"), [(0, 0, 0), (0, -5, -5), (5, 5, 5), (-3, 0, -3), (-3, -7, -7)]
)
def test_a_priority_within_the_limit_is_given(most: int, asked: int, given: int) -> None:
    key = Principal("k", frozenset(), KeyLimits(max_priority=most))
    assert key.require_priority(asked) == given


@pytest.mark.parametrize(("most", "asked"), [(0, 1), (5, 6), (-3, -2)])
def test_a_priority_beyond_the_limit_is_refused_by_its_name(most: int, asked: int) -> None:
    key = Principal("k", frozenset(), KeyLimits(max_priority=most))
    with pytest.raises(PermissionDenied, match=f"max_priority is {most}"):
        key.require_priority(asked)


def test_without_keys_any_priority_is_given() -> None:
    assert ANYONE.require_priority(2**31 - 1) == 2**31 - 1
