"""Documents as typed records: what is wrong is named by its place, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from catenary_services.errors import InvalidInput
from catenary_services.json_fields import Count, check_version, converted, document_of


@dataclass(frozen=True, slots=True)
class Inner:
    sizes: tuple[Count, ...]
    share: float


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    inner: list[Inner]
    good: bool = True


DOCUMENT: dict[str, Any] = {"name": "a", "inner": [{"sizes": [1, 2], "share": 1}], "good": False}


def test_a_document_becomes_a_record_and_a_document_again() -> None:
    record = converted(DOCUMENT, Outer, "file")
    assert record.inner == [Inner((1, 2), 1.0)]
    assert document_of(record) == DOCUMENT


@pytest.mark.parametrize(
    ("change", "place", "said"),
    [
        ({"name": 3}, "name", "must be a text"),
        ({"name": None}, "name", "is missing"),
        ({"good": 1}, "good", "must be true or false"),
        ({"odd": 1}, "odd", "is unknown"),
        ({"inner": {}}, "inner", "must be a list"),
        ({"inner": [3]}, "inner[0]", "must be an object"),
        ({"inner": [{"share": 1}]}, "inner[0].sizes", "is missing"),
        ({"inner": [{"sizes": [1, True], "share": 1}]}, "inner[0].sizes[1]", "must be a whole"),
        ({"inner": [{"sizes": [-1], "share": 1}]}, "inner[0].sizes[0]", "a whole number >= 0"),
        ({"inner": [{"sizes": [], "share": "1"}]}, "inner[0].share", "must be a number"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], place: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        converted({**DOCUMENT, **change}, Outer, "file")
    assert caught.value.field == f"file.{place}"
    assert said in caught.value.message


def test_of_the_whole_document_the_file_is_named() -> None:
    for document in ([], None, 3):
        with pytest.raises(InvalidInput) as caught:
            converted(document, Outer, "file")
        assert caught.value.field == "file"


@pytest.mark.parametrize("version", [2, "1", True, None])
def test_another_version_is_refused(version: object) -> None:
    check_version({"version": 1, "more": "fields"}, 1, "file")
    with pytest.raises(InvalidInput, match=r"file\.version"):
        check_version({"version": version}, 1, "file")
