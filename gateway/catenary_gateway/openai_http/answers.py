"""Answers in the form that OpenAI's clients parse: JSON objects, whole or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from catenary_gateway.generation.choices import ChoiceStreams
from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.generation.request import ScoredToken
from catenary_gateway.openai_http.answer_parts import AnswerParts, Delta
from catenary_gateway.openai_http.completion_request import CompletionRequest
from catenary_gateway.openai_http.logprob_forms import (
    EchoedPrompt,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)


def usage_of(answers: ChoiceStreams) -> dict[str, Any]:
    """Returns the `usage` object: the tokens of all prompts, each once, and of all answers."""
    prompt, completion = answers.prompt_tokens, answers.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers.cached_tokens},
    }


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come."""

    stream: GenerationStream
    parts: AnswerParts
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def cumulative_logprob(self) -> float:
        """The sum of the log probabilities of its tokens."""
        return sum(each.logprobs.logprob for each in self.scored)


async def whole_answer(
    wanted: CompletionRequest, writer: AnswerWriter, answers: ChoiceStreams
) -> dict[str, Any]:
    """Returns the answer to a request that is not streamed.

    Raises:
        CatenaryError: The first error of any choice.
    """
    generated = [Choice(stream, writer.parts(stream)) for stream in answers.streams]
    async for index, piece in answers.pieces():
        choice = generated[index]
        choice.parts.take(piece)
        choice.scored += piece.scored
        choice.finish_reason = piece.finish_reason
    chosen: list[Choice] = []
    for at in range(0, len(generated), wanted.generated):
        same_prompt = generated[at : at + wanted.generated]
        if wanted.generated > wanted.choices:
            same_prompt.sort(key=lambda choice: choice.cumulative_logprob, reverse=True)
        chosen += same_prompt[: wanted.choices]
    return writer.whole(chosen, usage_of(answers))


@dataclass(frozen=True)
class AnswerWriter:
    """A writer of the answer to one request, whole or chunk by chunk."""

    id: str
    wanted: CompletionRequest
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request that is not streamed."""
        documents = [self._choice(index, choice) for index, choice in enumerate(choices)]
        kind = "chat.completion" if self.chat else "text_completion"
        document = {**self._head(kind), "choices": documents, "usage": usage}
        if self.chat and self.wanted.prompt_logprobs is not None:
            document["prompt_logprobs"] = self._prompt_logprobs(choices[0].stream)
        return document

    def chunk(
        self,
        index: int,
        delta: Delta,
        finish_reason: str,
        usage: dict[str, Any] | None,
        *,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns one chunk of a stream.

        Args:
            index: Index of the choice.
            delta: What is new; may be empty. Completions have only its content.
            finish_reason: The reason in the last chunk of the choice; empty in all others.
            usage: The usage so far; None leaves it out.
            logprobs: The log probabilities of the new tokens; None if none are asked for.
        """
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": finish_reason or None,
        }
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        chunk = {**self._chunk_head, "choices": [choice]}
        if usage is not None:
            chunk["usage"] = usage
        return chunk

    def parts(self, stream: GenerationStream) -> AnswerParts:
        """Returns the parts of an answer that begins."""
        return AnswerParts(stream.request.syntax.parser(), reasoning=self.wanted.include_reasoning)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the chunk after the last one of a stream, which holds only the usage."""
        return {**self._chunk_head, "choices": [], "usage": usage}

    def logprobs(
        self,
        stream: GenerationStream,
        scored: Sequence[ScoredToken],
        echoed: EchoedPrompt | None = None,
        start: int = 0,
    ) -> dict[str, Any] | None:
        """Returns the log probabilities of some tokens; None if none are asked for.

        Args:
            stream: The answer that they are part of.
            scored: The tokens.
            echoed: The prompt, if its tokens come first.
            start: Characters of the text that are in front of the answer, if not the prompt's.
        """
        if self.wanted.logprobs is None:
            return None
        codec = stream.request.codec
        if self.chat:
            return chat_logprobs(codec, scored)
        return completion_logprobs(codec, scored, echoed, start)

    def echoed(self, index: int, stream: GenerationStream) -> EchoedPrompt | None:
        """Returns the prompt that the text of a choice begins with; None if it begins with none."""
        if not self.wanted.echo:
            return None
        prompt = self.wanted.prompts[index // self.wanted.choices]
        top = self.wanted.logprobs
        scored = stream.prompt_logprobs if top is not None else ()
        return EchoedPrompt.of(prompt, stream.request, scored, top)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = choice.parts.message()
        echoed = self.echoed(index, choice.stream)
        document: dict[str, Any] = {
            "index": index,
            "logprobs": self.logprobs(choice.stream, choice.scored, echoed),
            "finish_reason": choice.parts.finish_reason(choice.finish_reason),
        }
        if self.chat:
            document["message"] = message
            return document
        text = message["content"]
        document["text"] = text if echoed is None else echoed.text + text
        if self.wanted.prompt_logprobs is not None:
            document["prompt_logprobs"] = self._prompt_logprobs(choice.stream)
        return document

    def _prompt_logprobs(self, stream: GenerationStream) -> list[Any]:
        top = self.wanted.prompt_logprobs or 0
        return prompt_logprobs(stream.request.codec, stream.prompt_logprobs, top)

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        model = self.wanted.model
        return {"id": self.id, "object": kind, "created": self.created, "model": model}
