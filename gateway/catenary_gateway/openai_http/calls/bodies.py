"""Bodies of requests as types: what a field may be is said once, for checks and documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from catenary_services.errors import InvalidInput

T = TypeVar("T", bound=msgspec.Struct)
_PLACE = re.compile(r"(?P<text>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_LONGEST = 200

ModelName = Annotated[
    str, msgspec.Meta(min_length=1, description="A model, as `name` or `name:version`.")
]
UserName = Annotated[str | None, msgspec.Meta(description="Whom the request is for; ignored.")]


class SamplingBody(msgspec.Struct, kw_only=True):
    """The fields of sampling that all requests for text have.

    `completion_request` checks their values, in the form that a chat completion has for them.
    """

    temperature: Annotated[float, msgspec.Meta(description="0 is greedy.")] = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, msgspec.Meta(description="0 and -1 are all tokens.")] = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: Annotated[dict[str, float], msgspec.Meta(description="By token ids.")] = {}
    priority: Annotated[int, msgspec.Meta(description="The lowest is served first.")] = 0
    chat_template_kwargs: Annotated[
        dict[str, Any], msgspec.Meta(description="Variables for the model's chat template.")
    ] = {}


SAMPLING_FIELDS = SamplingBody.__struct_fields__


def sampling_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of sampling in a body, which are the same in a chat completion."""
    return {name: fields[name] for name in SAMPLING_FIELDS if name in fields}


def typed(fields: Mapping[str, Any], kind: type[T]) -> T:
    """Returns the fields of a body as a type; fields that it does not have are ignored.

    A field that is null is as good as absent, since many clients send null for what they leave out.

    Raises:
        InvalidInput: A field is missing, or is not what the type says.
    """
    try:
        return msgspec.convert({k: v for k, v in fields.items() if v is not None}, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (ValueError, OverflowError, RecursionError):
        raise InvalidInput("body", "has a number or a nesting beyond all bounds") from None


def _named(said: str) -> InvalidInput:
    """Returns the error for what msgspec says, with the field's name first."""
    match = _PLACE.fullmatch(said)
    assert match is not None
    text, path = match["text"], (match["path"] or "").removeprefix(".")
    missing = _MISSING.fullmatch(text)
    if missing is not None:
        field = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidInput(field, "is missing")
    text = text.replace("Expected ", "must be ", 1).replace(", got ", ", not ", 1)
    text = text.replace("Invalid enum value ", "has no meaning here: ", 1)
    return InvalidInput(path[:_LONGEST] or "body", text[:_LONGEST])
