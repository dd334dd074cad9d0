"""The form in which each HTTP path says errors: that of the protocol whose clients use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import (
    anthropic_body,
    anthropic_type,
    http_body,
    openai_body,
)

ErrorBody = dict[str, object]


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form in which a protocol's clients parse errors."""

    name: str
    """The name of its schema in the description of the endpoints."""
    body: Callable[[CatenaryError], ErrorBody]
    plain: Callable[[str, int], ErrorBody]
    """Makes the body for a message and an HTTP status, where no handler was reached."""
    echoes_id: bool = True
    """True if errors carry the id that the caller gave the request."""


def _openai_plain(message: str, status: int) -> ErrorBody:
    detail = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return {"error": detail}


def _anthropic_plain(message: str, status: int) -> ErrorBody:
    return {"type": "error", "error": {"type": anthropic_type(status), "message": message}}


_OPENAI = ErrorForm("OpenAIError", openai_body, _openai_plain)
_ANTHROPIC = ErrorForm("AnthropicError", anthropic_body, _anthropic_plain)
_OPEN_INFERENCE = ErrorForm(
    "InferenceError", http_body, lambda message, status: {"error": message}, echoes_id=False
)
_FORMS = (
    ("/v1/messages", _ANTHROPIC),
    ("/v1/", _OPENAI),
    ("/v2/rerank", _OPENAI),
    ("/rerank", _OPENAI),
    ("/score", _OPENAI),
    ("/tokenize", _OPENAI),
    ("/detokenize", _OPENAI),
)
"""The first prefix that fits counts; all other paths are the Open Inference Protocol's."""


def error_form(path: str) -> ErrorForm:
    """Returns the form in which errors of a path are said."""
    return next((form for prefix, form in _FORMS if path.startswith(prefix)), _OPEN_INFERENCE)
