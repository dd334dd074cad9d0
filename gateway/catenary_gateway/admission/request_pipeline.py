"""The steps that every endpoint takes with a caller before and after it converts messages."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from catenary_gateway.admission.authorizer import Authorizer
from catenary_gateway.admission.callers import Caller, caller
from catenary_gateway.admission.concurrency_limiter import ConcurrencyLimiter, ConcurrencyPermit
from catenary_gateway.admission.loop_lag import LoopLag
from catenary_gateway.admission.readiness import Readiness
from catenary_gateway.catalog import Catalog, Model
from catenary_gateway.data_plane import DataPlane, budget_of
from catenary_gateway.generation.answer import GenerationStream
from catenary_gateway.generation.intake import request_of
from catenary_gateway.generation.plane import SessionPlane
from catenary_gateway.generation.request import GenerationOptions, Prompt
from catenary_gateway.generation.text.text_codec import TextCodecs
from catenary_gateway.inference import (
    ConversionContext,
    InferenceRequest,
    InferenceResponse,
    RequestArrival,
)
from catenary_gateway.observability.request_metrics import OK
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import CatenaryError, InvalidInput, PayloadTooLarge, Unauthenticated
from catenary_services.grpc.error_tables import error_of_exception
from catenary_services.security.keys import SCOPE_INFER, ApiKeys, Principal
from catenary_services.telemetry.tracing import Tracer

_LONGEST_ID = 256
_ANSWER_MARGIN_S = 0.05
_ANSWER_MARGIN_SHARE = 0.01
"""Part of a client's waiting time by which it is answered earlier. A client that waits long loses
nothing by it, and a machine may become busy meanwhile."""
_ANSWER_MARGIN_LAGS = 3.0
"""Number of event-loop lags by which a client is answered earlier: for the timer that ends its
request, for the answer's way out, and one in reserve."""


@dataclass(slots=True)
class AdmittedRequest:
    """An admitted inference request on its way to the data plane."""

    model: Model
    permit: ConcurrencyPermit
    principal: Principal
    _plane: DataPlane
    _authorizer: Authorizer
    handed_over: bool = False
    """True once the data plane has the request and counts its outcome."""

    async def infer(self, request: InferenceRequest, arrival: RequestArrival) -> InferenceResponse:
        """Returns the data plane's answer to a request.

        Raises:
            PermissionDenied: The request asks for a higher priority than its key may.
            Overloaded: The model cannot answer more in time.
            CatenaryError: The data plane has no answer.
        """
        left_ns = arrival.monotonic_ns + budget_of(request, arrival) - time.monotonic_ns()
        request, fair_permit = self._authorizer.admit_inference(self.principal, request, left_ns)
        self.handed_over = True
        try:
            response = await self._plane.infer(request, arrival)
        except BaseException as exc:
            fair_permit.failed(exc)
            raise
        fair_permit.answered()
        self.permit.admission.learn(time.monotonic_ns() - arrival.monotonic_ns)
        return response


@dataclass(slots=True)
class AdmittedGeneration:
    """An admitted generation request on its way to the session plane."""

    model: Model
    principal: Principal
    _sessions: SessionPlane
    _codecs: TextCodecs
    _authorizer: Authorizer
    handed_over: bool = False
    """True once the session plane has the request and counts its outcome."""

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParameters,
        options: GenerationOptions,
        arrival: RequestArrival,
    ) -> GenerationStream:
        """Returns the stream of the answer, to be read piece by piece.

        Raises:
            InvalidInput: The prompt or the parameters do not fit the model.
            NoActivePlan: This gateway cannot read the model's tokenizer.
            PermissionDenied: The request asks for a higher priority than its key may.
            QuotaExceeded: The key does not have the tokens that the request may need.
            Overloaded: The model cannot answer more in time.
            CatenaryError: The session plane does not take the request.
        """
        codec = await self._codecs.of(self.model.key)
        request = await request_of(self.model, codec, request_id, prompt, sampling, options)
        left_ns = self._sessions.limits(request, arrival).due_ns(0) - time.monotonic_ns()
        request, observer = self._authorizer.admit_generation(self.principal, request, left_ns)
        self.handed_over = True
        try:
            return self._sessions.open(request, arrival, observer)
        except CatenaryError as error:
            observer.ended(error, 0, 0)
            raise


