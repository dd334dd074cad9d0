"""Conversion between `decoder.json` and the table of a text-generating model's sizes.

The plain sizes in the document stand for every form a model is held in. Beside them is `forms`,
with a version number of its own: releases older than forms ignore it, and this release reads their
files.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import msgspec

from catenary_services.domain.decoder import AllocatedSizes, DecoderForm, DecoderTable, StepSizes
from catenary_services.errors import InvalidInput
from catenary_services.json_fields import Count, check_version, converted

VERSION = 1
FORMS_VERSION = 1


class _Forms(msgspec.Struct):
    forms_version: int


# Files have all sizes; in the program those of a step, which are 0 for many forms, may be left out.
_Step = msgspec.defstruct("_Step", [(each.name, Count) for each in fields(StepSizes)])
_SET_BY_THE_PROGRAM = ("sampler", "has_graphs")
_WRITTEN_TYPES = {"block_bytes": tuple[Count, ...], "step": _Step}
_Held = msgspec.defstruct(
    "_Held",
    [
        (each.name, _WRITTEN_TYPES.get(each.name, Count))
        for each in fields(AllocatedSizes)
        if each.name not in ("form", *_SET_BY_THE_PROGRAM)
    ],
)


def document_of_decoder(table: DecoderTable) -> dict[str, Any]:
    """Returns the JSON document of a decoder's table of sizes."""
    document = asdict(table)
    if not table.forms:
        del document["forms"]
        return {"version": VERSION, **document}
    for entry in document["forms"]:
        for name in _SET_BY_THE_PROGRAM:
            del entry[name]
    document["forms"] = {entry.pop("form"): entry for entry in document["forms"]}
    return {"version": VERSION, "forms_version": FORMS_VERSION, **document}


def decoder_of_document(document: Any, where: str) -> DecoderTable:
    """Returns the table of sizes in a `decoder.json`.

    Unknown forms, and all forms of a later version, are left out: the plain sizes stand for them.

    Raises:
        InvalidInput: The document is malformed or of a later version; the error names the field.
    """
    check_version(document, VERSION, where)
    table = converted({**document, "forms": ()}, DecoderTable, where)
    table = replace(table, forms=_forms(document, where))
    for each in table.forms:
        if len(each.block_bytes) != table.blocks:
            said = f"has {len(each.block_bytes)} blocks, the model {table.blocks}"
            raise InvalidInput(f"{where}.forms.{each.form}", said)
    return table


def _forms(document: Any, where: str) -> tuple[AllocatedSizes, ...]:
    if "forms" not in document:
        return ()
    if converted(document, _Forms, where).forms_version != FORMS_VERSION:
        return ()
    found = converted(document["forms"], dict[str, Any], f"{where}.forms")
    known = set(DecoderForm)
    return tuple(
        _held(DecoderForm(name), entry, f"{where}.forms.{name}")
        for name, entry in found.items()
        if name in known
    )


def _held(form: DecoderForm, entry: Any, where: str) -> AllocatedSizes:
    sizes = msgspec.structs.asdict(converted(entry, _Held, where))
    step = StepSizes(**msgspec.structs.asdict(sizes.pop("step")))
    return AllocatedSizes(form=form, step=step, **sizes)
