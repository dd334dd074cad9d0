"""Requests to engines and their answers, in terms that all engines share."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.executors.device import Device
from catenary_services.domain.logprobs import TokenLogprobs
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.errors import InvalidInput

LARGEST_LINE_BYTES = 4 << 20
"""The most bytes of one line, or of an answer in one piece: the last line of llama-server repeats
the prompt."""
LARGEST_PAGE_BYTES = 8 << 20
"""The most bytes of a page about the engine itself."""
_NAME = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|@(\w+)')
"""The name of a part of a grammar, or a text or pattern, in which no such name is one."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Tokens that an engine is to generate behind a sequence."""

    token_ids: Sequence[int]
    """The whole sequence so far."""
    prompt_tokens: int
    """Number of prompt tokens among them."""
    most_tokens: int
    """The most tokens to generate."""
    parameters: SamplingParameters
    seed: int
    """A number in 0..2**63 - 1 that follows from the session's seed and the place of the token."""
    reuses_prompt: bool = True
    """Whether what the engine has computed of an equal beginning may be used again."""
    adapter: str = ""
    """The LoRA adapter of the model; empty for none."""
    place: int | None = None
    """The number of the engine's place for the sequence; None if the engine chooses one."""

    @property
    def least_tokens(self) -> int:
        """Number of tokens before which none may end the answer."""
        generated = len(self.token_ids) - self.prompt_tokens
        return min(self.most_tokens, max(0, self.parameters.min_tokens - generated))


class EngineTokens(NamedTuple):
    """The tokens that one line of an engine's answer adds."""

    token_ids: Sequence[int] = ()
    scored: Sequence[TokenLogprobs] = ()
    """Log probabilities of these tokens, if they were asked for."""
    finish: str = ""
    """"stop" or "length" where the answer ends; empty while it goes on."""
    unsaid: int = 0
    """Number of tokens that were generated behind these and never said, where the answer ends."""


NOTHING_NEW = EngineTokens()


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """The room that an engine has once it has started, by its own account."""

    sessions: int
    """The most sequences that it computes at a time."""
    tokens: int
    """The most tokens of all their caches."""


@dataclass(frozen=True, slots=True)
class EngineBooking:
    """The room that the scheduler books of an engine, which is all that the engine gets."""

    sessions: int
    session_tokens: int
    """The most tokens of one session."""
    tokens: int
    """The most tokens of all caches together."""

    @classmethod
    def of(cls, layout: CacheLayout, blocks: int) -> EngineBooking:
        """Returns what a layout books of a model with so many blocks."""
        sessions = layout.block_slots // blocks
        tokens = layout.memory_tokens(commits_on_use=True) // blocks
        return cls(sessions, layout.session_tokens, tokens)

    @property
    def is_shared(self) -> bool:
        """True if not all sessions can have their full length at a time."""
        return self.tokens < self.sessions * self.session_tokens


class AnswerParser(Protocol):
    """Reads the lines of one answer."""

    def take(self, line: bytes) -> EngineTokens:
        """Returns what a line adds.

        Raises:
            PartitionLost: The line is not what the engine is known to say.
        """
        ...


class EngineProtocol(Protocol):
    """The protocol of one kind of engine."""

    path: str
    """The path that answers requests."""
    health_path: str
    """The path that answers with 200 once the engine serves."""
    capacity_path: str
    """The path of the page that says what the engine keeps."""
    places: int
    """The number of places for sequences, if requests name them; 0 if the engine chooses."""

    def body(self, request: EngineRequest, *, whole: bool = False) -> dict[str, Any]:
        """Returns the JSON object that asks for tokens.

        Args:
            request: What is asked for.
            whole: Whether the answer comes in one piece instead of line by line.

        Raises:
            InvalidInput: The engine has no such parameter; the error names the field.
        """
        ...

    def parser(self, request: EngineRequest) -> AnswerParser:
        """Returns a parser for the answer to a request."""
        ...

    def capacity(self, page: bytes) -> EngineCapacity:
        """Returns what the page at `capacity_path` says.

        Raises:
            PartitionLost: It does not say it.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The arguments and variables of an engine's process."""

    engine: str
    """The name of the engine, as the script knows it."""
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables besides those that every engine gets."""


def grammar_parts(grammar: str) -> tuple[dict[str, Any] | None, str]:
    """Returns a grammar as a JSON schema, or None and a Lark grammar.

    Several parts, as answers have that are reasoned or may be calls, become one grammar.

    Args:
        grammar: The grammar in the serial form of llguidance.

    Raises:
        InvalidInput: It has a form that no engine takes.
    """
    if not grammar.lstrip().startswith("{"):
        return None, grammar
    try:
        first, *others = json.loads(grammar)["grammars"]
        if not others and isinstance(first.get("json_schema"), dict):
            return first["json_schema"], ""
        return None, _lark_of(first, {part["name"]: part for part in others})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidInput("grammar", "has a form that no engine takes") from None


def _lark_of(part: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a part as Lark, with rules for the parts that it names by "@"."""
    used: dict[str, None] = {}

    def rule_of(match: re.Match[str]) -> str:
        if match[1] not in named:
            return match[0]
        used[match[1]] = None
        return f"part_{match[1]}"

    lark: str = part["lark_grammar"]
    if named:  # nobody knows what a client's own grammar looks like, which names none
        lark = _NAME.sub(rule_of, lark)
    others = {name: each for name, each in named.items() if name not in used}
    return lark + "".join(f"\npart_{name}: {_body_of(named[name], others)}" for name in used)


def _body_of(part: Mapping[str, Any], named: Mapping[str, Mapping[str, Any]]) -> str:
    if "json_schema" in part:
        return f"%json {json.dumps(part['json_schema'])}"
    return f"%lark {{\n{_lark_of(part, named)}\n}}"


def visible_devices(device: Device, count: int = 1) -> dict[str, str]:
    """Returns the variables that show an engine the GPUs it may use: the agent's and those behind.

    The driver shows this process a list of its own, if it was given one.
    """
    if device.kind != "cuda":
        return {"CUDA_VISIBLE_DEVICES": ""}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(each) for each in range(device.index + count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device.index : device.index + count])}
