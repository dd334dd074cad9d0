"""JSON schemas of every kind: whatever a model says, an answer that is complete validates."""

from __future__ import annotations

import json
from collections import Counter

import jsonschema
import numpy as np

from catenary_gateway.generation.grammar.forms import grammar_of_schema
from catenary_services.grammar.vocabulary import TokenVocabulary
from small_models.random_schemas import Schema, schemas
from small_models.tiny_tokenizer import END, tiny_tokenizer

SCHEMAS = 300
MOST_TOKENS = 300
FINISHED = 0.95
"""The least share of answers that end within `MOST_TOKENS`."""
_FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def said(vocabulary: TokenVocabulary, schema: Schema, rng: np.random.Generator) -> tuple[str, bool]:
    """Returns what chance says of the tokens that are allowed, and whether it ended."""
    matcher, text = vocabulary.matcher(grammar_of_schema(schema, "schema")), bytearray()
    for _ in range(MOST_TOKENS):
        token = int(rng.choice(np.flatnonzero(matcher.allowed())))
        if token == END:
            return text.decode(), True
        text.append(token - 3)
        matcher.accept([token])
    return text.decode(errors="replace"), False


def test_complete_answers_validate() -> None:
    vocabulary = TokenVocabulary(tiny_tokenizer().to_str(), 259, (END,))
    rng = np.random.default_rng(0)
    ends: Counter[tuple[str, bool]] = Counter()
    for kind, schema in schemas(SCHEMAS):
        text, is_complete = said(vocabulary, schema, rng)
        ends[kind, is_complete] += 1
        if is_complete:
            validator = jsonschema.Draft202012Validator(schema, format_checker=_FORMATS)
            validator.validate(json.loads(text))
    finished = sum(count for (_, is_complete), count in ends.items() if is_complete)
    assert finished >= FINISHED * SCHEMAS, ends
