"""The list of models that take texts or prompts, and the version of the server."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from catenary_gateway.admission.request_pipeline import RequestPipeline
from catenary_gateway.catalog import Model
from catenary_gateway.endpoints.http_calls import PIPELINE, enter, json_response
from catenary_services.errors import ModelNotFound
from catenary_services.version import software_version

_OWNER = "catenary"
_SHOWN = 100
_STARTED = int(time.time())
_STARTED_AT = datetime.fromtimestamp(_STARTED, UTC).isoformat()


async def answer_version(request: web.Request) -> web.Response:
    """Says the server's version."""
    enter(request)
    return json_response({"version": software_version()})


async def answer_models(request: web.Request) -> web.Response:
    """Lists the models that generate text and the encoders, the newest version of each.

    The document is OpenAI's and Anthropic's in one: all are on one page.
    """
    pipeline = request.app[PIPELINE]
    enter(request)
    listed = [
        _document(model, reference)
        for name, model in _text_models(pipeline).items()
        for reference in (name, *(f"{name}:{adapter}" for adapter in model.adapters))
    ]
    names = [each["id"] for each in listed] or [None]
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return json_response({"object": "list", "data": listed} | pages)


async def answer_model(request: web.Request) -> web.Response:
    """Describes one model, by its name, `name:version` or `name:adapter`."""
    pipeline = request.app[PIPELINE]
    enter(request)
    reference = request.match_info["model"]
    name, _, version = reference.partition(":")
    model = pipeline.catalog.find(name, version)
    if not model.takes_texts:
        shown = reference[:_SHOWN]
        raise ModelNotFound(f"no model {shown!r} that takes texts", details={"model": shown})
    return json_response(_document(model, reference))


def _text_models(pipeline: RequestPipeline) -> dict[str, Model]:
    models = pipeline.catalog.models()
    names = dict.fromkeys(model.key.name for model in models if model.takes_texts)
    return {name: pipeline.catalog.find(name, "") for name in names}


def _document(model: Model, reference: str) -> dict[str, Any]:
    return {
        "id": reference,
        "object": "model",
        "created": _STARTED,
        "owned_by": _OWNER,
        # vLLM's name for it; load tools look for it.
        "max_model_len": model.most_tokens,
        # Anthropic's clients call the same path, and want these.
        "type": "model",
        "display_name": reference,
        "created_at": _STARTED_AT,
        "lifecycle": "active",
        "max_input_tokens": model.most_tokens,
    }
