"""Models answer JSON schemas of every kind at temperature 1: what they finish, validates.

What chance says of the same schemas without a model is in tests/services/grammar/test_schemas.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer

from catenary_agent.decoders.base import CacheLayout, DecoderExecutor
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.decoders.sampling.grammar_masks import GrammarMasks
from catenary_agent.decoders.synthetic.random_models import RandomModel, write_random_model
from catenary_agent.executors.device import Device
from catenary_gateway.generation.grammar.forms import grammar_of_schema
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.grammar.vocabulary import TokenVocabulary
from catenary_services.models.model_repository import ModelRepository
from grammars.constrained_answers import ConstrainedAnswer, answers
from grammars.random_schemas import KINDS, Schema, schemas
from language_model import KEY, install
from tiny_language_models import worker_in_this_process

pytestmark = pytest.mark.nightly

AT_ONCE = 18
TINY = ModelKey("tiny", "1")
FINISHED = {
    "tiny": 0.9,
    "smollm2": 0.8,
}
"""The least share of answers that are finished within the tokens they have."""


class Model:
    """A model loaded as an agent loads it, with its tokens."""

    def __init__(self, repository: ModelRepository, key: ModelKey, library: str) -> None:
        table = repository.decoder_table(key)
        layout = CacheLayout(AT_ONCE * table.blocks, 1024, (0,))
        partition = PartitionKey(key, 0, table.blocks)
        self.executor: DecoderExecutor = load_decoder(
            repository, partition, Device("cpu"), layout, 1, library
        )
        text = (repository.folder(key) / "tokenizer.json").read_text()
        self.tokenizer = Tokenizer.from_str(text)
        ends = table.end_token_ids
        self.vocabulary = TokenVocabulary(text, table.vocabulary_size, ends)
        self.masks = GrammarMasks(lambda: self.vocabulary, lambda *_: None)

    def answer(self, asked: list[Schema], tokens: int, seed: int = 0) -> list[ConstrainedAnswer]:
        prompt = self.tokenizer.encode("The JSON object is: ", add_special_tokens=False).ids
        found = []
        for at in range(0, len(asked), AT_ONCE):
            parameters = [
                SamplingParameters(
                    max_tokens=tokens,
                    temperature=1.0,
                    seed=seed + at + number,
                    grammar=grammar_of_schema(schema, "guided_json"),
                )
                for number, schema in enumerate(asked[at : at + AT_ONCE])
            ]
            found += answers(self.executor, self.masks, self.tokenizer, prompt, parameters)
        return found

    def close(self) -> None:
        self.executor.close()
        self.masks.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("tiny")
    write_random_model(folder / "source", RandomModel("tiny", dtype="float32"))
    repository = ModelRepository(folder / "models")
    with worker_in_this_process():
        options = ImportOptions(target="gpu", session_tokens=1024)
        import_decoder(repository, folder / "source", TINY, options)
    model = Model(repository, TINY, "torch")
    yield model
    model.close()


def check(model: Model, name: str, count: int, tokens: int) -> None:
    asked = schemas(count)
    found = model.answer([schema for _, schema in asked], tokens)
    ends: Counter[tuple[str, str]] = Counter()
    for (kind, schema), answer in zip(asked, found, strict=True):
        ends[kind, answer.reason] += 1
        if answer.reason == "stop":
            validator = jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            validator.validate(json.loads(answer.text))
    finished = sum(number for (_, reason), number in ends.items() if reason == "stop")
    assert finished >= FINISHED[name] * count, ends


def test_a_tiny_model_answers_each_kind_of_schema(tiny: Model) -> None:
    check(tiny, "tiny", len(KINDS), 300)


def test_equal_seeds_give_equal_answers(tiny: Model) -> None:
    asked = [schema for _, schema in schemas(4, seed=9)]
    first, again, other = (tiny.answer(asked, 60, seed) for seed in (3, 3, 4))
    assert [each.tokens for each in first] == [each.tokens for each in again]
    assert [each.tokens for each in first] != [each.tokens for each in other]


def test_a_tiny_model_answers_three_hundred_schemas(tiny: Model) -> None:
    check(tiny, "tiny", 300, 400)


def test_a_real_model_answers_schemas(tmp_path: Path) -> None:
    install(tmp_path)
    model = Model(ModelRepository(tmp_path), KEY, "onnx")
    try:
        check(model, "smollm2", 4 * len(KINDS), 200)
    finally:
        model.close()
