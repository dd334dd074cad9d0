"""Requests to encoders: texts, pairs of texts or token ids to the data plane, and arrays back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from catenary_gateway.admission.authorizer import AdmittedInference
from catenary_gateway.catalog import Model
from catenary_gateway.data_plane import DEFAULT_SLO_NS
from catenary_gateway.generation.intake import TOO_LONG, is_unicode
from catenary_gateway.inference import LONGEST_BUDGET_NS, InferenceOptions, InferenceRequest
from catenary_gateway.openai_http.calls.bodies import ModelName, UserName
from catenary_gateway.openai_http.calls.prompt_calls import (
    PromptCall,
    duration_ns,
    fields_called,
    read_call,
)
from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.tensors.raw_tensors import object_array
from catenary_services.errors import InvalidInput

MOST_TEXTS = 2048
"""Most texts, or pairs of texts, of one request; OpenAI's own limit for embeddings."""
Vectors = NDArray[np.float32]
Priority = Annotated[
    int,
    msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1, description="The lowest is served first."),
]


class EncoderBody(msgspec.Struct, kw_only=True):
    """The fields that all requests to encoders have."""

    model: ModelName
    user: UserName = None
    priority: Priority = 0


class EncoderRequest(Protocol):
    """A request to an encoder, as far as all of them are alike once their bodies were checked."""

    @property
    def model(self) -> str: ...

    @property
    def priority(self) -> int: ...


T = TypeVar("T", bound=EncoderRequest)


@dataclass(frozen=True, slots=True)
class EncoderRows:
    """The rows of a request to an encoder, of one of three kinds: the others are empty."""

    texts: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()
    token_rows: Sequence[Sequence[int]] = ()

    def __len__(self) -> int:
        return len(self.texts) or len(self.pairs) or len(self.token_rows)


@dataclass(frozen=True, slots=True)
class EncoderAnswer:
    """One output of an encoder, a row for each row of the request."""

    rows: Vectors
    tokens: int


@dataclass(frozen=True, slots=True)
class EncoderCall:
    """A request to an encoder that was let in."""

    call: PromptCall
    admitted: AdmittedInference
    priority: int

    @property
    def model(self) -> Model:
        return self.admitted.model

    async def ask(self, rows: EncoderRows, output: str) -> EncoderAnswer:
        """Returns one output of the model for each row.

        Raises:
            InvalidInput: The model has no such output, or a row does not fit it; the field is
                "model" or "text".
            CatenaryError: The data plane has no answer.
        """
        model = self.model
        index = model.output_index.get(output)
        if index is None:
            known = ", ".join(model.output_index)
            raise InvalidInput("model", f"{model.key.name!r} answers {known}, not {output}")
        inputs: dict[str, NDArray[Any]] = {}
        if rows.token_rows:
            await self._check_tokens(rows.token_rows)
        else:
            texts = rows.texts or [text for pair in rows.pairs for text in pair]
            # A query stands beside each of its documents, and is held once.
            encoded = {text: _encoded(text) for text in dict.fromkeys(texts)}
            shape = (len(rows), 2) if rows.pairs else (len(rows),)
            inputs = {model.inputs[0].name: object_array([encoded[t] for t in texts], shape)}
        request = InferenceRequest(
            model=model,
            id=self.call.id,
            inputs=inputs,
            rows=len(rows),
            outputs=(index,),
            options=self._options(len(rows)),
            token_rows=tuple(rows.token_rows),
        )
        answer = await self.admitted.infer(request, self.call.arrival)
        return EncoderAnswer(answer.outputs[0].astype(np.float32, copy=False), answer.tokens)

    def _options(self, rows: int) -> InferenceOptions:
        # A model's objective is for one text. A thousand of them have a thousand times as long,
        # else no list that is longer than what fits into the objective could be answered.
        usual_ns = (self.model.default_slo_ns or DEFAULT_SLO_NS) * rows
        slo_ns = duration_ns(self.call.request, "x-deadline-ms") or min(usual_ns, LONGEST_BUDGET_NS)
        return InferenceOptions(slo_ns, self.priority)

    async def _check_tokens(self, token_rows: Sequence[Sequence[int]]) -> None:
        most, vocabulary = self.model.text_tokens, (await self.admitted.codec()).vocabulary_size
        for at, ids in enumerate(token_rows):
            if not ids:
                raise InvalidInput("text", f"row {at} has no tokens")
            if len(ids) > most:
                text = f"row {at} has {len(ids)} tokens; this model takes {most}"
                error = InvalidInput("text", text)
                error.details["code"] = TOO_LONG
                raise error
            if not 0 <= min(ids) <= max(ids) < vocabulary:
                text = f"row {at}: token ids of this model lie in 0..{vocabulary - 1}"
                raise InvalidInput("text", text)


@asynccontextmanager
async def encoder_call(
    request: web.Request, read: Callable[[Fields], T], field: str
) -> AsyncIterator[tuple[EncoderCall, T]]:
    """Lets in a request to an encoder, and yields it with what `read` makes of its body.

    Args:
        request: The request.
        read: Reads the fields of the body.
        field: The field that errors of texts name.

    Raises:
        CatenaryError: The caller is refused, or the body is wrong.
    """
    async with read_call(request, read) as (call, wanted):
        names = {"text": field, "model_name": "model"}
        with fields_called(lambda name: names.get(name, name)):
            admitted = call.pipeline.admit_texts(call.principal, wanted.model, call.permit)
            with admitted:
                yield EncoderCall(call, admitted, -wanted.priority), wanted


def require_some(field: str, rows: Sequence[object]) -> None:
    """Checks the number of texts in a field.

    Raises:
        InvalidInput: There is none, or there are more than `MOST_TEXTS`.
    """
    if not rows:
        raise InvalidInput(field, "must not be empty")
    if len(rows) > MOST_TEXTS:
        raise InvalidInput(field, f"has {len(rows)} entries; at most {MOST_TEXTS} may be")


def _encoded(text: str) -> bytes:
    if not is_unicode(text):
        raise InvalidInput("text", "has halves of characters (lone surrogates)")
    return text.encode()


def usage_of(tokens: int) -> dict[str, Any]:
    """Returns the `usage` object of an answer without generated tokens."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}
