"""The one object that may say no to a request: authorise, quota, capacity, fairness, in this order.

An endpoint takes a request through three steps. Each comes as soon as what it decides by is known,
so that nothing is read, inflated or parsed of a request that is refused anyway:

1. `RequestPipeline.enter`, by the headers: whose key is it, has its holder sent too much that was
   refused, may it make one more request, and is there room for one at all.
2. `admit` (or `admit_prompt` and `admit_generation`), by model and size: may the key use the model,
   can the model answer more in time, and is there room for the bytes.
3. `AdmittedInference.infer` and `AdmittedGeneration.generate`, by the content: the priority, the
   tokens and the fair share of the key (`authorizer`).

A refusal that is the caller's fault is charged to the caller, by the bytes that were read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import random
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import unquote

from catenary_gateway.admission.authorizer import (
    AdmittedGeneration,
    AdmittedInference,
    Authorizer,
)
from catenary_gateway.admission.concurrency_limiter import ConcurrencyLimiter, ConcurrencyPermit
from catenary_gateway.admission.quotas import Quotas
from catenary_gateway.admission.readiness import Readiness
from catenary_gateway.catalog import Catalog, Model
from catenary_gateway.data_plane import DataPlane
from catenary_gateway.generation.plane import SessionPlane
from catenary_gateway.generation.text.text_codec import TextCodec, TextCodecs
from catenary_gateway.inference import ConversionContext, RequestArrival, TensorMemory
from catenary_services.errors import (
    CatenaryError,
    ClientError,
    InvalidInput,
    PayloadTooLarge,
    RequestCancelled,
    Unauthenticated,
)
from catenary_services.grpc.error_tables import error_of_exception
from catenary_services.security.keys import SCOPE_INFER, ApiKeys, Principal
from catenary_services.telemetry.tracing import Tracer

_EVERY_S = 0.1
_KEPT_LOOKS = 50
"""Number of measurements of one interval; the worst of the present and the last interval counts."""
_ANSWER_MARGIN_S = 0.05
_ANSWER_MARGIN_SHARE = 0.01
"""Part of a client's waiting time by which it is answered earlier. A client that waits long loses
nothing by it, and a machine may become busy meanwhile."""
_ANSWER_MARGIN_LAGS = 3.0
"""Number of event-loop lags by which a client is answered earlier: for the timer that ends its
request, for the answer's way out, and one in reserve."""
_LONGEST_ID = 256
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
"""Headers by which proxies say that somebody else sent a request."""


class RequestArrivals:
    """Notes when requests come in, and gives ids to those that have none."""

    def __init__(self, gateway_id: str, tracer: Tracer, max_request_bytes: int) -> None:
        self.lag = LoopLag()
        self._tracer = tracer
        self._max_request_bytes = max_request_bytes
        self._prefix = f"{gateway_id}-{random.getrandbits(32):08x}-"
        self._numbers = itertools.count(1)

    def arrive(
        self, method: str, traceparent: str | None, budget_s: float | None = None
    ) -> RequestArrival:
        """Returns the arrival of a request that came in just now.

        `budget_s` are the seconds left of its call's deadline; None if it has none.
        """
        trace, parent_span_id = self._tracer.root(traceparent)
        budget_ns = None if budget_s is None else answer_within_ns(budget_s, self.lag.worst_s)
        return RequestArrival(
            method, time.monotonic_ns(), time.time_ns(), trace, parent_span_id, budget_ns
        )

    def conversion(self, memory: TensorMemory, default_id: str | None = None) -> ConversionContext:
        """Returns the arguments of a converter for a request that arrives now.

        Args:
            memory: The shared memory of its sender.
            default_id: Id of the request if its message has none; None for a new id.
        """
        made = default_id[:_LONGEST_ID] if default_id else self.new_id()
        return ConversionContext(self._max_request_bytes, time.time_ns(), made, memory)

    def new_id(self) -> str:
        """Returns a new id for a request that has none."""
        return f"{self._prefix}{next(self._numbers)}"


