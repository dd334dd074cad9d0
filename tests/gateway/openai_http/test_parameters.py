"""One table of parameters: what is read is what it says, and the page shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from catenary_gateway.openai_http.completion_request import (
    CompletionRequest,
    chat_of,
    completion_of,
)
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.parameters import PARAMETERS
from catenary_gateway.openai_http.parameters.parameter import Parameter, ParameterKind
from catenary_services.errors import InvalidInput
from cluster_harness import ROOT
from docs_build.parameter_tables import tables

READERS = {"chats": chat_of, "completions": completion_of}
MEANT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
SOMETHING = {"an": "object that no parameter takes for nothing"}


class Noted(dict[str, object]):
    """Fields that note the names by which they are read."""

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def get(self, name: str, default: object = None) -> object:  # type: ignore[override]
        self.read.add(name)
        return super().get(name, default)


def named(path: str, kind: ParameterKind) -> dict[str, Parameter]:
    return {each.name: each for each in PARAMETERS if path in each.paths and each.kind is kind}


@pytest.mark.parametrize(("path", "read"), READERS.items())
def test_what_is_read_is_what_the_table_calls_taken(
    path: str, read: Callable[[Fields], CompletionRequest]
) -> None:
    seen: set[str] = set()
    form = {"response_format": {"type": "text"}}
    for more in ({"max_completion_tokens": 3}, form, {"tools": []}):
        fields = Noted(MEANT | more)
        read(fields)
        seen |= fields.read
    assert seen == named(path, ParameterKind.TAKEN).keys()


@pytest.mark.parametrize(("path", "read"), READERS.items())
def test_refused_parameters_are_refused_with_the_sentence_of_the_table(
    path: str, read: Callable[[Fields], CompletionRequest]
) -> None:
    for name, parameter in named(path, ParameterKind.REFUSED).items():
        read(MEANT | {name: None})
        with pytest.raises(InvalidInput) as caught:
            read(MEANT | {name: SOMETHING})
        assert caught.value.field == name
        assert parameter.text in str(caught.value)


@pytest.mark.parametrize(("path", "read"), READERS.items())
def test_ignored_parameters_and_unknown_ones_change_nothing(
    path: str, read: Callable[[Fields], CompletionRequest]
) -> None:
    ignored = [*named(path, ParameterKind.IGNORED), "whatever_comes_next_year"]
    assert read(MEANT | dict.fromkeys(ignored, SOMETHING)) == read(MEANT)


def test_no_parameter_is_treated_in_two_ways() -> None:
    times = Counter((path, each.name) for each in PARAMETERS for path in each.paths)
    assert {one: count for one, count in times.items() if count > 1} == {}


def test_the_page_shows_the_table() -> None:
    assert tables() in (ROOT / "docs/openai.md").read_text()
