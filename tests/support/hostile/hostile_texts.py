"""Chat templates and tokenizers made to hold up, fill or end whatever reads them.

The library's own loops cannot be interrupted, its panics are no `Exception`, and some files end the
process. Each entry has the outcome that costs its own model only: `JailLimit` where the process
that reads them is ended, or another word of `Outcome`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from catenary_services.jail.orders import JailLimit
from small_models.tiny_tokenizer import TEMPLATE, tiny_tokenizer

LONG_WORD = "a" * 20_000 + "!"
"""A message of this is honest, and what hostile tokenizers fall for."""


class Outcome(StrEnum):
    """What becomes of a chat with a hostile model, where its process goes on."""

    REFUSED = "refused"
    """The template refuses the conversation: the client's error."""
    UNUSABLE = "unusable"
    """The model's files are of no use, which the error says."""
    ANSWERED = "answered"
    """They only looked bad."""


CPU, MEMORY, CRASH = JailLimit.CPU_TIME, JailLimit.MEMORY, JailLimit.CRASH
ENDED = (CPU, MEMORY, CRASH)
"""What takes much of everything is ended by whichever limit it reaches first on this machine."""
REFUSED, UNUSABLE, ANSWERED = Outcome

_DOUBLING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)
_NESTED_LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + TEMPLATE
)
TEMPLATES: Mapping[str, tuple[str, object]] = {
    "loops in loops": (_NESTED_LOOPS, CPU),
    "a power of powers": ("{% set n = messages|length * 9 %}{{ n ** (n ** n) }}", CPU),
    "a book of nothing": ("{{ lipsum(n=9999999) }}", CPU),
    "sorting again and again": (
        "{% for a in range(999) %}{% set x = range(99999)|sort(reverse=true) %}{% endfor %}",
        CPU,
    ),
    "a text that doubles": (_DOUBLING, ENDED),
    "a text times a number": ("{{ 'x' * 10 ** 10 }}", MEMORY),
    "a list times a number": ("{{ ([0] * 10 ** 9)|length }}", MEMORY),
    "a wide column": ("{{ 'x'|center(10 ** 9) }}", MEMORY),
    "a wide number": ("{{ '%0999999999d' % 1 }}", MEMORY),
    "a wide field": ("{{ '{:>999999999}'.format(1) }}", MEMORY),
    "a deep indent": ("{{ messages|tojson(indent=10 ** 9) }}", MEMORY),
    "a macro of itself": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", REFUSED),
    "a huge range": ("{{ range(10 ** 9)|list }}", REFUSED),
    "a class of a class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", REFUSED),
    "the modules of a class": ("{{ cycler.__init__.__globals__.os.system('id') }}", REFUSED),
    "a file of the host": ("{% include '/etc/passwd' %}", REFUSED),
    "a long complaint": ("{{ raise_exception('x' * 10 ** 7) }}", REFUSED),
    "a number of many digits": ("{{ 10 ** 100000 }}", UNUSABLE),
    "a long answer": ("{% for a in range(999) %}{{ 'x' * 10000 }}{% endfor %}", REFUSED),
    "blocks in blocks": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, UNUSABLE),
    "brackets in brackets": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", UNUSABLE),
    "half a template": ("{% for message in messages", UNUSABLE),
}

_Document = dict[str, Any]


def _tiny() -> _Document:
    document: _Document = json.loads(tiny_tokenizer().to_str())
    return document


def _with(**parts: object) -> Callable[[], str]:
    """Returns a maker of a good tokenizer with other parts."""
    return lambda: json.dumps(_tiny() | parts)


def _model(kind: str, **parts: object) -> Callable[[], str]:
    split = {"type": "Whitespace"} if kind == "WordPiece" else None
    return _with(model={"type": kind, **parts}, pre_tokenizer=split, added_tokens=[])


def _regex(pattern: str) -> _Document:
    return {"Regex": pattern}


def _split(pattern: str) -> _Document:
    return {
        "type": "Split",
        "pattern": _regex(pattern),
        "behavior": "Isolated",
        "invert": False,
    }


def _growing(times: int, steps: int) -> _Document:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}
    return {"type": "Sequence", "normalizers": [step] * steps}


