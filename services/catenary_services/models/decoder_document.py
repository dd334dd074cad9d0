"""Conversion between `decoder.json` and the table of a text-generating model's sizes.

The plain sizes in the document stand for every form a model is held in. Beside them is `forms`,
with a version number of its own: releases older than forms ignore it, and this release reads their
files.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from catenary_services.domain.decoder import AllocatedSizes, DecoderForm, DecoderTable, StepSizes
from catenary_services.errors import InvalidInput
from catenary_services.json_fields import field, integers

VERSION = 1
FORMS_VERSION = 1
_OTHERS = ("model_hash", "end_token_ids", "forms")
_FORM_OTHERS = ("form", "block_bytes", "step", "sampler")


def document_of_decoder(table: DecoderTable) -> dict[str, Any]:
    """Returns the JSON document of a decoder's table of sizes."""
    document = asdict(table)
    if not table.forms:
        del document["forms"]
        return {"version": VERSION, **document}
    for entry in document["forms"]:
        del entry["sampler"]  # set by the program, not by the model
    document["forms"] = {entry.pop("form"): entry for entry in document["forms"]}
    return {"version": VERSION, "forms_version": FORMS_VERSION, **document}


def decoder_of_document(document: Any, where: str) -> DecoderTable:
    """Returns the table of sizes in a `decoder.json`.

    Unknown forms, and all forms of a later version, are left out: the plain sizes stand for them.

    Raises:
        InvalidInput: The document is malformed or of a later version; the error names the field.
    """
    version = field(document, "version", int, where)
    if version != VERSION:
        raise InvalidInput(f"{where}.version", f"is {version}, this program reads {VERSION}")
    values: dict[str, Any] = {
        each.name: field(document, each.name, int, where)
        for each in fields(DecoderTable)
        if each.name not in _OTHERS
    }
    ends = field(document, "end_token_ids", list, where)
    table = DecoderTable(
        model_hash=field(document, "model_hash", str, where),
        end_token_ids=tuple(integers(ends, 0, f"{where}.end_token_ids")),
        forms=_forms(document, where),
        **values,
    )
    for each in table.forms:
        if len(each.block_bytes) != table.blocks:
            said = f"has {len(each.block_bytes)} blocks, the model {table.blocks}"
            raise InvalidInput(f"{where}.forms.{each.form}", said)
    return table


def _forms(document: Any, where: str) -> tuple[AllocatedSizes, ...]:
    if "forms" not in document or field(document, "forms_version", int, where) != FORMS_VERSION:
        return ()
    found = field(document, "forms", dict, where)
    known = set(DecoderForm)
    return tuple(
        _held(DecoderForm(name), entry, f"{where}.forms.{name}")
        for name, entry in found.items()
        if name in known
    )


def _held(form: DecoderForm, entry: Any, where: str) -> AllocatedSizes:
    sizes: dict[str, Any] = {
        each.name: _amount(entry, each.name, where)
        for each in fields(AllocatedSizes)
        if each.name not in _FORM_OTHERS
    }
    blocks = integers(field(entry, "block_bytes", list, where), 0, f"{where}.block_bytes")
    step = field(entry, "step", dict, where)
    steps = {each.name: _amount(step, each.name, f"{where}.step") for each in fields(StepSizes)}
    return AllocatedSizes(form=form, block_bytes=blocks, step=StepSizes(**steps), **sizes)


def _amount(entry: Any, name: str, where: str) -> int:
    value = field(entry, name, int, where)
    if value < 0:
        raise InvalidInput(f"{where}.{name}", f"{value} is negative")
    return int(value)
