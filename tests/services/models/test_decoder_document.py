"""`decoder.json` of this release, of the ones before, and of a later one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from catenary_services.domain.decoder import DecoderTable, Form, HeldSizes, StepSizes
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.errors import InvalidInput
from catenary_services.models.decoder_document import decoder_of_document, document_of_decoder
from catenary_services.models.model_repository import ModelRepository

PLAIN = DecoderTable("0", 2, 8, 2, 1, 4, 100, 128, (2, 5), 10, 20, 30, 4)
STEP = StepSizes(1, 2, 3, 4, 5, 6, 1)
TABLE = replace(
    PLAIN,
    forms=(
        HeldSizes(Form.ONNX_INT4, (10, 11), 0, 30, 0, 0, 6, 4, STEP),
        HeldSizes(Form.TORCH_BFLOAT16, (20, 21), 20, 30, 20, 7, 0, 2),
    ),
)
OLD = {
    "version": 1,
    "model_hash": "0",
    "blocks": 2,
    "hidden_size": 8,
    "attention_heads": 2,
    "key_value_heads": 1,
    "head_size": 4,
    "vocabulary_size": 100,
    "context_tokens": 128,
    "end_token_ids": [2, 5],
    "block_bytes": 10,
    "embedding_bytes": 20,
    "head_bytes": 30,
    "cache_bytes_per_token": 4,
}
"""As the release before forms wrote it."""


def changed(change: Any) -> Any:
    document = json.loads(json.dumps(document_of_decoder(TABLE)))
    change(document)
    return document


def test_a_table_comes_back_as_it_was_written() -> None:
    assert decoder_of_document(changed(lambda _: None), "d") == TABLE


def test_without_forms_it_is_what_the_releases_before_wrote_and_read() -> None:
    assert json.loads(json.dumps(document_of_decoder(PLAIN))) == OLD
    assert decoder_of_document(OLD, "d") == PLAIN


def test_forms_of_a_later_release_are_left_out() -> None:
    def add(document: Any) -> None:
        document["forms"]["torch-int8"] = {"something": "else"}

    assert decoder_of_document(changed(add), "d") == TABLE
    assert decoder_of_document(changed(lambda d: d.update(forms_version=2)), "d") == PLAIN


def test_a_release_before_forms_reads_what_it_knows() -> None:
    document = changed(lambda _: None)
    assert {name: document[name] for name in OLD} == OLD


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("version", lambda d: d.update(version=2)),
        ("version", lambda d: d.pop("version")),
        ("forms_version", lambda d: d.pop("forms_version")),
        ("forms", lambda d: d.update(forms=[])),
        ("forms.onnx-int4", lambda d: d["forms"].update({"onnx-int4": 7})),
        ("forms.onnx-int4", lambda d: d["forms"]["onnx-int4"].update(block_bytes=[1])),
        ("forms.onnx-int4.block_bytes", lambda d: d["forms"]["onnx-int4"].pop("block_bytes")),
        (
            "forms.onnx-int4.block_bytes",
            lambda d: d["forms"]["onnx-int4"].update(block_bytes=[1, -1]),
        ),
        ("forms.onnx-int4.head_bytes", lambda d: d["forms"]["onnx-int4"].update(head_bytes=-1)),
        (
            "forms.onnx-int4.step.row_bytes",
            lambda d: d["forms"]["onnx-int4"]["step"].pop("row_bytes"),
        ),
        ("head_bytes", lambda d: d.update(head_bytes=True)),
    ],
)
def test_what_is_malformed_is_refused_by_name(field: str, change: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        decoder_of_document(changed(change), "d")
    assert raised.value.field.startswith(f"d.{field}")


def test_forms_are_no_part_of_what_a_version_computes(tmp_path: Path) -> None:
    repository, key = ModelRepository(tmp_path), ModelKey("m", "1")
    repository.write_manifest(ModelManifest(key, "decoder", "w.safetensors", 10**9, 8, False))
    (repository.folder(key) / "w.safetensors").write_bytes(b"weights")
    digests = set()
    for table in (PLAIN, TABLE, replace(TABLE, block_bytes=99)):
        repository.write_decoder_table(key, table)
        repository.record_content(key)
        assert repository.decoder_table(key) == table
        digests.add(repository.content_digest(key))
    assert len(digests) == 1
    repository.write_decoder_table(key, replace(TABLE, hidden_size=16))
    repository.record_content(key)
    assert repository.content_digest(key) not in digests
