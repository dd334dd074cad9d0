"""The form in which a model writes calls of tools."""

from __future__ import annotations

import json
import random
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from catenary_gateway.generation.forms.calls.call_parser import CallParser
from catenary_gateway.generation.forms.calls.grammars import ToolGrammar

_LETTERS = string.ascii_letters + string.digits


class ToolForm(ABC):
    """A way of models to write calls of tools: to read them, to force them, and to show them."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Texts around calls, which tokenizers may have as special tokens."""
    arguments_key: ClassVar[str] = "arguments"
    id_prefix: ClassVar[str] = "call_"
    id_characters: ClassVar[int] = 24

    @abstractmethod
    def parser(self, names: Collection[str], new_id: Callable[[], str]) -> CallParser:
        """Returns a reader of one answer."""

    @abstractmethod
    def rule(self, grammar: ToolGrammar) -> str:
        """Returns the rule for answers, and adds the rules that it needs to the grammar."""

    @abstractmethod
    def written(self, calls: Sequence[str]) -> str:
        """Returns calls that are JSON objects as the model would have written them."""

    def call(self, name: str, arguments: object) -> str:
        """Returns a call as JSON object."""
        return json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)

    def call_pattern(self) -> str:
        """Returns what every call looks like, to show it to a model."""
        return f'{{"name": <function-name>, "{self.arguments_key}": <args-json-object>}}'

    def new_id(self, source: random.Random) -> str:
        """Returns a new id of a call."""
        return self.id_prefix + "".join(source.choices(_LETTERS, k=self.id_characters))

    def own_id(self, call_id: str) -> str:
        """Returns what stands for the id of a call that another model may have made."""
        return call_id
