"""Generated functions that check the parsed messages of one type.

They are generated from source, as `dataclasses` does with `__init__`. Every message of every stream
goes through such a function. A loop over fields and bounds takes twice as long as the comparisons
written out: `if m.rows > 1048576: return False`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from catenary_services.rules.vocabulary import FLOATS, INTEGERS, TEXTS, FieldBounds, lowest

_MOST_KNOWN = 8_192
"""The most texts remembered to match one pattern."""

Passes = Callable[[Any], bool]
Ruled = tuple[tuple[FieldDescriptor, FieldBounds], Passes | None]


def compiled(name: str, fields: Sequence[Ruled], relations: Sequence[Passes]) -> Passes:
    """Returns a function that is True for messages which keep their rules.

    It may be False for a good message with an optional field that is not set.

    Args:
        name: Name of the message type.
        fields: The fields with their bounds, and the functions that check messages inside them.
        relations: Further conditions of the message.
    """
    body = _Body()
    for (field, bounds), passes in fields:
        if field.is_repeated:
            body.repeated(field, bounds, passes)
        elif passes is None:
            body.value(field, bounds)
    body.members([each for each in fields if each[1] is not None and not each[0][0].is_repeated])
    for relation in relations:
        body.doubt(f"not {body.named(relation)}(m)")
    source = "\n".join(("def passes(m):", *body.lines, "    return True"))
    exec(compile(source, f"<rules of {name}>", "exec"), body.names)
    passes_: Passes = body.names["passes"]
    return passes_


class _Body:
    """The source lines of one function, and the objects that they refer to by name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}

    def named(self, value: object) -> str:
        name = f"n{len(self.names)}"
        self.names[name] = value
        return name

    def doubt(self, condition: str, indent: str = "    ") -> None:
        self.lines.append(f"{indent}if {condition}: return False")

    def value(self, field: FieldDescriptor, bounds: FieldBounds) -> None:
        for condition in self._conditions(field, bounds, f"m.{field.name}"):
            self.doubt(condition)

    def repeated(self, field: FieldDescriptor, bounds: FieldBounds, passes: Passes | None) -> None:
        self.lines += [f"    v = m.{field.name}", "    if v:"]
        inside = "        "
        self.doubt(f"len(v) > {bounds.max_items or 0}", inside)
        if passes is not None:
            self.lines.append(f"{inside}for x in v:")
            self.doubt(f"not {self.named(passes)}(x)", inside * 2)
        elif field.type in INTEGERS:
            for extreme in ("min(v)", "max(v)"):
                for condition in self._conditions(field, bounds, extreme):
                    self.doubt(condition, inside)
        elif conditions := list(self._conditions(field, bounds, "x")):
            self.lines.append(f"{inside}for x in v:")
            for condition in conditions:
                self.doubt(condition, inside * 2)

    def members(self, fields: Sequence[Ruled]) -> None:
        """Adds checks of the messages inside a message.

        In a oneof, only the member that is set is checked.
        """
        kinds: dict[str, dict[str, Passes]] = {}
        for (field, bounds), passes in fields:
            assert passes is not None
            if field.containing_oneof is not None:
                kinds.setdefault(field.containing_oneof.name, {})[field.name] = passes
                continue
            self.lines.append(f"    if m.HasField({field.name!r}):")
            self.doubt(f"not {self.named(passes)}(m.{field.name})", "        ")
            if bounds.required:
                self.lines.append("    else: return False")
        for oneof, checks in kinds.items():
            self.lines.append(f"    k = {self.named(checks)}.get(w := m.WhichOneof({oneof!r}))")
            self.doubt("k is not None and not k(getattr(m, w))")

    def _conditions(self, field: FieldDescriptor, bounds: FieldBounds, value: str) -> Iterator[str]:
        """Yields conditions under which a value breaks its bounds."""
        if bounds.unbounded:
            return
        if field.type in INTEGERS:
            low, high = INTEGERS[field.type]
            if bounds.high < high:
                yield f"{value} > {bounds.high}"
            if lowest(bounds) > low:
                yield f"{value} < {lowest(bounds)}"
        elif field.type in FLOATS:  # NaN is within no bounds
            low_, high_ = self.named(bounds.low), self.named(bounds.high)
            yield f"not {low_} <= {value} <= {high_}"
        elif field.type in TEXTS:
            if bounds.pattern is not None:
                known: set[str] = set() if bounds.required else {""}
                form = _form(bounds.pattern, bounds.max_len, known)
                yield f"{value} not in {self.named(known)} and not {self.named(form)}({value})"
                return
            if bounds.required:
                yield f"not {value}"
            if bounds.max_len is not None:
                yield f"len({value}) > {bounds.max_len}"


def _form(pattern: re.Pattern[str], max_len: int | None, known: set[str]) -> Callable[[str], bool]:
    """Returns a function that tells if a text matches a pattern, and remembers texts that do."""

    def has_form(text: str) -> bool:
        if max_len is not None and len(text) > max_len:
            return False
        if pattern.fullmatch(text) is None or (not text and "" not in known):
            return False
        if len(known) < _MOST_KNOWN:
            known.add(text)
        return True

    return has_form