@dataclass(slots=True)
class RequestPipeline:
    """The pipeline of a gateway, shared by its endpoints: it identifies and admits requests."""

    gateway_id: str
    catalog: Catalog
    plane: DataPlane
    admission: ConcurrencyLimiter
    keys: ApiKeys
    readiness: Readiness
    tracer: Tracer
    sessions: SessionPlane
    codecs: TextCodecs
    authorizer: Authorizer
    max_prompt_bytes: int
    lag: LoopLag = field(default_factory=LoopLag)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _start: str = field(default_factory=lambda: f"{random.getrandbits(32):08x}")

    def arrive(
        self, method: str, traceparent: str | None, budget_s: float | None = None
    ) -> RequestArrival:
        """Returns the arrival of a request that came in just now.

        `budget_s` are the seconds left of its call's deadline; None if it has none.
        """
        trace, parent_span_id = self.tracer.root(traceparent)
        budget_ns = None if budget_s is None else answer_within_ns(budget_s, self.lag.worst_s)
        return RequestArrival(
            method, time.monotonic_ns(), time.time_ns(), trace, parent_span_id, budget_ns
        )

    def conversion(self, default_id: str | None = None) -> ConversionContext:
        """Returns the arguments of a converter for a request that arrives now.

        `default_id` is the id of a request without one; None for a new id.
        """
        made = default_id[:_LONGEST_ID] if default_id else self.new_id()
        return ConversionContext(self.admission.max_request_bytes, time.time_ns(), made)

    def identify(self, presented: str | None) -> Principal:
        """Returns the principal of a caller's key.

        Raises:
            Unauthenticated: Keys are configured and this is none of them.
        """
        return self.keys.check(presented)

    def enter(self, presented: str | None, address: str, *, counts: bool = True) -> Principal:
        """Lets a caller in, before its request's content is read.

        Args:
            presented: The key it presents; None if it presents none.
            address: Its network address.
            counts: Whether the request counts against rates, as inferences and generations do.

        Raises:
            Unauthenticated: Keys are configured and this is none of them.
            QuotaExceeded: The key made as many requests as it may, or too many that were refused.
            Overloaded: Too many requests are being worked on.
            Unavailable: This gateway is draining.
        """
        quotas = self.authorizer.quotas
        arrived = caller.get()
        if arrived is None:
            arrived = Caller(quotas, address)
            caller.set(arrived)
        try:
            principal = self.keys.check(presented)
        except Unauthenticated:
            quotas.require_good(address)
            raise
        if self.keys.enabled:
            arrived.subject = f"key {principal.name!r}"
        arrived.principal = principal
        try:
            quotas.require_good(arrived.subject)
            if counts:
                self.authorizer.enter(principal)
                self.admission.precheck()
        except CatenaryError as error:
            self.authorizer.refused(principal, error)
            self.plane.request_metrics.refused("", error.reason)
            raise
        return principal

    @contextmanager
    def admit(
        self, principal: Principal, name: str, version: str, nbytes: int
    ) -> Iterator[AdmittedRequest]:
        """Admits one inference request; all it holds is given back at the end of the block.

        Raises:
            PermissionDenied: The key may not use the model, whether or not it exists.
            ModelNotFound: The model or version does not exist.
            NoActivePlan: The model cannot be deployed.
            InvalidInput: The model generates text.
            Unavailable: No scheduler has said yet what is served, or this gateway is draining.
            PayloadTooLarge: The request has more bytes than one request may have.
            Overloaded: Too much is held already.
        """
        # A name that is not served must not become a label: strangers could make many of them.
        admitted, label = None, ""
        try:
            principal.require(f"{SCOPE_INFER}:{name}")
            model = self.catalog.find_deployed(name, version)
            label = model.label
            self.authorizer.precheck(principal, model)
            if model.generates:
                raise InvalidInput(
                    "model_name",
                    f"{name!r} generates text: ask it over catenary.v1.Generation or"
                    " /v1/chat/completions",
                )
            with self.admission.admit(nbytes) as permit:
                admitted = AdmittedRequest(model, permit, principal, self.plane, self.authorizer)
                yield admitted
            self.authorizer.count(principal, OK)
        except Exception as exc:
            error = error_of_exception(exc)
            self.authorizer.refused(principal, error)
            if admitted is None or not admitted.handed_over:
                self.plane.request_metrics.refused(label, error.reason)
            raise

    @contextmanager
    def admitted(self, nbytes: int) -> Iterator[ConcurrencyPermit]:
        """Admits the body of a generation request, which names its model only inside.

        Raises:
            Unavailable: This gateway is draining.
            PayloadTooLarge: The request has more bytes than one request may have.
            Overloaded: Too much is held already.
        """
        try:
            if nbytes > self.max_prompt_bytes:
                raise PayloadTooLarge(
                    f"the request has {nbytes} bytes; at most {self.max_prompt_bytes} are accepted"
                )
            permit = self.admission.admit(nbytes)
        except Exception as exc:
            self.plane.request_metrics.refused("", error_of_exception(exc).reason)
            raise
        with permit:
            yield permit

    @contextmanager
    def admit_generation(
        self, principal: Principal, reference: str
    ) -> Iterator[AdmittedGeneration]:
        """Admits a request to a model that generates text, "name" or "name:version".

        Raises:
            PermissionDenied: The key may not use the model, whether or not it exists.
            ModelNotFound: The model or version does not exist.
            InvalidInput: The model does not generate text.
            NoActivePlan: The model cannot be deployed.
            Unavailable: No scheduler has said yet what is served.
        """
        name, _, version = reference.partition(":")
        admitted, label = None, ""
        try:
            principal.require(f"{SCOPE_INFER}:{name}")
            model = self.catalog.find_deployed(name, version)
            label = model.label
            self.authorizer.precheck(principal, model)
            if not model.generates:
                raise InvalidInput("model", f"{name!r} does not generate text")
            admitted = AdmittedGeneration(
                model, principal, self.sessions, self.codecs, self.authorizer
            )
            yield admitted
        except Exception as exc:
            if admitted is not None and admitted.handed_over:
                raise
            error = error_of_exception(exc)
            self.authorizer.refused(principal, error)
            self.plane.request_metrics.refused(label, error.reason)
            raise

    def new_id(self) -> str:
        """Returns a new id for a request that has none."""
        return f"{self.gateway_id}-{self._start}-{next(self._numbers)}"


def answer_within_ns(left_s: float, lag_s: float) -> int:
    """Returns within how many nanoseconds to answer a client that waits `left_s` seconds more.

    It is a little less than `left_s`, so that the client gets the reason of a failure before its
    own deadline ends the call. The margin grows with the lag of this gateway's timers, `lag_s`.
    """
    wanted_s = max(_ANSWER_MARGIN_S, _ANSWER_MARGIN_SHARE * left_s, _ANSWER_MARGIN_LAGS * lag_s)
    left_s = min(left_s, 1e6)
    return max(0, int((left_s - min(wanted_s, left_s / 10)) * 1e9))
