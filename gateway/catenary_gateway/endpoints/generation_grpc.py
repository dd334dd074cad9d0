"""The Generation service of gRPC, which returns generated text as a stream of responses."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc.aio

from catenary_gateway.admission.request_pipeline import RequestPipeline, caller
from catenary_gateway.endpoints.grpc_calls import answered
from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.generation.request import (
    AnswerChunk,
    ChatPrompt,
    GenerationOptions,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from catenary_gateway.observability.generations import ObjectivesReport
from catenary_gateway.tensors.validation import LONGEST_SLO_MS, NANOSECONDS_PER_MILLISECOND
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenary_services.errors import DeadlineExceeded, InvalidInput
from catenary_services.grpc.sampling_messages import message_of_logprobs, sampling_of_message

GENERATE = "catenary.v1.Generation/Generate"
READ_GRACE_S = 30.0
"""Seconds without any reading after which a client is given up, because what it has not read takes
memory."""
_LONGEST_ID = 256
_LONGEST_NS = int(LONGEST_SLO_MS * NANOSECONDS_PER_MILLISECOND)

Context = grpc.aio.ServicerContext[Any, Any]
Response = generation_pb2.GenerateResponse


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """The Generation service, which converts requests to generations and pieces to responses."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline

    @answered
    async def Generate(  # type: ignore[override]  # noqa: N802 - named by the protocol
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        """Streams one answer; `finish_reason` is set in its last response."""
        pipeline, sender = self._pipeline, caller()
        traceparent, arrivals = sender.metadata.get("traceparent"), pipeline.arrivals
        arrival = arrivals.arrive(GENERATE, traceparent, context.time_remaining())
        with pipeline.admit_prompt(request.ByteSize()):
            prompt, sampling = prompt_of(request), sampling_of_message(request.sampling)
            own_id = request.id[:_LONGEST_ID] or arrivals.new_id()
            with pipeline.admit_generation(sender.entered, request.model) as admitted:
                options = terms_of(request)
                opened = await admitted.generate(own_id, [prompt], sampling, options, arrival)
                with opened as answers:
                    await _answer(answers.streams[0], own_id, context)


async def _answer(generation: GenerationStream, own_id: str, context: Context) -> None:
    try:
        while (piece := await generation.next()) is not None:
            async with asyncio.timeout(READ_GRACE_S):
                await context.write(_response_of(piece, generation, own_id))
    except TimeoutError:
        raise DeadlineExceeded(
            "the answer was not read in time", details={"stage": "answer"}
        ) from None


def prompt_of(request: generation_pb2.GenerateRequest) -> Prompt:
    """Returns the one prompt of a request.

    Raises:
        InvalidInput: There is none, more than one, or a message without a role.
    """
    given: list[Prompt] = []
    if request.prompt:
        given.append(TextPrompt(request.prompt))
    if request.token_ids:
        given.append(TokenPrompt(request.token_ids))
    if request.messages:
        given.append(
            ChatPrompt([{"role": each.role, "content": each.content} for each in request.messages])
        )
    if len(given) != 1:
        raise InvalidInput("prompt", "exactly one of prompt, token_ids and messages must be given")
    for at, message in enumerate(request.messages):
        if not message.role:
            raise InvalidInput(f"messages[{at}].role", "is empty")
    return given[0]


def terms_of(request: generation_pb2.GenerateRequest) -> GenerationOptions:
    """Returns the options of a request: its time limits, priority and what is reported."""
    return GenerationOptions(
        deadline_ns=min(request.deadline_ns, _LONGEST_NS) or None,
        time_to_first_token_ns=min(request.time_to_first_token_slo_ns, _LONGEST_NS) or None,
        time_per_output_token_ns=min(request.time_per_output_token_slo_ns, _LONGEST_NS) or None,
        priority=request.priority,
        timed=request.timings,
        generated=tuple(request.generated_token_ids),
    )


def _objectives_message(report: ObjectivesReport) -> generation_pb2.ObjectivesReport:
    return generation_pb2.ObjectivesReport(
        time_to_first_token_slo_ns=report.first_token_slo_ns,
        time_per_output_token_slo_ns=report.per_token_slo_ns,
        time_to_first_token_ns=report.first_token_ns,
        time_per_output_token_ns=report.per_token_ns,
        predicted_time_to_first_token_ns=report.predicted_first_token_ns,
        predicted_time_per_output_token_ns=report.predicted_per_token_ns,
        met=report.met,
    )


def _response_of(piece: AnswerChunk, generation: GenerationStream, own_id: str) -> Response:
    response = Response(
        id=own_id,
        text=piece.text,
        token_ids=piece.token_ids,
        finish_reason=piece.finish_reason,
        generated_before=piece.generated_before,
        timings=[
            generation_pb2.TokenTiming(
                token_id=each.token_id, since_previous_ns=each.since_previous_ns, hops=each.hops
            )
            for each in piece.timings
        ],
        logprobs=[message_of_logprobs(each.logprobs) for each in piece.scored],
    )
    if not piece.generated_before:
        response.prompt_logprobs.extend(map(message_of_logprobs, generation.prompt_logprobs))
    if piece.finish_reason:
        response.usage.prompt_tokens = generation.prompt_tokens
        response.usage.completion_tokens = generation.completion_tokens
        response.usage.cached_tokens = generation.cached_tokens
        response.objectives.CopyFrom(_objectives_message(generation.objectives))
        for change in generation.chain_changes:
            response.chain_changes.add(**dataclasses.asdict(change))
    return response
