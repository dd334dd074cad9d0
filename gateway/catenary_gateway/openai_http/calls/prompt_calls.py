"""The one way from the body of an HTTP request to a generated answer, or to embeddings.

Chats, completions, responses and messages differ in how they are written and answered. What lies
between is here: who calls, how large the body is, what it says, and the session that answers it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from catenary_gateway.admission.concurrency_limiter import ConcurrencyPermit
from catenary_gateway.admission.request_pipeline import RequestPipeline, caller
from catenary_gateway.endpoints.connections.http_call import REQUEST_ID
from catenary_gateway.endpoints.http_bodies import OFF_LOOP, body_of, require_announced
from catenary_gateway.endpoints.http_calls import PIPELINE, enter, request_id_of
from catenary_gateway.generation.choices import ChoiceStreams
from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.generation.request import GenerationOptions
from catenary_gateway.inference import RequestArrival
from catenary_gateway.openai_http.completion_request import CompletionRequest
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.tensors.json_documents import document_of
from catenary_gateway.tensors.validation import LONGEST_SLO_MS, NANOSECONDS_PER_MILLISECOND
from catenary_services.errors import InvalidInput
from catenary_services.security.keys import Principal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptCall:
    """A call with a prompt or texts in its body: let in by its headers, read, and not answered yet.

    Everything it holds is given back at the end of the block of `read_call`.
    """

    request: web.Request
    pipeline: RequestPipeline
    principal: Principal
    arrival: RequestArrival
    permit: ConcurrencyPermit
    id: str
    """The id that the caller gave, else a new one."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every answer."""
        return {REQUEST_ID: self.id}

    @asynccontextmanager
    async def answers(self, wanted: CompletionRequest) -> AsyncIterator[ChoiceStreams]:
        """Yields the answers to a completion or chat, which end with the block.

        Raises:
            CatenaryError: The caller may not have an answer, or the request does not fit the model.
        """
        options = GenerationOptions(
            deadline_ns=duration_ns(self.request, "x-deadline-ms"),
            time_to_first_token_ns=duration_ns(self.request, "x-slo-ttft-ms"),
            time_per_output_token_ns=duration_ns(self.request, "x-slo-tpot-ms"),
            priority=wanted.priority,
            grammar_field=wanted.grammar_field,
        )
        with self.pipeline.admit_generation(self.principal, wanted.model) as admitted:
            opened = await admitted.generate(
                self.id,
                wanted.prompts,
                wanted.sampling,
                options,
                self.arrival,
                wanted.generated,
            )
            with opened as answers:
                yield answers

    @asynccontextmanager
    async def answer(self, wanted: CompletionRequest) -> AsyncIterator[GenerationStream]:
        """Yields the one answer to a chat of which one is wanted; see `answers`.

        Raises:
            CatenaryError: The caller may not have an answer, or the request does not fit the model.
        """
        async with self.answers(wanted) as answers:
            yield answers.streams[0]


@asynccontextmanager
async def read_call(
    request: web.Request, read: Callable[[Fields], T]
) -> AsyncIterator[tuple[PromptCall, T]]:
    """Lets a caller in, and yields the call with what `read` makes of the fields of its body.

    Raises:
        CatenaryError: The caller is refused, or the body is too large or wrong.
    """
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
        own_id = request_id_of(request) or pipeline.arrivals.new_id()
        yield PromptCall(request, pipeline, principal, arrival, permit, own_id), wanted


@contextmanager
def fields_called(name_of: Callable[[str], str]) -> Iterator[None]:
    """Has errors within the block name fields as the caller's protocol calls them.

    Args:
        name_of: Returns the caller's name of a field of a chat completion.

    Raises:
        InvalidInput: The error, with the caller's name.
    """
    try:
        yield
    except InvalidInput as error:
        name = name_of(error.field)
        if name == error.field:
            raise
        renamed = InvalidInput(name, error.message.removeprefix(f"{error.field}: "))
        renamed.details.update({k: v for k, v in error.details.items() if k != "field"})
        raise renamed from None


def duration_ns(request: web.Request, header: str) -> int | None:
    """Returns the nanoseconds in a header of milliseconds; None if it is absent.

    Raises:
        InvalidInput: The header is not a number above 0.
    """
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
