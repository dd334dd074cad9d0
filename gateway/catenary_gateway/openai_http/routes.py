"""The HTTP routes of the OpenAI API, below `/v1`."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from catenary_gateway.admission.request_pipeline import RequestPipeline, caller
from catenary_gateway.catalog import Model
from catenary_gateway.endpoints.http_bodies import OFF_LOOP, body_of, require_announced
from catenary_gateway.endpoints.http_calls import (
    PIPELINE,
    REQUEST_ID,
    enter,
    json_response,
    request_id_of,
)
from catenary_gateway.endpoints.repository import server_version
from catenary_gateway.generation.request import GenerationOptions
from catenary_gateway.openai_http.answers import (
    AnswerWriter,
    model_document,
    prediction_headers,
    whole_answer,
)
from catenary_gateway.openai_http.completion_request import (
    CompletionRequest,
    chat_of,
    completion_of,
)
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.streaming import stream_answer
from catenary_gateway.tensors.json_documents import document_of
from catenary_gateway.tensors.validation import LONGEST_SLO_MS, NANOSECONDS_PER_MILLISECOND
from catenary_services.errors import InvalidInput, ModelNotFound

_SHOWN = 100


def routes() -> list[web.RouteDef]:
    """Returns the routes below `/v1`, and vLLM's route for the version."""
    return [
        web.get("/v1/models", _models),
        web.get("/v1/models/{model}", _model),
        web.post("/v1/chat/completions", _chat),
        web.post("/v1/completions", _completion),
        web.get("/version", _version),
    ]


async def _version(request: web.Request) -> web.Response:
    enter(request)
    return json_response({"version": server_version()})


async def _models(request: web.Request) -> web.Response:
    pipeline = request.app[PIPELINE]
    enter(request)
    listed = [model_document(model, name) for name, model in _generating(pipeline).items()]
    return json_response({"object": "list", "data": listed})


async def _model(request: web.Request) -> web.Response:
    pipeline = request.app[PIPELINE]
    enter(request)
    reference = request.match_info["model"]
    name, _, version = reference.partition(":")
    model = pipeline.catalog.find(name, version)
    if not model.generates:
        shown = reference[:_SHOWN]
        raise ModelNotFound(f"no model {shown!r} that generates text", details={"model": shown})
    return json_response(model_document(model, reference))


def _generating(pipeline: RequestPipeline) -> dict[str, Model]:
    """Returns the models that generate text, the newest version of each, by name."""
    names = dict.fromkeys(model.key.name for model in pipeline.catalog.models() if model.generates)
    return {name: pipeline.catalog.find(name, "") for name in names}


async def _chat(request: web.Request) -> web.StreamResponse:
    return await _complete(request, chat_of, chat=True)


async def _completion(request: web.Request) -> web.StreamResponse:
    return await _complete(request, completion_of, chat=False)


async def _complete(
    request: web.Request, read: Callable[[Fields], CompletionRequest], *, chat: bool
) -> web.StreamResponse:
    pipeline = request.app[PIPELINE]
    arrival = pipeline.arrivals.arrive(request.path, request.headers.get("traceparent"))
    # Checked before the body is read: a refused request need not be received.
    principal = enter(request, counts=True)
    require_announced(request, pipeline.max_prompt_bytes)
    with pipeline.admit_prompt(0) as permit:
        with permit.arriving(caller().subject):
            body = await body_of(request, pipeline.max_prompt_bytes, permit)
            off_loop = request.app[OFF_LOOP]
            wanted = await off_loop.run(len(body), lambda: read(document_of(body)))
        options = _terms(request, wanted)
        own_id = request_id_of(request) or pipeline.arrivals.new_id()
        with pipeline.admit_generation(principal, wanted.model) as admitted:
            opened = await admitted.generate(
                own_id, wanted.prompts, wanted.sampling, options, arrival, wanted.generated
            )
            writer = AnswerWriter(f"{'chatcmpl' if chat else 'cmpl'}-{own_id}", wanted, chat)
            headers = {REQUEST_ID: own_id}
            with opened as answers:
                if wanted.stream:
                    return await stream_answer(request, writer, answers, headers)
                document = await whole_answer(wanted, writer, answers)
                headers |= prediction_headers(answers.streams[0])
            return json_response(document, headers=headers)


def _terms(request: web.Request, wanted: CompletionRequest) -> GenerationOptions:
    return GenerationOptions(
        deadline_ns=_duration_ns(request, "x-deadline-ms"),
        time_to_first_token_ns=_duration_ns(request, "x-slo-ttft-ms"),
        time_per_output_token_ns=_duration_ns(request, "x-slo-tpot-ms"),
        priority=wanted.priority,
        grammar_field=wanted.grammar_field,
    )


def _duration_ns(request: web.Request, header: str) -> int | None:
    text = request.headers.get(header)
    if text is None:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        raise InvalidInput(header, "must be a number of milliseconds") from None
    if not 0 < milliseconds < float("inf"):
        raise InvalidInput(header, "must be greater than 0")
    return max(1, int(min(milliseconds, LONGEST_SLO_MS) * NANOSECONDS_PER_MILLISECOND))
