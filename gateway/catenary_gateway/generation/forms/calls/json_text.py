"""Recognition of one JSON value in a text that comes character by character."""

from __future__ import annotations

import json
from typing import Any

_CLOSING = {"{": "}", "[": "]"}
_SCALAR = frozenset("0123456789+-.eEtrufalsn")
_BETWEEN = frozenset(",: \t\r\n")


class JsonText:
    """The text of one JSON value, which says when it is complete.

    It follows strings and brackets only; `value` parses all of it.
    """

    __slots__ = ("_escaped", "_in_string", "_open", "_parts", "complete")

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._parts: list[str] = []
        self.complete = False
        """True once a string, list or object has ended. Other values end before the next character
        that is not one of theirs."""

    def take(self, char: str) -> str | None:
        """Takes the next character.

        Returns the character as valid JSON has it: models write line feeds into strings, where JSON
        wants them escaped. None if the character is no part of the value; then it was not taken.
        """
        written = char
        if self.complete or not char:
            return None
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                self.complete = not self._open
            elif char < " ":
                written = json.dumps(char)[1:-1]
        elif not self._outside(char):
            return None
        self._parts.append(written)
        return written

    def value(self, invalid: Any) -> Any:
        """Returns the value; `invalid` if what was taken is not JSON."""
        return json_value("".join(self._parts), invalid)

    def _outside(self, char: str) -> bool:
        """Takes a character that is not inside of a string; returns False if it is no part."""
        if char in _SCALAR:
            return True
        if not self._open and self._parts:
            return False  # a number or a name has ended
        if char == '"':
            self._in_string = True
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
        elif self._open and char == self._open[-1]:
            self._open.pop()
            self.complete = not self._open
        else:
            return bool(self._open) and char in _BETWEEN
        return True


def json_value(text: str, invalid: Any) -> Any:
    """Returns the value of a JSON text; `invalid` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return invalid