class LoopLag:
    """A timer that measures how late it is called, from `start` to `stop`.

    Answers may be late by as much.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self._worst_s = self._worst_before_s = 0.0

    @property
    def worst_s(self) -> float:
        """The most seconds by which a timer was late in the last five to ten seconds."""
        return max(self._worst_s, self._worst_before_s)

    def start(self) -> None:
        """Starts the next measurement, on the running event loop."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + _EVERY_S
        self._timer = loop.call_at(due_s, self._look, loop, due_s)

    def stop(self) -> None:
        """Cancels the measurement under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.note(loop.time() - due_s)
        self.start()

    def note(self, late_s: float) -> None:
        """Records that a timer was `late_s` seconds late."""
        self._looks += 1
        if self._looks >= _KEPT_LOOKS:
            self._worst_before_s, self._worst_s, self._looks = self._worst_s, 0.0, 0
        self._worst_s = max(self._worst_s, late_s)


def answer_within_ns(left_s: float, lag_s: float) -> int:
    """Returns within how many nanoseconds to answer a client that waits `left_s` seconds more.

    It is a little less than `left_s`, so that the client gets the reason of a failure before its
    own deadline ends the call. The margin grows with the lag of this gateway's timers, `lag_s`.
    """
    wanted_s = max(_ANSWER_MARGIN_S, _ANSWER_MARGIN_SHARE * left_s, _ANSWER_MARGIN_LAGS * lag_s)
    left_s = min(left_s, 1e6)
    return max(0, int((left_s - min(wanted_s, left_s / 10)) * 1e9))


@dataclass(slots=True)
class Caller:
    """The sender of a call, who is charged if a refusal is the sender's fault."""

    quotas: Quotas
    address: str
    subject: str
    """Name of who is charged: the address, or the key once it is known."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Headers of an HTTP request, or text metadata of a gRPC call."""
    principal: Principal | None = None
    """The holder of the key, once it was let in."""
    read_bytes: int = 0
    """Bytes of the body that were read so far, decompressed."""

    @property
    def entered(self) -> Principal:
        """The holder of the key, who was let in at the headers."""
        assert self.principal is not None
        return self.principal

    @property
    def is_local(self) -> bool:
        """True if the call came over loopback, and no proxy says that it forwards it."""
        if any(name in self.metadata for name in _FORWARDED):
            return False
        # gRPC writes "ipv4:127.0.0.1" and "ipv6:%5B::1%5D".
        text = unquote(self.address.removeprefix("ipv4:").removeprefix("ipv6:")).strip("[]")
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback

    def charge(self, error: CatenaryError) -> None:
        """Charges the caller for a refused request, if the error is the caller's fault."""
        if isinstance(error, ClientError) and not isinstance(error, RequestCancelled):
            self.quotas.fault(self.subject, self.read_bytes)


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller of the present call. Each gRPC call has a context of its own; the HTTP endpoint sets
the variable for each request."""


def caller() -> Caller:
    """Returns the caller of the present call, which came in by its headers."""
    found = _caller.get()
    assert found is not None
    return found


def charge(error: CatenaryError) -> None:
    """Charges the present caller, if there is one and `error` is the caller's fault."""
    found = _caller.get()
    if found is not None:
        found.charge(error)


