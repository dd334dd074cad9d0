"""JSON schemas of many kinds, made of a seed; every answer to one of them is short."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
_WORDS = ("name", "age", "kind", "a b", "x-1", "\u00fc", "\u65e5\u672c", 'q"', "_", "0")
_TEXTS = ("red", "green", "", "a b", 'say "hi"', "l\u00e4ng", "\U0001f600", "back\\slash", "tab\t")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
_PATTERNS = ("^[a-z]{1,5}$", "^\\d{3}-\\d{2}$", "^(yes|no)$", "[0-9]{2}", "^[A-Z][a-z]{0,6}$")


class SchemaMaker:
    """Makes schemas of each kind by chance."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def of(self, kind: str) -> Schema:
        """Returns a schema of one of `KINDS`."""
        return KINDS[kind](self)

    def types(self) -> Schema:
        kinds = ["string", "integer", "number", "boolean", "null"]
        return self._bounded({"type": self._rng.choice(kinds)})

    def several_types(self) -> Schema:
        kinds = self._rng.sample(["string", "integer", "boolean", "null"], 2)
        return self._bounded({"type": kinds})

    def values(self) -> Schema:
        some = self._rng.sample([*_TEXTS, 0, -7, 1.5, True, None, [1, "a"], {"b": [None]}], 4)
        return self._rng.choice([{"enum": some}, {"const": some[0]}])

    def objects(self) -> Schema:
        return self._object(self._rng.randrange(1, 5), 2)

    def open_objects(self) -> Schema:
        more = self._leaf()
        return {
            "type": "object",
            "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["id"],
            "additionalProperties": more,
            "maxProperties": 2,
        }

    def patterned_objects(self) -> Schema:
        return {
            "type": "object",
            "patternProperties": {"^n[0-9]$": {"type": "integer"}, "^t[a-c]$": self._leaf()},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 2,
        }

    def arrays(self) -> Schema:
        least = self._rng.randrange(0, 3)
        most = least + self._rng.randrange(0, 3)
        return {"type": "array", "items": self._leaf(), "minItems": least, "maxItems": most}

    def tuples(self) -> Schema:
        first = [self._leaf() for _ in range(self._rng.randrange(1, 4))]
        return {
            "type": "array",
            "prefixItems": first,
            "items": False,
            "minItems": self._rng.randrange(0, len(first) + 1),
        }

    def lengths(self) -> Schema:
        least = self._rng.randrange(0, 5)
        return {
            "type": "string",
            "minLength": least,
            "maxLength": least + self._rng.randrange(0, 6),
        }

    def patterns(self) -> Schema:
        made: Schema = {"type": "string", "pattern": self._rng.choice(_PATTERNS)}
        if not made["pattern"].startswith("^"):
            made["maxLength"] = 8
        return made

    def formats(self) -> Schema:
        made: Schema = {"type": "string", "format": self._rng.choice(_FORMATS)}
        if made["format"] == "email":
            made["maxLength"] = 20
        return made

    def bounds(self) -> Schema:
        low = self._rng.randrange(-200, 200)
        high = low + self._rng.randrange(1, 300)
        kind = self._rng.choice(["integer", "number"])
        least = self._rng.choice(["minimum", "exclusiveMinimum"])
        most = self._rng.choice(["maximum", "exclusiveMaximum"])
        if kind == "integer" and least != "minimum" and most != "maximum":
            high += 2
        made: Schema = {"type": kind, least: low, most: high}
        if kind == "integer" and self._rng.random() < 0.3:
            return {"type": kind, "minimum": 0, "maximum": 1000, "multipleOf": 7}
        return made

    def any_of(self) -> Schema:
        return {"anyOf": [self._leaf(), self._object(2, 1), {"type": "null"}]}

    def one_of(self) -> Schema:
        """Options that exclude each other, as pydantic writes unions with a discriminator."""
        options = []
        for name in self._rng.sample(["cat", "dog", "fish"], 2):
            option = self._object(1, 0)
            option["properties"] = {"type": {"const": name}, **option["properties"]}
            option["required"] = ["type", *option["required"]]
            options.append(option)
        return {"oneOf": options}

    def all_of(self) -> Schema:
        first = {"type": "object", "properties": {"a": self._leaf()}, "required": ["a"]}
        second = {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}
        return {"allOf": [first, second], "maxProperties": 2}

    def nullable(self) -> Schema:
        made = self._object(2, 1)
        name = next(iter(made["properties"]))
        made["properties"][name] = {"anyOf": [made["properties"][name], {"type": "null"}]}
        return made

    def references(self) -> Schema:
        return {
            "$defs": {"leaf": self._leaf(), "pair": self._object(2, 0)},
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/leaf"}, "two": {"$ref": "#/$defs/pair"}},
            "required": ["one", "two"],
            "additionalProperties": False,
        }

    def recursion(self) -> Schema:
        node = self._object(1, 0)
        node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
        node["required"] = [*node["required"], "next"]
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}

    def _leaf(self) -> Schema:
        return self._rng.choice(
            [self.types, self.values, self.lengths, self.bounds, self.patterns, self.formats]
        )()

    def _object(self, properties: int, depth: int) -> Schema:
        names = self._rng.sample(_WORDS, properties)
        made = {
            name: self._object(self._rng.randrange(1, 3), depth - 1)
            if depth and self._rng.random() < 0.3
            else self._leaf()
            for name in names
        }
        required = [name for name in names if self._rng.random() < 0.6]
        return {
            "type": "object",
            "properties": made,
            "required": required,
            "additionalProperties": False,
        }

    def _bounded(self, schema: Schema) -> Schema:
        """Returns a schema whose texts and numbers do not go on for ever."""
        return {**schema, "maxLength": 8, "minimum": -1000, "maximum": 1000}


KINDS: dict[str, Callable[[SchemaMaker], Schema]] = {
    name: getattr(SchemaMaker, name)
    for name in (
        "types",
        "several_types",
        "values",
        "objects",
        "open_objects",
        "patterned_objects",
        "arrays",
        "tuples",
        "lengths",
        "patterns",
        "formats",
        "bounds",
        "any_of",
        "one_of",
        "all_of",
        "nullable",
        "references",
        "recursion",
    )
}


def schemas(count: int, seed: int = 0) -> list[tuple[str, Schema]]:
    """Returns so many schemas with their kinds, each kind as often as the others."""
    maker, kinds = SchemaMaker(seed), list(KINDS)
    names = [kinds[number % len(kinds)] for number in range(count)]
    return [(name, maker.of(name)) for name in names]
