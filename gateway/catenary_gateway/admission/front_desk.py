"""What every door does with a caller before and after the conversion of messages."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from catenary_gateway.admission.admission import Admission, Lease
from catenary_gateway.admission.callers import Caller, caller
from catenary_gateway.admission.guard import Guard
from catenary_gateway.admission.loop_lag import LoopLag
from catenary_gateway.admission.readiness import Readiness
from catenary_gateway.catalog import Catalog, Model
from catenary_gateway.data_plane import DataPlane, budget_of
from catenary_gateway.generation.answer import Generation
from catenary_gateway.generation.intake import request_of
from catenary_gateway.generation.plane import SessionPlane
from catenary_gateway.generation.request import GenerationTerms, Prompt
from catenary_gateway.generation.text.text_codec import TextCodecs
from catenary_gateway.inference import Arrival, InferenceRequest, InferenceResponse, Intake
from catenary_gateway.observability.bookkeeping import OK
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import CatenaryError, InvalidInput, PayloadTooLarge, Unauthenticated
from catenary_services.grpc.error_tables import error_of_exception
from catenary_services.security.keys import SCOPE_INFER, ApiKeys, Principal
from catenary_services.telemetry.tracing import Tracer

_LONGEST_ID = 256
_ANSWER_MARGIN_S = 0.05
_ANSWER_MARGIN_SHARE = 0.01
"""Of the time a client waits: who has much loses nothing by it, and machines become busy."""
_ANSWER_MARGIN_LAGS = 3.0
"""For the timer that ends a request, for its answer's way out, and as much again."""


@dataclass(slots=True)
class Visit:
    """An admitted request on its way to the data plane."""

    model: Model
    lease: Lease
    principal: Principal
    _plane: DataPlane
    _guard: Guard
    handed_over: bool = False
    """True once the data plane counts it, whatever becomes of it."""

    async def infer(self, request: InferenceRequest, arrival: Arrival) -> InferenceResponse:
        """Returns the data plane's answer.

        Raises:
            PermissionDenied: the request asks for a higher priority than its key may.
            Overloaded: more is asked than can be answered in time.
            CatenaryError: the data plane has no answer.
        """
        left_ns = arrival.monotonic_ns + budget_of(request, arrival) - time.monotonic_ns()
        request, place = self._guard.admit_inference(self.principal, request, left_ns)
        self.handed_over = True
        try:
            response = await self._plane.infer(request, arrival)
        except BaseException as exc:
            place.failed(exc)
            raise
        place.answered()
        self.lease.admission.learn(time.monotonic_ns() - arrival.monotonic_ns)
        return response


@dataclass(slots=True)
class GeneratingVisit:
    """An admitted request for text on its way to the session plane."""

    model: Model
    principal: Principal
    _sessions: SessionPlane
    _codecs: TextCodecs
    _guard: Guard
    handed_over: bool = False
    """True once the session plane counts it, whatever becomes of it."""

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParameters,
        terms: GenerationTerms,
        arrival: Arrival,
    ) -> Generation:
        """Returns the answer, to be read piece by piece.

        Raises:
            InvalidInput: prompt or parameters do not fit the model.
            NoActivePlan: this gateway cannot read the model's tokenizer.
            PermissionDenied: it asks for a higher priority than its key may.
            QuotaExceeded: its key has not the tokens it may need.
            Overloaded: more is asked than can be answered in time.
            CatenaryError: the session plane does not take it.
        """
        codec = await self._codecs.of(self.model.key)
        request = await request_of(self.model, codec, request_id, prompt, sampling, terms)
        left_ns = self._sessions.limits(request, arrival).due_ns(0) - time.monotonic_ns()
        request, watcher = self._guard.admit_generation(self.principal, request, left_ns)
        self.handed_over = True
        try:
            return self._sessions.open(request, arrival, watcher)
        except CatenaryError as error:
            watcher.ended(error, 0, 0)
            raise