@dataclass(slots=True)
class RequestPipeline:
    """The admission of a gateway, and the planes behind it, shared by all its endpoints."""

    gateway_id: str
    arrivals: RequestArrivals
    keys: ApiKeys
    capacity: ConcurrencyLimiter
    authorizer: Authorizer
    catalog: Catalog
    readiness: Readiness
    plane: DataPlane
    sessions: SessionPlane
    codecs: TextCodecs
    max_prompt_bytes: int

    def arrived(self, address: str, metadata: Mapping[str, str] | None = None) -> Caller:
        """Returns the sender of the call that begins here, and remembers it for this context."""
        made = Caller(self.authorizer.quotas, address, address, metadata or {})
        _caller.set(made)
        return made

    def enter(self, presented: str | None, *, counts: bool = True) -> Principal:
        """Lets the present caller in, before the content of a request is read.

        Args:
            presented: The key the caller presents; None if there is none.
            counts: Whether the request counts against rates, as inferences and generations do.

        Raises:
            Unauthenticated: Keys are configured and this is none of them.
            QuotaExceeded: The key made as many requests as it may, or too many that were refused.
            Overloaded: Too many requests are being worked on.
            Unavailable: This gateway is draining.
        """
        arrived, quotas = caller(), self.authorizer.quotas
        try:
            principal = self.keys.check(presented)
        except Unauthenticated:
            quotas.require_good(arrived.address)
            raise
        if self.keys.enabled:
            arrived.subject = f"key {principal.name!r}"
        arrived.principal = principal
        try:
            quotas.require_good(arrived.subject)
            if counts:
                quotas.enter(principal)
                self.capacity.precheck()
        except CatenaryError as error:
            self._refused(principal, "", error)
            raise
        return principal

    def identify(self, presented: str | None) -> Principal:
        """Returns the holder of a key, for a call that is not a request to a model.

        Raises:
            Unauthenticated: Keys are configured and this is none of them.
        """
        return self.keys.check(presented)

    def admit(
        self, principal: Principal, name: str, version: str, nbytes: int
    ) -> AdmittedInference:
        """Admits one inference request; all it holds is given back at the end of its block.

        Raises:
            PermissionDenied: The key may not use the model, whether or not it exists.
            ModelNotFound: The model or version does not exist.
            NoActivePlan: The model cannot be deployed.
            InvalidInput: The model generates text.
            Unavailable: No scheduler has said yet what is served, or this gateway is draining.
            PayloadTooLarge: The request has more bytes than one request may have.
            Overloaded: The model cannot answer more in time, or too much is held already.
        """
        model = self._usable(principal, name, version, generates=False)
        try:
            self.capacity.take(nbytes)
        except CatenaryError as error:
            self._refused(principal, model.label, error)
            raise
        return AdmittedInference(
            self.capacity, nbytes, model, principal, (self.plane, self.codecs), self.authorizer
        )

    def admit_texts(
        self, principal: Principal, reference: str, permit: ConcurrencyPermit
    ) -> AdmittedInference:
        """Admits a request to an encoder, "name" or "name:version", whose body was read already.

        What `permit` holds for the body belongs to the admitted request from then on.

        Raises:
            CatenaryError: See `admit`.
            InvalidInput: The model is not given texts.
        """
        name, _, version = reference.partition(":")
        model = self._usable(principal, name, version, generates=False)
        if not model.given:
            error = InvalidInput("model", f"{name!r} is not given texts: ask it at /v2/models")
            self._refused(principal, model.label, error)
            raise error
        nbytes = permit.hand_over()
        return AdmittedInference(
            self.capacity, nbytes, model, principal, (self.plane, self.codecs), self.authorizer
        )

    async def codec(self, principal: Principal, reference: str) -> tuple[Model, TextCodec]:
        """Returns a model that takes texts, "name" or "name:version", and its tokenizer.

        Raises:
            PermissionDenied: The key may not use the model, whether or not it exists.
            ModelNotFound: The model or version does not exist.
            InvalidInput: The model does not take texts.
            NoActivePlan: The model cannot be deployed, or this gateway cannot read its tokenizer.
            Unavailable: No scheduler has said yet what is served.
        """
        name, _, version = reference.partition(":")
        try:
            principal.require(f"{SCOPE_INFER}:{self.catalog.model_name(name)}")
            model = self.catalog.find_deployed(name, version)
            if not model.takes_texts:
                raise InvalidInput("model", f"{name!r} does not take texts")
            return model, await self.codecs.of(model.key)
        except CatenaryError as error:
            self._refused(principal, "", error)
            raise

    def admit_prompt(self, nbytes: int) -> ConcurrencyPermit:
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
            return self.capacity.admit(nbytes)
        except CatenaryError as error:
            self.plane.request_metrics.refused("", error.reason)
            raise

    def admit_generation(self, principal: Principal, reference: str) -> AdmittedGeneration:
        """Admits a request to a model that generates text: "name", "name:version", "name:adapter".

        Raises:
            PermissionDenied: The key may not use the model, whether or not it exists.
            ModelNotFound: The model or version does not exist.
            InvalidInput: The model does not generate text.
            NoActivePlan: The model cannot be deployed.
            Unavailable: No scheduler has said yet what is served.
            Overloaded: The model cannot answer more in time.
        """
        name, _, version = reference.partition(":")
        model = self._usable(principal, name, version, generates=True)
        return AdmittedGeneration(model, principal, self.sessions, self.codecs, self.authorizer)

    def _usable(self, principal: Principal, name: str, version: str, *, generates: bool) -> Model:
        """Returns a model that the key may use and that can answer one more request in time."""
        # A name that is not served must not become a label: strangers could make many of them.
        label = ""
        try:
            # Whoever may use a model may use it with its adapters.
            principal.require(f"{SCOPE_INFER}:{self.catalog.model_name(name)}")
            model = self.catalog.find_deployed(name, version)
            label = model.label
            self.authorizer.fair.precheck(model, principal)
            if model.generates != generates:
                raise _other_kind(name, generates=generates)
        except Exception as exc:
            self._refused(principal, label, error_of_exception(exc))
            raise
        return model

    def _refused(self, principal: Principal, label: str, error: CatenaryError) -> None:
        self.authorizer.refused(principal, error)
        self.plane.request_metrics.refused(label, error.reason)


def _other_kind(name: str, *, generates: bool) -> InvalidInput:
    if generates:
        return InvalidInput("model", f"{name!r} does not generate text")
    return InvalidInput(
        "model_name",
        f"{name!r} generates text: ask it over catenary.v1.Generation or /v1/chat/completions",
    )
