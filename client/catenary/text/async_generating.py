"""The methods of the asyncio client that ask language models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Literal, Unpack, overload

from catenary.text.async_text_streams import AsyncTextStream
from catenary.text.continuing import TextCall
from catenary.text.generation import (
    GenerationOptions,
    GenerationResult,
    Messages,
    Prompt,
    chat_call,
    prompt_call,
)


class GeneratesTextAsync(ABC):
    """The methods of `AsyncClient` for language models, as those of `Client`.

    With `stream=True` they return the stream at once, otherwise a coroutine to await.
    """

    @overload
    def chat(
        self,
        model: str,
        messages: Messages,
        *,
        stream: Literal[False] = False,
        **options: Unpack[GenerationOptions],
    ) -> Coroutine[Any, Any, GenerationResult]: ...
    @overload
    def chat(
        self,
        model: str,
        messages: Messages,
        *,
        stream: Literal[True],
        **options: Unpack[GenerationOptions],
    ) -> AsyncTextStream: ...
    def chat(
        self,
        model: str,
        messages: Messages,
        *,
        stream: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Coroutine[Any, Any, GenerationResult] | AsyncTextStream:
        """Returns the answer to a conversation, to await, or a stream of its pieces.

        Args:
            model: "name" or "name:version".
            messages: One user message as text, or `{"role": ..., "content": ...}` for each.
            stream: True for an `AsyncTextStream` to iterate over.
            **options: See `GenerationOptions`, e.g. `max_tokens=64, temperature=0.7`.
        """
        answer = self._text_stream(chat_call(model, messages, options))
        return answer if stream else answer.result()

    @overload
    def generate(
        self,
        model: str,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        **options: Unpack[GenerationOptions],
    ) -> Coroutine[Any, Any, GenerationResult]: ...
    @overload
    def generate(
        self,
        model: str,
        prompt: Prompt,
        *,
        stream: Literal[True],
        **options: Unpack[GenerationOptions],
    ) -> AsyncTextStream: ...
    def generate(
        self,
        model: str,
        prompt: Prompt,
        *,
        stream: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Coroutine[Any, Any, GenerationResult] | AsyncTextStream:
        """Returns the continuation of a prompt, to await, or a stream of its pieces; see `chat`.

        Args:
            model: "name" or "name:version".
            prompt: Text as it is, without a chat template, or token ids.
            stream: True for an `AsyncTextStream` to iterate over.
            **options: See `GenerationOptions`.
        """
        answer = self._text_stream(prompt_call(model, prompt, options))
        return answer if stream else answer.result()

    @abstractmethod
    def _text_stream(self, call: TextCall) -> AsyncTextStream:
        """Returns the pieces of a call as they come."""