@dataclass(slots=True)
class FrontDesk:
    """Checks keys, stamps arrivals, gives ids, admits; shared by every door of one gateway."""

    gateway_id: str
    catalog: Catalog
    plane: DataPlane
    admission: Admission
    keys: ApiKeys
    readiness: Readiness
    tracer: Tracer
    sessions: SessionPlane
    codecs: TextCodecs
    guard: Guard
    max_prompt_bytes: int
    lag: LoopLag = field(default_factory=LoopLag)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _start: str = field(default_factory=lambda: f"{random.getrandbits(32):08x}")

    def arrive(
        self, method: str, traceparent: str | None, budget_s: float | None = None
    ) -> Arrival:
        """Returns the stamp of a request that came in just now."""
        trace, parent_span_id = self.tracer.root(traceparent)
        budget_ns = None if budget_s is None else answer_within_ns(budget_s, self.lag.worst_s)
        return Arrival(
            method, time.monotonic_ns(), time.time_ns(), trace, parent_span_id, budget_ns
        )

    def intake(self, default_id: str | None = None) -> Intake:
        """Returns what a converter must know."""
        made = default_id[:_LONGEST_ID] if default_id else self.new_id()
        return Intake(self.admission.max_request_bytes, time.time_ns(), made)

    def identify(self, presented: str | None) -> Principal:
        """Returns who calls.

        Raises:
            Unauthenticated: keys are configured and this is none of them.
        """
        return self.keys.check(presented)

    def enter(self, presented: str | None, address: str, *, counts: bool = True) -> Principal:
        """Lets a caller in, before anything is read of what it sends.

        Args:
            presented: As its key.
            address: Where it comes from.
            counts: Whether it asks for an inference or a generation; each counts.

        Raises:
            Unauthenticated: keys are configured and this is none of them.
            QuotaExceeded: it made as many requests as it may, or too many that were refused.
            Overloaded: too many requests are being worked on.
            Unavailable: this gateway is draining.
        """
        quotas = self.guard.quotas
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
                self.guard.enter(principal)
                self.admission.precheck()
        except CatenaryError as error:
            self.guard.refused(principal, error)
            self.plane.books.refused("", error.reason)
            raise
        return principal

    @contextmanager
    def visit(self, principal: Principal, name: str, version: str, nbytes: int) -> Iterator[Visit]:
        """Admits one request; what it holds is given back at the end.

        Raises:
            PermissionDenied: before anything is said about the model.
            ModelNotFound: no such model or version.
            NoActivePlan: it cannot be deployed.
            Unavailable: no scheduler has said yet what is served, or this gateway is draining.
            PayloadTooLarge: more bytes than one request may have.
            Overloaded: too much is held already.
        """
        # A name nobody serves must not become a label: strangers could make any number of them.
        visit, label = None, ""
        try:
            principal.require(f"{SCOPE_INFER}:{name}")
            model = self.catalog.find_deployed(name, version)
            label = model.label
            self.guard.precheck(principal, model)
            if model.generates:
                raise InvalidInput(
                    "model_name",
                    f"{name!r} generates text: ask it over catenary.v1.Generation or"
                    " /v1/chat/completions",
                )
            with self.admission.admit(nbytes) as lease:
                visit = Visit(model, lease, principal, self.plane, self.guard)
                yield visit
            self.guard.count(principal, OK)
        except Exception as exc:
            error = error_of_exception(exc)
            self.guard.refused(principal, error)
            if visit is None or not visit.handed_over:
                self.plane.books.refused(label, error.reason)
            raise

    @contextmanager
    def admitted(self, nbytes: int) -> Iterator[Lease]:
        """Takes room for a body that asks for text and says only inside of which model.

        Raises:
            Unavailable: this gateway is draining.
            PayloadTooLarge: more bytes than one request may have.
            Overloaded: too much is held already.
        """
        try:
            if nbytes > self.max_prompt_bytes:
                raise PayloadTooLarge(
                    f"the request has {nbytes} bytes; at most {self.max_prompt_bytes} are accepted"
                )
            lease = self.admission.admit(nbytes)
        except Exception as exc:
            self.plane.books.refused("", error_of_exception(exc).reason)
            raise
        with lease:
            yield lease

    @contextmanager
    def generating_visit(self, principal: Principal, reference: str) -> Iterator[GeneratingVisit]:
        """Lets an admitted request at a model that generates text, "name" or "name:version".

        Raises:
            PermissionDenied: before anything is said about the model.
            ModelNotFound: no such model or version.
            InvalidInput: it does not generate text.
            NoActivePlan: it cannot be deployed.
            Unavailable: no scheduler has said yet what is served.
        """
        name, _, version = reference.partition(":")
        visit, label = None, ""
        try:
            principal.require(f"{SCOPE_INFER}:{name}")
            model = self.catalog.find_deployed(name, version)
            label = model.label
            self.guard.precheck(principal, model)
            if not model.generates:
                raise InvalidInput("model", f"{name!r} does not generate text")
            visit = GeneratingVisit(model, principal, self.sessions, self.codecs, self.guard)
            yield visit
        except Exception as exc:
            if visit is not None and visit.handed_over:
                raise
            error = error_of_exception(exc)
            self.guard.refused(principal, error)
            self.plane.books.refused(label, error.reason)
            raise

    def new_id(self) -> str:
        """Returns an id for a request that brings none."""
        return f"{self.gateway_id}-{self._start}-{next(self._numbers)}"


def answer_within_ns(left_s: float, lag_s: float) -> int:
    """Returns when to answer a client that waits for `left_s` more.

    A little earlier, so that the reason arrives and not the client's own bare deadline: the later
    this gateway's timers are (`lag_s`), the earlier.
    """
    wanted_s = max(_ANSWER_MARGIN_S, _ANSWER_MARGIN_SHARE * left_s, _ANSWER_MARGIN_LAGS * lag_s)
    left_s = min(left_s, 1e6)
    return max(0, int((left_s - min(wanted_s, left_s / 10)) * 1e9))
