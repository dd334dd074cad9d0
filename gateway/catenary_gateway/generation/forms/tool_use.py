"""The tools of one request, and what the model is to do with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a tool that takes nothing."""


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool as its caller describes it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """JSON Schema of the arguments; None if it takes nothing."""
    strict: bool = False
    """True if arguments must match the schema in any case."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON Schema of the arguments."""
        return NO_PARAMETERS if self.parameters is None else self.parameters

    @property
    def document(self) -> dict[str, Any]:
        """The tool as chat templates get it, in OpenAI's form."""
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request that may be called."""

    shown: tuple[ToolDefinition, ...]
    """The tools that the prompt names; one at least."""
    callable: tuple[ToolDefinition, ...]
    """The tools of these that may be called; one at least."""
    required: bool = False
    """True if the answer must be a call."""
    parallel: bool = True
    """False if the answer may have one call at most."""

    @property
    def constrained(self) -> bool:
        """True if what the model writes must be held to a grammar."""
        strict = any(tool.strict for tool in self.callable)
        return self.required or strict or not self.parallel
