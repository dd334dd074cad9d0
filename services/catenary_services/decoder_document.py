"""`decoder.json`: the sizes of a model that generates text, as a document.

Beside the plain sizes, which stand for every way the model is held, it has `forms`, with a version
of their own: releases before forms read the rest, and files of those releases are read by this one.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import msgspec

from catenary_services.domain.decoder import DecoderTable, Form, HeldSizes, StepSizes
from catenary_services.errors import InvalidInput
from catenary_services.json_fields import Count, check_version, converted

VERSION = 1
FORMS_VERSION = 1


class _Forms(msgspec.Struct):
    forms_version: int


# Files have all sizes; in the program those of a step, which are 0 for many forms, may be left out.
_Step = msgspec.defstruct("_Step", [(each.name, Count) for each in fields(StepSizes)])
_WRITTEN_TYPES = {"block_bytes": tuple[Count, ...], "step": _Step}
_Held = msgspec.defstruct(
    "_Held",
    [
        (each.name, _WRITTEN_TYPES.get(each.name, Count))
        for each in fields(HeldSizes)
        if each.name not in ("form", "sampler")
    ],
)


def document_of_decoder(table: DecoderTable) -> dict[str, Any]:
    """Returns what a table is written as."""
    document = asdict(table)
    if not table.forms:
        del document["forms"]
        return {"version": VERSION, **document}
    for entry in document["forms"]:
        del entry["sampler"]  # the program's, not the model's
    document["forms"] = {entry.pop("form"): entry for entry in document["forms"]}
    return {"version": VERSION, "forms_version": FORMS_VERSION, **document}


def decoder_of_document(document: Any, where: str) -> DecoderTable:
    """Returns the table a document is of.

    Forms that this program does not know are left out, as all forms of a later version are: the
    plain sizes stand for them.

    Raises:
        InvalidInput: If it is malformed, or of a version to come; names the field.
    """
    check_version(document, VERSION, where)
    table = converted({**document, "forms": ()}, DecoderTable, where)
    table = replace(table, forms=_forms(document, where))
    for each in table.forms:
        if len(each.block_bytes) != table.blocks:
            said = f"has {len(each.block_bytes)} blocks, the model {table.blocks}"
            raise InvalidInput(f"{where}.forms.{each.form}", said)
    return table


def _forms(document: Any, where: str) -> tuple[HeldSizes, ...]:
    if "forms" not in document:
        return ()
    if converted(document, _Forms, where).forms_version != FORMS_VERSION:
        return ()
    found = converted(document["forms"], dict[str, Any], f"{where}.forms")
    known = set(Form)
    return tuple(
        _held(Form(name), entry, f"{where}.forms.{name}")
        for name, entry in found.items()
        if name in known
    )


def _held(form: Form, entry: Any, where: str) -> HeldSizes:
    sizes = msgspec.structs.asdict(converted(entry, _Held, where))
    step = StepSizes(**msgspec.structs.asdict(sizes.pop("step")))
    return HeldSizes(form=form, step=step, **sizes)
