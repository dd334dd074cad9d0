"""One unanswered generation: its tokens so far, its starts, and the text to be read."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from catenary_gateway.generation.request import (
    AnswerChunk,
    AnswerLimits,
    GenerationRequest,
    ScoredToken,
    StepTiming,
)
from catenary_gateway.generation.sessions.start import SessionStart
from catenary_gateway.generation.text.answer_text import AnswerText
from catenary_gateway.inference import RequestArrival
from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from catenary_services.domain.logprobs import TokenLogprobs, unknown_logprobs
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS, prefix_hashes
from catenary_services.errors import CatenaryError
from catenary_services.grpc.sampling_messages import logprobs_of_message, message_of_sampling


class PendingSession:
    """The token history of one generation, and the part its endpoint has not read yet.

    Invariants: `generated` begins with the tokens that the client has received through another
    gateway, and grows only by the token of the next position. `current` is the start whose tokens
    count, None while there is none. `successors` are the starts it may move to: the first token
    taken from one of them makes that one current and drops all others. Nothing changes after
    `ended` is set.
    """

    __slots__ = (
        "_awake",
        "_read",
        "_ready",
        "_scored",
        "_timings",
        "arrival",
        "cached_prompt_tokens",
        "current",
        "ended",
        "error",
        "finish_reason",
        "first_token_ns",
        "generated",
        "last_token_ns",
        "limits",
        "number",
        "prefix_hashes",
        "prompt_logprobs",
        "request",
        "shares_prompt_of",
        "starts",
        "submitted_ns",
        "successors",
        "text",
    )

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        arrival: RequestArrival,
        limits: AnswerLimits,
        shares_prompt_of: PendingSession | None = None,
    ) -> None:
        """Begins without a start.

        Args:
            number: The number of the request.
            request: The request.
            arrival: When it came.
            limits: The time limits of its answer.
            shares_prompt_of: Another answer to the same prompt, whose caches of it agents may copy.
        """
        self.number = number
        self.shares_prompt_of = shares_prompt_of
        self.request = request
        self.arrival = arrival
        self.limits = limits
        self.submitted_ns = 0
        self.prefix_hashes = hashes_of(request)
        """The numbers by which the scheduler recognises the beginning of the prompt."""
        self.cached_prompt_tokens = 0
        """Tokens of the prompt that were not computed for the first token of the answer."""
        self.generated: array[int] = array("I", request.options.generated)
        self.starts: list[SessionStart] = []
        self.current: SessionStart | None = None
        self.successors: list[SessionStart] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        """The log probabilities of the prompt's tokens, as far as they came: all but the first."""
        sampling = request.sampling
        self.text = AnswerText(
            request.codec.table,
            sampling.stop,
            sampling.min_tokens,
            keeps_stop=sampling.include_stop_str_in_output,
            skips_special=sampling.skip_special_tokens,
            shown_tokens=request.syntax.shown_tokens,
        )
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.finish_reason = ""
        self.error: CatenaryError | None = None
        self.ended = False
        self._ready: list[str] = []
        self._read = self.continued
        for token in self.generated:
            # The client has this text already; the part held back is returned with the next tokens.
            self.text.push(token)
        self._timings: list[StepTiming] = []
        self._scored: list[ScoredToken] = []
        self._awake = asyncio.Event()

    @property
    def continued(self) -> int:
        """Number of tokens that were generated through another gateway."""
        return len(self.request.options.generated)

    @property
    def next_position(self) -> int:
        """Index of the next token in the sequence of prompt and answer."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def due_ns(self) -> int:
        """Monotonic time at which the generation is given up if no further token comes."""
        return self.limits.due_ns(self.last_token_ns)

    @property
    def timed(self) -> bool:
        """True if agents are to report how long each token took them."""
        return self.request.options.timed or self.arrival.trace.sampled

    def submission(self, now_ns: int) -> scheduler_pb2.SubmitSession:
        """Returns the message that submits the generation and its session, if one runs."""
        request, trace = self.request, self.arrival.trace
        message = scheduler_pb2.SubmitSession(
            request_id=self.number,
            model=request.model.key.name,
            model_version=request.model.key.version,
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
            budget_ns=max(0, self.limits.whole_ns - now_ns),
            priority=request.options.priority,
            traceparent=trace.traceparent if trace.sampled else "",
            first_token_slo_ns=request.options.time_to_first_token_ns or 0,
            per_token_slo_ns=request.options.time_per_output_token_ns or 0,
            waited_ns=max(0, now_ns - self.arrival.monotonic_ns),
            progress=self.progress() if self.generated else None,
            prefix_hashes=self.prefix_hashes,
        )
        if self.current is not None:
            order = self.current.order
            if not order.decode_route:
                message.session_id = self.current.session_id
                message.route.extend(order.route)
            elif self.current.first_token_ns:  # the ring of the prompt is done, or soon will be
                message.session_id = self.current.session_id
                message.route.extend(order.decode_route)
        return message

    def waits_for(self, now_ns: int) -> scheduler_pb2.UnansweredRequest:
        """Returns the entry of the scheduler's audit: the starts whose tokens are taken."""
        request = scheduler_pb2.UnansweredRequest(request_id=self.number)
        for start in (self.current, *self.successors):
            if start is not None:
                sent_ago_ns = max(1, now_ns - start.sent_ns) if start.sent_ns else 0
                request.sessions.add(session_id=start.session_id, sent_ago_ns=sent_ago_ns)
        return request

    def progress(self) -> scheduler_pb2.SessionProgress:
        """Returns how many tokens were generated, and in which time, as of the latest one."""
        first_ns = self.first_token_ns
        return scheduler_pb2.SessionProgress(
            request_id=self.number,
            generated_tokens=len(self.generated),
            first_token_ns=first_ns - self.arrival.monotonic_ns if first_ns else 0,
            decode_ns=self.last_token_ns - first_ns,
            cached_tokens=self.current.cached_tokens if self.current is not None else 0,
        )

    def finished(self) -> scheduler_pb2.RequestFinished:
        """Returns the message that the answer is complete, and what its chain has cached of it."""
        known = len(self.prefix_hashes)
        whole = hashes_of(self.request, self.generated)[known:]
        return scheduler_pb2.RequestFinished(
            request_id=self.number, progress=self.progress(), prefix_hashes=whole
        )

    def opening(
        self, start: SessionStart, gateway_id: str, now_ns: int
    ) -> frame_pb2.SessionOpening:
        """Returns what the agents of a start must know, with the tokens generated so far."""
        request, trace = self.request, self.arrival.trace
        sampling = message_of_sampling(request.sampling)
        # What concerns text is the gateway's, so agents need not have it.
        del sampling.stop[:], sampling.bad_words[:]
        if self.generated:  # whoever sent a token of the answer had sent all of the prompt's
            sampling.ClearField("prompt_logprobs")
        opening = frame_pb2.SessionOpening(
            gateway_id=gateway_id,
            request_id=self.number,
            route=start.order.route,
            decode_route=start.order.decode_route,
            prompt_tokens=len(request.prompt),
            sampling=sampling,
            budget_ns=self.limits.whole_ns - now_ns,
            traceparent=trace.traceparent if trace.sampled else "",
            timed=self.timed,
            shares_prompt_of=self._shared_session(start),
            adapter=request.model.adapter,
        )
        opening.token_ids.extend(request.prompt)
        opening.token_ids.extend(self.generated)
        return opening

    def _shared_session(self, start: SessionStart) -> int:
        """Returns the session that has the same prompt on the same ring; 0 if none has.

        A session that is started again reads everything itself, as does one whose prompt is scored.
        """
        other = self.shares_prompt_of.current if self.shares_prompt_of is not None else None
        if other is None or not other.push_ns or len(self.starts) > 1 or self.generated:
            return 0
        if self.request.sampling.prompt_logprobs is not None or not start.has_ring_of(other):
            return 0
        return other.session_id

    def begin(self, start: SessionStart) -> None:
        """Registers a start: as a successor if it moves the current one, else as current."""
        self.starts.append(start)
        if start.moves is None:
            self.current = start
        else:
            self.successors.append(start)

    def believes(self, start: SessionStart) -> bool:
        """True if a token of this start may be the next one."""
        return start is self.current or start in self.successors

    def left(self, start: SessionStart) -> None:
        """Stops taking tokens from a start."""
        start.stop_waiting()
        if start is self.current:
            self.current = None
        else:
            self.successors.remove(start)

    def take_over(self, start: SessionStart) -> None:
        """Makes a successor the current start, because it has brought the next token."""
        self.left(start)
        start.history_tokens = len(self.generated)
        self.current = start

    def is_early(self, start: SessionStart, token: frame_pb2.SessionToken) -> bool:
        """Keeps a token that overtook others that are still to come; False if it did not.

        There are two cases. If prompts and answers are computed on different rings, the first token
        and the second come from different rings. In a live migration, the last tokens of the old
        ring may arrive after the first of the new ring.
        """
        expected = self.next_position + 1
        if start is not self.current:
            return self.current is not None and start.keep_early(token, expected)
        if not start.order.decode_route or start.first_token_ns:
            return False
        # Only the first token comes from another ring, so exactly one is missing.
        is_second = bool(start.early) or token.position == expected
        return is_second and start.keep_early(token, expected)

    def early_token(self) -> frame_pb2.SessionToken | None:
        """Returns the kept token of the current start that is the next one now, None if none is."""
        start = self.current
        if start is None or not start.early or start.early[0].position != self.next_position:
            return None
        return start.early.pop(0)

    def successor_due(self) -> SessionStart | None:
        """Returns the successor that has brought the next token, None if none has."""
        for start in self.successors:
            if start.early and start.early[0].position == self.next_position:
                return start
        return None

    @property
    def misses_prompt(self) -> bool:
        """True while log probabilities of the prompt are missing that precede the first token."""
        if self.request.sampling.prompt_logprobs is None or self.generated:
            return False
        return len(self.prompt_logprobs) + 1 < len(self.request.prompt)

    def take_prompt(self, part: frame_pb2.SessionPromptLogprobs) -> None:
        """Appends log probabilities of the prompt, those that came before left out.

        A session that is started again computes all of them once more.
        """
        known = len(self.prompt_logprobs)
        if not self.misses_prompt or not 1 <= part.position <= known + 1:
            return
        fresh = part.logprobs[known + 1 - part.position :]
        for token_id, each in zip(self.request.prompt[known + 1 :], fresh, strict=False):
            most = self.request.sampling.prompt_logprobs
            self.prompt_logprobs.append(logprobs_of_message(each, token_id, most))

    def take(self, token: frame_pb2.SessionToken, now_ns: int) -> None:
        """Appends the token of the next position; sets `finish_reason` if it is the last."""
        assert self.current is not None
        previous_ns = self.last_token_ns or self.arrival.monotonic_ns
        self.first_token_ns = self.first_token_ns or now_ns
        self.last_token_ns = now_ns
        if token.cached_tokens and not self.current.first_token_ns:
            self.current.cached_tokens = min(token.cached_tokens, self.next_position - 1)
            if not self.generated:
                self.cached_prompt_tokens = self.current.cached_tokens
        self.current.first_token_ns = self.current.first_token_ns or now_ns
        self.current.last_token_ns = now_ns
        self.generated.append(token.token_id)
        if token.timings:
            self.current.add_hops(token.timings)
        if self.request.options.timed:
            timing = StepTiming(token.token_id, now_ns - previous_ns, tuple(token.timings))
            self._timings.append(timing)
        reason = token.finish_reason
        if not reason and len(self.generated) >= self.request.sampling.max_tokens:
            # The last agent should say so. An agent that does not must not make this list grow.
            reason = "length"
        # An end-of-text token has no text, even if the tokenizer decodes it to some.
        is_text = reason != "stop" or self.request.sampling.include_stop_str_in_output
        if self.request.sampling.logprobs is not None:
            self._scored.append(self._scored_of(token, is_text=is_text))
        text = self.text.push(token.token_id) if is_text else ""
        if reason and not self.text.stopped:
            text += self.text.end()
        if text:
            self._ready.append(text)
        self.finish_reason = "stop" if self.text.stopped else reason
        self._awake.set()

    def end(self, error: CatenaryError | None) -> None:
        """Ends the generation: the endpoint reads the rest, then the end or `error`."""
        self.ended = True
        self.error = error
        self.current = None
        self.successors.clear()
        self._awake.set()

    async def read(self) -> AnswerChunk | None:
        """Returns everything since the last call, after waiting for something; None after the end.

        Raises:
            CatenaryError: The generation ended with this error, and all text before it was read.
        """
        while True:
            if self._read < len(self.generated):
                return self._piece()
            if self.ended:
                if self.error is not None:
                    raise self.error
                return None
            self._awake.clear()
            await self._awake.wait()

    def _piece(self) -> AnswerChunk:
        piece = AnswerChunk(
            "".join(self._ready),
            tuple(self.generated[self._read :]),
            self.finish_reason,
            tuple(self._timings),
            self._read,
            tuple(self._scored),
        )
        self._read = len(self.generated)
        self._ready.clear()
        self._timings.clear()
        self._scored.clear()
        return piece

    def _scored_of(self, token: frame_pb2.SessionToken, *, is_text: bool) -> ScoredToken:
        if token.HasField("logprobs"):
            most = self.request.sampling.logprobs
            scored = logprobs_of_message(token.logprobs, token.token_id, most)
        else:
            scored = unknown_logprobs(token.token_id)
        return ScoredToken(scored, self.text.length, is_text)


def hashes_of(request: GenerationRequest, generated: Sequence[int] = ()) -> list[int]:
    """Returns the numbers of the beginnings of a prompt, with an answer behind it."""
    if len(request.prompt) + len(generated) < PREFIX_BLOCK_TOKENS:
        return []
    return prefix_hashes([*request.prompt, *generated], request.model.adapter)
