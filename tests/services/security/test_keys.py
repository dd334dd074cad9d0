from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from catenary_services.errors import InvalidInput, PermissionDenied, Unauthenticated
from catenary_services.security.keys import ApiKeys, add_key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_without_a_file_everyone_is_let_in() -> None:
    keys = ApiKeys.load(None)
    assert not keys.enabled
    keys.check(None).require("admin")


def test_created_key_is_known_in_every_usual_form(file: Path) -> None:
    key = add_key(file, "ci", ["infer"])
    keys = ApiKeys.load(file)
    assert keys.enabled
    for presented in (key, f"Bearer {key}", f"bearer  {key} "):
        assert keys.check(presented).name == "ci"


@pytest.mark.parametrize(
    "presented", [None, "", "Bearer", "Bearer ", "Basic abc", "x" * 100_000, "ctn_", "\udcff", "é"]
)
def test_anything_else_is_unauthenticated(file: Path, presented: str | None) -> None:
    add_key(file, "ci", ["infer"])
    with pytest.raises(Unauthenticated):
        ApiKeys.load(file).check(presented)


def test_altered_key_is_unknown(file: Path) -> None:
    key = add_key(file, "ci", ["infer"])
    with pytest.raises(Unauthenticated):
        ApiKeys.load(file).check(key[:-1] + ("A" if key[-1] != "A" else "B"))


def test_file_holds_hashes_and_is_private(file: Path) -> None:
    key = add_key(file, "ci", ["infer"])
    assert key not in file.read_text()
    assert key.removeprefix("ctn_") not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_are_rotated_by_overlap(file: Path) -> None:
    old, new = add_key(file, "ci", ["infer"]), add_key(file, "ci", ["admin"])
    keys = ApiKeys.load(file)
    assert keys.check(old).scopes == {"infer"}
    assert keys.check(new).scopes == {"admin"}


@pytest.mark.parametrize(
    ("granted", "asked", "allowed"),
    [
        (["infer"], "infer", True),
        (["infer"], "infer:resnet", True),
        (["infer:resnet"], "infer:resnet", True),
        (["infer:resnet"], "infer:vgg", False),
        (["infer:resnet"], "infer", False),
        (["infer"], "admin", False),
        (["*"], "admin", True),
        ([], "infer", False),
    ],
)
def test_scopes(file: Path, granted: list[str], asked: str, allowed: bool) -> None:
    key = add_key(file, "x", granted)
    principal = ApiKeys.load(file).check(key)
    assert principal.allows(asked) is allowed
    if allowed:
        principal.require(asked)
    else:
        with pytest.raises(PermissionDenied):
            principal.require(asked)


GOOD = {"name": "n", "sha256": "00" * 32, "scopes": []}


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ("not json", "api_keys_file"),
        ("[]", "api_keys_file"),
        ('{"keys": {}}', "api_keys_file"),
        (json.dumps({"keys": [5]}), "api_keys_file.keys[0]"),
        (json.dumps({"keys": [GOOD, {**GOOD, "name": ""}]}), "api_keys_file.keys[1].name"),
        (json.dumps({"keys": [{**GOOD, "sha256": "00"}]}), "api_keys_file.keys[0].sha256"),
        (json.dumps({"keys": [{**GOOD, "sha256": "zz" * 32}]}), "api_keys_file.keys[0].sha256"),
        (json.dumps({"keys": [{**GOOD, "scopes": "infer"}]}), "api_keys_file.keys[0].scopes"),
    ],
)
def test_wrong_file_is_refused_and_never_means_open(file: Path, document: str, field: str) -> None:
    file.write_text(document)
    with pytest.raises(InvalidInput) as caught:
        ApiKeys.load(file)
    assert caught.value.field == field


def test_missing_file_is_refused(file: Path) -> None:
    with pytest.raises(InvalidInput):
        ApiKeys.load(file)


def test_adding_to_a_damaged_file_leaves_it_alone(file: Path) -> None:
    file.write_text("damaged")
    with pytest.raises(InvalidInput):
        add_key(file, "x", [])
    assert file.read_text() == "damaged"


def test_empty_key_list_lets_nobody_in(file: Path) -> None:
    file.write_text('{"keys": []}')
    with pytest.raises(Unauthenticated):
        ApiKeys.load(file).check("ctn_x")
