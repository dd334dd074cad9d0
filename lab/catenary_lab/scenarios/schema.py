"""Scenario files: typed, closed, with a JSON schema; what all kinds of them have in common.

A scenario is a YAML mapping; `kind` says which of a kind's classes it is. Unknown keys are errors,
and an error names its field. The end of a key says its unit: `_s`, `_ms`, `_gb`, `_rps`, `_per_s`,
`_tokens`. `quick` replaces keys for the short form that CI runs, and `expect` is what the long form
has to reach.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Self, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from catenary_services.errors import InvalidInput

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Load = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class Closed(BaseModel):
    """Part of a scenario; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Expectation(Closed):
    """A figure of the run beside its limit."""

    name: str = Field(min_length=1)
    value: str = Field(min_length=1, description="Expression of the figure (docs/scenarios.md).")
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _has_one_limit(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give either at_least or at_most")
        return self


class Scenario(Closed):
    """The keys every scenario has; its own class adds `kind` and what it is about."""

    title: str = Field(min_length=1, description="One line, for the report.")
    figure: str = Field("", description="Figure or table of the paper it reproduces.")
    quick: dict[str, Any] = Field(
        default_factory=dict, description="Keys to replace in the short form."
    )
    expect: list[Expectation] = Field(
        default_factory=list,
        description="Limits of figures of the long form; the short form has its own or none.",
    )


class Annotatable(Scenario):
    """A scenario whose file has sentences for its report."""

    notes: list[str] = Field(default_factory=list, description="Sentences below the tables.")


S = TypeVar("S", bound=Scenario)


class ScenarioFiles(Generic[S]):
    """Reads the scenario files of a kind.

    Args:
        scenarios: The union of their classes, told apart by `kind`.
    """

    def __init__(self, scenarios: Any) -> None:
        self._adapter: TypeAdapter[S] = TypeAdapter(scenarios)
        union = get_args(scenarios)[0]
        self.kinds: tuple[str, ...] = tuple(
            sorted(get_args(each.model_fields["kind"].annotation)[0] for each in get_args(union))
        )
        """Values of `kind`."""

    def json_schema(self) -> dict[str, Any]:
        """Returns the JSON schema of these files."""
        draft = "https://json-schema.org/draft/2020-12/schema"
        return {"$schema": draft, **self._adapter.json_schema()}

    def load(self, path: Path, *, quick: bool = False) -> S:
        """Returns the scenario of a YAML file, or its short form; `-` is the standard input.

        Raises:
            InvalidInput: If it is none; names the key that is missing, unknown or wrong.
        """
        return self.parse(read_mapping(path), path.name, quick=quick)

    def parse(self, document: object, where: str = "scenario", *, quick: bool = False) -> S:
        """Returns the scenario a document describes; see `load`.

        Args:
            document: A mapping, as YAML or JSON gives it.
            where: Named in errors.
            quick: The short form.
        """
        if not isinstance(document, Mapping):
            raise InvalidInput(where, "must be a mapping of a scenario's keys")
        scenario = self._validated(document, where)
        if quick and scenario.quick:
            short = {**document, "expect": [], **scenario.quick}
            scenario = self._validated(short, f"{where}.quick")
        return scenario

    def _validated(self, document: Mapping[Any, Any], where: str) -> S:
        kind = document.get("kind")
        if kind is None:
            raise InvalidInput(f"{where}.kind", "is missing")
        if kind not in self.kinds:
            raise InvalidInput(f"{where}.kind", f"{kind!r} is none of {', '.join(self.kinds)}")
        try:
            return self._adapter.validate_python(dict(document))
        except ValidationError as error:
            first = error.errors()[0]
            location = first["loc"][1:]  # pydantic's begins with the kind
            path = _keys(document, location, missing=first["type"] == "missing")
            text = first["msg"].removeprefix("Value error, ")
            raise InvalidInput(".".join([where, *path]), text) from None


def read_mapping(path: Path) -> Mapping[Any, Any]:
    """Returns the mapping of a YAML file; `-` is the standard input.

    Raises:
        InvalidInput: If the file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
        document = yaml.safe_load(text)
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = str(error).replace("\n", " ")
        raise InvalidInput(path.name, f"is not YAML: {text}") from None
    if not isinstance(document, Mapping):
        raise InvalidInput(path.name, "must be a mapping of a scenario's keys")
    return document


def expectations_of(path: Path) -> list[Expectation]:
    """Returns what the long form of a scenario file expects of its run."""
    expected = read_mapping(path).get("expect", [])
    return TypeAdapter(list[Expectation]).validate_python(expected)


def _keys(document: Any, location: Sequence[str | int], *, missing: bool) -> Iterator[str]:
    """Yields the document's own keys of an error's location, which names classes of unions too."""
    for at, part in enumerate(location):
        is_index = isinstance(document, list) and isinstance(part, int) and part < len(document)
        if is_index or (isinstance(document, Mapping) and part in document):
            document = document[part]
            yield str(part)
        elif missing and at == len(location) - 1:
            yield str(part)