def _deep(levels: int) -> str:
    tokenizer = json.dumps(_tiny() | {"normalizer": "HERE"})
    nested = '{"type":"Sequence","normalizers":[' * levels + "]}" * levels
    return tokenizer.replace('"HERE"', nested)


def _missing_merge() -> str:
    document = _tiny()
    document["model"]["merges"] = [["a", "nobody"]]
    return json.dumps(document)


def _prefixed_merge() -> str:
    document = _tiny()
    document["model"]["vocab"] |= {"ab": 300}
    document["model"]["merges"] = [["a", "b"]]
    document["model"]["continuing_subword_prefix"] = "#" * 50
    return json.dumps(document)


def _circular_merges() -> str:
    document = _tiny()
    vocabulary = document["model"]["vocab"]
    vocabulary |= {"": 300, "aa": 301}
    document["model"]["merges"] = [["", ""], ["a", ""], ["", "a"], ["a", "a"]]
    return json.dumps(document)


_UNIGRAM = [["a", 0.0], ["aa", float("1e308")], ["!", -1.0]]
TOKENIZERS: Mapping[str, tuple[Callable[[], str], object]] = {
    "half a file": (lambda: json.dumps(_tiny())[:3000], UNUSABLE),
    "no tokenizer at all": (lambda: "{}", UNUSABLE),
    "levels without end": (lambda: _deep(50_000), UNUSABLE),
    "a merge of nobody": (_missing_merge, UNUSABLE),
    "merges that go in a circle": (_circular_merges, UNUSABLE),
    "a merge shorter than its prefix": (_prefixed_merge, UNUSABLE),
    "a map of characters that is none": (
        _with(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
        CRASH,
    ),
    "a map of characters cut off": (
        _with(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAEAAAAA"}),
        UNUSABLE,
    ),
    "an id at the end of the world": (
        _model("WordLevel", vocab={"a": 2**32 - 1}, unk_token="a"),
        UNUSABLE,
    ),
    "a token like a book": (_model("WordLevel", vocab={"a" * 999_999: 0}, unk_token="a"), UNUSABLE),
    "a pattern that backtracks": (_with(pre_tokenizer=_split("a*(?=[b!])(?!!)")), CPU),
    "a pattern that backtracks in the normalizer": (
        _with(normalizer={"type": "Replace", "pattern": _regex("(a|aa)+$"), "content": ""}),
        ENDED,
    ),
    "half a pattern": (_with(pre_tokenizer=_split("(")), UNUSABLE),
    "letters that grow": (_with(normalizer=_growing(10, 12)), ENDED),
    "a long text before each": (
        _with(normalizer={"type": "Prepend", "prepend": "ab" * 4_000_000}),
        ENDED,
    ),
    "words that are tried letter by letter": (
        _model(
            "WordPiece",
            vocab={"b": 0, "a": 1},
            unk_token="b",
            continuing_subword_prefix="",
            max_input_chars_per_word=10**9,
        ),
        CPU,
    ),
    "an unknown word without a token": (
        _model("WordLevel", vocab={"x": 0}, unk_token="nobody"),
        UNUSABLE,
    ),
    "an unknown piece without a token": (
        _model("Unigram", vocab=[["x", 0.0]], unk_id=None),
        UNUSABLE,
    ),
    "an unknown piece out of the list": (_model("Unigram", vocab=_UNIGRAM, unk_id=99), UNUSABLE),
    "a decoder with a pattern": (
        _with(decoder={"type": "Replace", "pattern": _regex("(a+)+$"), "content": ""}),
        UNUSABLE,
    ),
    "a decoder that makes much of little": (
        _with(decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**6}),
        UNUSABLE,
    ),
    "a decoder that cuts what is not there": (
        _with(decoder={"type": "Strip", "content": "a", "start": 0, "stop": 10**9}),
        ANSWERED,
    ),
    "room for a billion tokens": (
        _with(
            padding={
                "strategy": {"Fixed": 10**9},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "a",
            }
        ),
        ANSWERED,
    ),
    "an added token of nothing": (
        _with(
            added_tokens=[
                {
                    "id": 0,
                    "content": "",
                    "single_word": False,
                    "lstrip": True,
                    "rstrip": True,
                    "normalized": True,
                    "special": True,
                }
            ]
        ),
        ANSWERED,
    ),
    "pieces of no length": (_with(pre_tokenizer={"type": "FixedLength", "length": 0}), CRASH),
}
