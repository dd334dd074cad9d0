"""What the scripts of clients share: each says what it tries, and prints what came of it.

A script runs in its client's own environment. It knows what any user of that client knows, from
variables of its environment: an address, a key, and names of models.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

BASE_URL = os.environ["BASE_URL"]
"""Of the HTTP server, without a path."""
GRPC_ADDRESS = os.environ["GRPC_ADDRESS"]
API_KEY = os.environ["API_KEY"]
CHAT_MODEL = os.environ["CHAT_MODEL"]
TOKENIZER = os.environ["TOKENIZER"]
"""The folder of the chat model's tokenizer."""
EMBEDDING_MODEL = os.environ["EMBEDDING_MODEL"]
RERANK_MODEL = os.environ["RERANK_MODEL"]
NUMBER_MODEL = os.environ["NUMBER_MODEL"]
"""Takes rows `x` of four numbers, and answers their doubles `y`."""
WORD_MODEL = os.environ["WORD_MODEL"]
"""Takes pairs of `words`, and answers each of them `twice`."""

Attempt = Callable[[], Any]
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class Feature:
    """Something that a client can do, tried by a function.

    With `refused` the server answers with an error that holds these words, which are the reason
    unless `because` says more. With `partly` it works, but for what this says.
    """

    name: str
    attempt: Attempt
    refused: str
    because: str
    partly: str

    def outcome(self) -> dict[str, str]:
        """Tries it, and returns what came of it."""
        try:
            made = self.attempt()
            if inspect.isawaitable(made):
                _runner.run(_done(made))
        except Exception as error:
            if self.refused and self.refused in said(error):
                return self._told("no", self.because or self.refused)
            return self._told("failed", "".join(traceback.format_exception(error)))
        if self.refused:
            return self._told("failed", f"was not refused by: {self.refused}")
        return self._told("partly" if self.partly else "works", self.partly)

    def _told(self, state: str, reason: str) -> dict[str, str]:
        return {"feature": self.name, "state": state, "reason": reason}


_features: list[Feature] = []
_runner = asyncio.Runner()
"""One loop for all features of a client, which may keep connections."""


def feature(
    name: str, *, refused: str = "", because: str = "", partly: str = ""
) -> Callable[[Attempt], Attempt]:
    """Marks the function that tries a feature."""

    def add(attempt: Attempt) -> Attempt:
        _features.append(Feature(name, attempt, refused, because, partly))
        return attempt

    return add


def report(distribution: str, version: str = "") -> None:
    """Tries all features in order, and prints a line of JSON for the client and for each."""
    version = version or importlib.metadata.version(distribution)
    print(json.dumps({"client": distribution, "version": version}), flush=True)
    chosen = sys.argv[1:]
    for each in _features:
        if not chosen or each.name in chosen:
            print(json.dumps(each.outcome()), flush=True)
    _runner.close()


def error_of(kind: type[E], attempt: Attempt) -> E:
    """Returns the error of this kind with which an attempt ends."""
    try:
        attempt()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def said(error: BaseException | None) -> str:
    """Returns what an error says, with the errors that led to it."""
    parts = []
    while error is not None:
        parts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


async def _done(made: Any) -> None:
    await made
