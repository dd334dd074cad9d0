"""The decoders of tokenizers, in plain code: steps that make the texts of tokens one text.

Source: the Rust library `tokenizers`, release 0.23, `src/decoders` and `src/pre_tokenizers`, whose
results these equal. A step is a function of the texts of all tokens, as there. In contrast to the
library nothing here panics, loops or grows without bound, whatever a tokenizer.json says: a regular
expression is refused, as is what would make much text of little.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

DecoderStep = Callable[[Sequence[str]], list[str]]
BYTE_LEVEL = "ByteLevel"
_MOST_STEPS = 16
_MOST_GROWTH = 4
"""The most characters that all steps together may make of one."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_CONTRACTIONS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def kinds_of(document: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Returns the steps of a decoder's document, those of sequences in sequences in one list.

    Raises:
        ValueError: There are too many.
    """
    found: list[Mapping[str, Any]] = []
    waiting = [] if document is None else [document]
    while waiting:
        step = waiting.pop(0)
        if step.get("type") == "Sequence":
            waiting[:0] = step.get("decoders", ())
        else:
            found.append(step)
        if len(found) + len(waiting) > _MOST_STEPS:
            raise ValueError(f"its decoder has more than {_MOST_STEPS} steps")
    return found


def steps_of(kinds: Sequence[Mapping[str, Any]]) -> list[DecoderStep]:
    """Returns the functions of steps.

    Raises:
        ValueError: A step is of no kind that is known, is malformed, or makes much of little.
    """
    growth = 1
    steps: list[DecoderStep] = []
    for kind in kinds:
        name = str(kind.get("type"))
        if name not in _STEPS:
            raise ValueError(f"its decoder has a step {name[:50]!r}, which is not known")
        try:
            step, factor = _STEPS[name](kind)
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"its decoder's step {name!r} is malformed") from None
        steps.append(step)
        growth *= factor
    if growth > _MOST_GROWTH:
        raise ValueError("its decoder makes too much text of little")
    return steps


def bytes_of_token(text: str) -> bytes:
    """Returns what a token of a byte-level vocabulary stands for."""
    try:
        return bytes([_BYTE_OF[character] for character in text])
    except KeyError:
        return text.encode(errors="replace")


def _byte_level(_: Mapping[str, Any]) -> tuple[DecoderStep, int]:
    return (lambda texts: [b"".join(map(bytes_of_token, texts)).decode(errors="replace")]), 1


def _fuse(_: Mapping[str, Any]) -> tuple[DecoderStep, int]:
    return (lambda texts: ["".join(texts)]), 1


def _replace(kind: Mapping[str, Any]) -> tuple[DecoderStep, int]:
    pattern, content = kind["pattern"], _text(kind["content"])
    if "String" not in pattern:
        raise ValueError("its decoder has a regular expression, which is not run here")
    old = _text(pattern["String"])
    return (lambda texts: [each.replace(old, content) for each in texts]), _growth(old, content)


def _byte_fallback(_: Mapping[str, Any]) -> tuple[DecoderStep, int]:
    return _with_bytes_joined, 1


def _strip(kind: Mapping[str, Any]) -> tuple[DecoderStep, int]:
    content, start, stop = _text(kind["content"]), int(kind["start"]), int(kind["stop"])

    def strip(text: str) -> str:
        first, last = 0, len(text)
        while first < min(start, last) and text[first] == content:
            first += 1
        while last > first and len(text) - last < stop and text[last - 1] == content:
            last -= 1
        return text[first:last]

    return (lambda texts: list(map(strip, texts))), 1


def _metaspace(kind: Mapping[str, Any]) -> tuple[DecoderStep, int]:
    sign = _text(kind["replacement"])
    prepends = kind.get("prepend_scheme", "always") != "never"

    def step(texts: Sequence[str]) -> list[str]:
        made = [each.replace(sign, " ") for each in texts]
        if prepends and texts:
            made[0] = texts[0].replace(sign, "")
        return made

    return step, 1


def _word_piece(kind: Mapping[str, Any]) -> tuple[DecoderStep, int]:
    prefix, cleans = _text(kind["prefix"]), bool(kind["cleanup"])

    def step(texts: Sequence[str]) -> list[str]:
        made = [
            text if not at else text[len(prefix) :] if text.startswith(prefix) else f" {text}"
            for at, text in enumerate(texts)
        ]
        return list(map(_cleaned, made)) if cleans else made

    return step, 2


def _bpe(kind: Mapping[str, Any]) -> tuple[DecoderStep, int]:
    suffix = _text(kind["suffix"])

    def step(texts: Sequence[str]) -> list[str]:
        return [
            *(text.replace(suffix, " ") for text in texts[:-1]),
            *(text.replace(suffix, "") for text in texts[-1:]),
        ]

    return step, _growth(suffix, " ")


def _ctc(kind: Mapping[str, Any]) -> tuple[DecoderStep, int]:
    pad, delimiter = _text(kind["pad_token"]), _text(kind["word_delimiter_token"])
    cleans = bool(kind["cleanup"])

    def step(texts: Sequence[str]) -> list[str]:
        fresh = [text for at, text in enumerate(texts) if not at or text != texts[at - 1]]
        made = [text.replace(pad, "") for text in fresh]
        if cleans:
            made = [_cleaned(text).replace(delimiter, " ") for text in made]
        return [text for text in made if text]

    return step, _growth(delimiter, " ")


_STEPS: dict[str, Callable[[Mapping[str, Any]], tuple[DecoderStep, int]]] = {
    BYTE_LEVEL: _byte_level,
    "Fuse": _fuse,
    "Replace": _replace,
    "ByteFallback": _byte_fallback,
    "Strip": _strip,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
    "BPEDecoder": _bpe,
    "CTC": _ctc,
}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _growth(old: str, new: str) -> int:
    return 1 + len(new) if not old else max(1, -(-len(new) // len(old)))


def _cleaned(text: str) -> str:
    for old, new in _CONTRACTIONS:
        text = text.replace(old, new)
    return text


def _with_bytes_joined(texts: Sequence[str]) -> list[str]:
    made: list[str] = []
    run = bytearray()

    def end_run() -> None:
        try:
            made.append(run.decode())
        except UnicodeDecodeError:
            made.extend("\ufffd" * len(run))
        run.clear()

    for text in texts:
        if len(text) == 6 and (byte := _BYTE.fullmatch(text)):
            run.append(int(byte[1], 16))
            continue
        if run:
            end_run()
        made.append(text)
    if run:
        end_run()
    return made


def _byte_characters() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for, as GPT-2 has it.

    Bytes that are printable in Latin-1 stand for themselves; the others for characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
