"""Requests that were let in, and the last step of admission: what their content asks of their key.

That is the priority, the tokens of a generation, and the key's fair share of the model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

import msgspec
from prometheus_client import Counter

from catenary_gateway.admission.concurrency_limiter import ConcurrencyLimiter, ConcurrencyPermit
from catenary_gateway.admission.quotas import Quotas, TokenReservation
from catenary_gateway.catalog import Model
from catenary_gateway.data_plane import DataPlane, budget_of
from catenary_gateway.fairness.fair_limiter import FairLimiters, FairPermit, FairRequest
from catenary_gateway.generation.choices import ChoiceStreams
from catenary_gateway.generation.grammar.checker import GrammarModel
from catenary_gateway.generation.intake import choices_of, request_of
from catenary_gateway.generation.plane import GenerationStream, SessionPlane
from catenary_gateway.generation.request import GenerationOptions, GenerationRequest, Prompt
from catenary_gateway.generation.text.text_codec import TextCodec, TextCodecs
from catenary_gateway.inference import InferenceRequest, InferenceResponse, RequestArrival
from catenary_gateway.observability.outcome_kinds import OK
from catenary_gateway.tensors.token_tensors import in_order_of_texts, with_tokens
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import CatenaryError, QuotaExceeded
from catenary_services.grpc.error_tables import error_of_exception
from catenary_services.log import get_logger
from catenary_services.security.keys import POLL_S, ApiKeys, Principal
from catenary_services.telemetry.metrics import Metrics

_log = get_logger("catenary_gateway.admission.authorizer")


class AuthorizedGeneration:
    """A generation that was let in, until its end; implements `GenerationObserver`."""

    __slots__ = ("_authorizer", "_ended", "_fair_permit", "_principal", "_reserved")

    def __init__(
        self,
        authorizer: Authorizer,
        principal: Principal,
        fair_permit: FairPermit,
        reserved: TokenReservation,
    ) -> None:
        self._authorizer = authorizer
        self._principal = principal
        self._fair_permit = fair_permit
        self._reserved = reserved
        self._ended = False

    def first_token(self) -> None:
        """Notes that the generation has its first token."""
        self._fair_permit.answered()

    def ended(self, error: CatenaryError | None, prompt_tokens: int, answer_tokens: int) -> None:
        """Settles the generation's cost at its end; only the first call counts.

        Args:
            error: The reason why the answer is missing or incomplete; None if it is complete.
            prompt_tokens: Number of tokens in the prompt.
            answer_tokens: Number of tokens that were generated.
        """
        if self._ended:
            return
        self._ended = True
        # Without a token of the answer there is no sign of work on the prompt, so it costs nothing.
        used = prompt_tokens + answer_tokens if answer_tokens else 0
        if error is None:
            self._fair_permit.answered()
            self._fair_permit.cost(float(used))
        else:
            self._fair_permit.failed(error, float(used))
        self._reserved.settle(used)
        self._authorizer.count(self._principal, OK if error is None else error.reason)


class Authorizer:
    """The limits of all API keys at one gateway, shared by all its endpoints."""

    def __init__(
        self, quotas: Quotas, fair: FairLimiters, metrics: Metrics, first_token_patience_ns: int
    ) -> None:
        self.quotas = quotas
        self.fair = fair
        self._metrics = metrics
        self._patience_ns = first_token_patience_ns
        # Looking up labels costs more than counting; keys and outcomes are few.
        self._counters: dict[tuple[str, str], Counter] = {}

    def admit_inference(
        self, principal: Principal, request: InferenceRequest, budget_ns: int
    ) -> tuple[InferenceRequest, FairPermit]:
        """Lets an inference in.

        Args:
            principal: The caller.
            request: The checked request.
            budget_ns: Nanoseconds left until its deadline.

        Returns:
            The request with the priority it gets, and the permit that must be told of its end.

        Raises:
            PermissionDenied: The request asks for a higher priority than its key may.
            Overloaded: The model cannot answer more in time.
        """
        options = request.options
        priority = principal.require_priority(options.priority)
        if priority != options.priority:
            request = msgspec.structs.replace(
                request, options=msgspec.structs.replace(options, priority=priority)
            )
        rows = float(request.rows)
        ask = FairRequest(principal.name, principal.limits.share, priority, rows, rows, budget_ns)
        return request, self.fair.admit(request.model, ask)

    def admit_generation(
        self, principal: Principal, request: GenerationRequest, budget_ns: int
    ) -> tuple[GenerationRequest, AuthorizedGeneration]:
        """Lets a generation in; see `admit_inference`.

        Raises:
            PermissionDenied: The request asks for a higher priority than its key may.
            QuotaExceeded: The key does not have the tokens that the request may need.
            Overloaded: The model cannot answer more in time.
        """
        options = request.options
        priority = principal.require_priority(options.priority)
        if priority != options.priority:
            request = dataclasses.replace(
                request, options=dataclasses.replace(options, priority=priority)
            )
        most = request.charged_prompt_tokens + request.sampling.max_tokens
        reserved = self.quotas.reserve(principal, most)
        patience_ns = min(options.time_to_first_token_ns or self._patience_ns, budget_ns // 2)
        share, cost = principal.limits.share, float(len(request.prompt))
        ask = FairRequest(principal.name, share, priority, 1.0, cost, patience_ns)
        try:
            fair_permit = self.fair.admit(request.model, ask)
        except CatenaryError:
            reserved.settle(0)
            raise
        return request, AuthorizedGeneration(self, principal, fair_permit, reserved)

    async def watch(
        self, keys: ApiKeys, changed: Callable[[frozenset[str]], None] | None = None
    ) -> None:
        """Reads changes of the API key file, and sets the gauges of limits, until cancelled.

        `changed` is called with the names of all keys when they change.
        """
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if keys.refresh():
                    self.quotas.forget_others(keys.names)
                    if changed is not None:
                        changed(keys.names)
            except Exception as error:  # the loop must go on, as nobody would see it end
                _log.error("api_keys_watch_failed", exc_info=error)
            for model, (limit, _) in self.fair.limits().items():
                self._metrics.unanswered_limit.labels(model).set(limit)

    def refused(self, principal: Principal, error: CatenaryError) -> None:
        """Counts a request that was refused or failed, by its reason."""
        if isinstance(error, QuotaExceeded):
            self._metrics.quota_rejections.labels(principal.name).inc()
        self.count(principal, error.reason)

    def count(self, principal: Principal, outcome: str) -> None:
        """Counts a request by its key and outcome."""
        counter = self._counters.get((principal.name, outcome))
        if counter is None:
            counter = self._metrics.key_requests.labels(principal.name, outcome)
            self._counters[principal.name, outcome] = counter
        counter.inc()


class AdmittedInference(ConcurrencyPermit):
    """An admitted inference request on its way to the data plane, and its room in the gateway."""

    __slots__ = ("_authorizer", "_codecs", "_is_submitted", "_plane", "_principal", "model")

    def __init__(
        self,
        capacity: ConcurrencyLimiter,
        nbytes: int,
        model: Model,
        principal: Principal,
        planes: tuple[DataPlane, TextCodecs],
        authorizer: Authorizer,
    ) -> None:
        super().__init__(capacity, nbytes)
        self.model = model
        self._principal = principal
        self._plane, self._codecs = planes
        self._authorizer = authorizer
        self._is_submitted = False
        """True once the data plane has the request and counts its outcome."""

    async def infer(self, request: InferenceRequest, arrival: RequestArrival) -> InferenceResponse:
        """Returns the data plane's answer to a request.

        Raises:
            InvalidInput: A text is too long.
            NoActivePlan: This gateway cannot read the tokenizer of a model that is given texts.
            QuotaExceeded: The key does not have the tokens of the request's texts.
            PermissionDenied: The request asks for a higher priority than its key may.
            Overloaded: The model cannot answer more in time.
            CatenaryError: The data plane has no answer.
        """
        if not self.model.given:
            return await self._submitted(request, arrival)
        codec = await self.codec()
        request, order = await with_tokens(request, codec)
        tokens = sum(request.row_sizes)
        reserved = self._authorizer.quotas.reserve(self._principal, tokens)
        used = 0
        try:
            response = await self._submitted(request, arrival)
            used = tokens
        finally:
            reserved.settle(used)
        return in_order_of_texts(response, order, self.model, tokens)

    async def codec(self) -> TextCodec:
        """Returns the tokenizer of a model that is given texts.

        Raises:
            NoActivePlan: This gateway cannot read it.
        """
        return await self._codecs.of(self.model.key)

    async def _submitted(
        self, request: InferenceRequest, arrival: RequestArrival
    ) -> InferenceResponse:
        left_ns = arrival.monotonic_ns + budget_of(request, arrival) - time.monotonic_ns()
        request, fair_permit = self._authorizer.admit_inference(self._principal, request, left_ns)
        self._is_submitted = True
        try:
            response = await self._plane.infer(request, arrival)
        except BaseException as exc:
            fair_permit.failed(exc)
            raise
        fair_permit.answered()
        self.admission.learn(time.monotonic_ns() - arrival.monotonic_ns)
        return response

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._authorizer.count(self._principal, OK)
        elif isinstance(error, Exception):
            failed = error_of_exception(error)
            self._authorizer.refused(self._principal, failed)
            if not self._is_submitted:
                self._plane.request_metrics.refused(self.model.label, failed.reason)


class AdmittedGeneration:
    """An admitted generation request on its way to the session plane; used in a `with` block."""

    __slots__ = ("_authorizer", "_codecs", "_is_submitted", "_principal", "_sessions", "model")

    def __init__(
        self,
        model: Model,
        principal: Principal,
        sessions: SessionPlane,
        codecs: TextCodecs,
        authorizer: Authorizer,
    ) -> None:
        self.model = model
        self._principal = principal
        self._sessions = sessions
        self._codecs = codecs
        self._authorizer = authorizer
        self._is_submitted = False
        """True once the session plane has the request and counts its outcome."""

    async def generate(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        sampling: SamplingParameters,
        options: GenerationOptions,
        arrival: RequestArrival,
        choices: int = 1,
    ) -> ChoiceStreams:
        """Returns the streams of all answers, to be read piece by piece: all begin, or none does.

        Args:
            request_id: The id of the first answer; that of each other one ends with its index.
            prompts: The prompts, one at least.
            sampling: The way tokens are chosen; the seed counts up from answer to answer.
            options: The options of every answer.
            arrival: When the request came.
            choices: Number of answers to each prompt.

        Raises:
            InvalidInput: A prompt or the parameters do not fit the model.
            NoActivePlan: This gateway cannot read the model's tokenizer.
            PermissionDenied: The request asks for a higher priority than its key may.
            QuotaExceeded: The key does not have the tokens that the request may need.
            Overloaded: The model cannot answer more in time.
            CatenaryError: The session plane does not take the request.
        """
        codec = await self._codecs.of(self.model.key)
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            one = await request_of(self.model, codec, request_id, prompt, sampling, options)
            one = await self._with_checked_grammar(one)
            requests += choices_of(one, choices, len(requests))
        streams: list[GenerationStream] = []
        try:
            for index, request in enumerate(requests):
                # The first answer is the request's span; each other one is a span below it.
                own = arrival if index == 0 else arrival.child()
                first = streams[index - request.choice] if request.choice else None
                streams.append(self._open(request, own, first))
        except BaseException:
            ChoiceStreams(streams).__exit__(None, None, None)
            raise
        return ChoiceStreams(streams)

    async def _with_checked_grammar(self, request: GenerationRequest) -> GenerationRequest:
        """Returns a request whose grammar, if it has one, is in the form that agents know.

        Raises:
            InvalidInput: No answer can match it.
            Overloaded: Too many others are being tried out.
        """
        codec, options, sampling = request.codec, request.options, request.sampling
        if not sampling.grammar:
            return request
        key = self.model.key
        read = partial(self._codecs.tokenizer_text, key)
        model = GrammarModel(key, read, codec.vocabulary_size)
        field = "tools" if request.syntax.forces_calls else options.grammar_field
        grammar = await self._codecs.grammars.check(
            model, sampling.grammar, field, options.generated
        )
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, grammar=grammar))

    def _open(
        self,
        request: GenerationRequest,
        arrival: RequestArrival,
        shares_prompt_of: GenerationStream | None,
    ) -> GenerationStream:
        self._is_submitted = False
        left_ns = self._sessions.limits(request, arrival).due_ns(0) - time.monotonic_ns()
        request, observer = self._authorizer.admit_generation(self._principal, request, left_ns)
        self._is_submitted = True
        try:
            return self._sessions.open(request, arrival, observer, shares_prompt_of)
        except CatenaryError as error:
            observer.ended(error, 0, 0)
            raise

    def __enter__(self) -> AdmittedGeneration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_submitted or not isinstance(error, Exception):
            return
        failed = error_of_exception(error)
        self._authorizer.refused(self._principal, failed)
        self._sessions.request_metrics.refused(self.model.label, failed.reason)
