"""Pages of the gRPC services, one per package, from the comments in the .proto files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc  # type: ignore[import-untyped]

from catenary_services.errors import InternalError
from docs_build.reference.markdown import code, page, prose, table

PROTOS = Path(__file__).resolve().parents[2] / "protos"

_Field = descriptor_pb2.FieldDescriptorProto
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
"""Field numbers of `FileDescriptorProto` with which paths of source locations begin."""
_FIELDS, _NESTED, _NESTED_ENUMS, _METHODS, _VALUES = 2, 3, 4, 2, 2
_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in _Field.Type.items()}

Comments = Mapping[tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class ProtoFile:
    """One .proto file, with its comments by the path of the declaration they describe."""

    file: descriptor_pb2.FileDescriptorProto
    comments: Comments

    def comment(self, *path: int) -> str:
        """Returns the comment of a declaration; empty without one."""
        return prose(self.comments.get(path, ""))


def proto_files() -> tuple[ProtoFile, ...]:
    """Returns every .proto file of the project, parsed with its comments.

    Raises:
        InternalError: protoc refuses one of them.
    """
    names = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    includes = str(resources.files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "all.pb"
        arguments = [f"-I{PROTOS}", f"-I{includes}", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *arguments, "--include_source_info", *names]) != 0:
            raise InternalError("protoc cannot read the .proto files")
        described = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return tuple(ProtoFile(file, _comments_of(file)) for file in described.file)


def service_pages() -> dict[str, str]:
    """Returns the page of every .proto file by its name, e.g. "grpc-catenary-v1-admin.md"."""
    files = proto_files()
    pages_of = {
        f".{file.file.package}.{name}": page_name(file)
        for file in files
        for name in (
            *(message.name for message in file.file.message_type),
            *(enum.name for enum in file.file.enum_type),
        )
    }
    return {page_name(file): _page(file, pages_of) for file in files}


def page_name(file: ProtoFile) -> str:
    """Returns the file name of a .proto file's page."""
    return "grpc-" + file.file.name.removesuffix(".proto").replace("/", "-") + ".md"


def _comments_of(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    found = {}
    for location in file.source_code_info.location:
        text = location.leading_comments or location.trailing_comments
        # A headline such as `---- gateway -> scheduler ----` only divides the file.
        if text.strip() and not text.strip().startswith("----"):
            found[tuple(location.path)] = text
    return found


def _page(file: ProtoFile, pages_of: Mapping[str, str]) -> str:
    head = "".join(
        location.leading_detached_comments[0]
        if location.leading_detached_comments
        else location.leading_comments
        for location in file.file.source_code_info.location
        if tuple(location.path) == (12,)  # `syntax`, behind the comment of a file
    )
    sections = [_service(file, number, pages_of) for number in range(len(file.file.service))]
    for number, message in enumerate(file.file.message_type):
        sections += _message(file, message, (_MESSAGES, number), message.name, pages_of)
    for number, enum in enumerate(file.file.enum_type):
        sections.append(_enum(file, enum, (_ENUMS, number), enum.name))
    title = _title(file)
    intro = f"{prose(head)}\n\nFrom `protos/{file.file.name}`, package `{file.file.package}`."
    return page(title, intro, *sections)


def _title(file: ProtoFile) -> str:
    services = ", ".join(service.name for service in file.file.service)
    return services or f"{Path(file.file.name).stem.capitalize()} messages"


def _service(file: ProtoFile, number: int, pages_of: Mapping[str, str]) -> str:
    service = file.file.service[number]
    rows = [
        (
            f'<span id="{service.name.lower()}-{method.name.lower()}"></span>{code(method.name)}',
            ("stream of " if method.client_streaming else "")
            + _linked(method.input_type, file, pages_of),
            ("stream of " if method.server_streaming else "")
            + _linked(method.output_type, file, pages_of),
            file.comment(_SERVICES, number, _METHODS, index),
        )
        for index, method in enumerate(service.method)
    ]
    described = file.comment(_SERVICES, number)
    heading = f"## Service `{file.file.package}.{service.name}`"
    methods = table(("method", "request", "response", ""), rows)
    return "\n\n".join(part for part in (heading, described, methods) if part)


def _message(
    file: ProtoFile,
    message: descriptor_pb2.DescriptorProto,
    path: tuple[int, ...],
    name: str,
    pages_of: Mapping[str, str],
) -> Iterator[str]:
    rows = []
    for index, field in enumerate(message.field):
        said = file.comment(*path, _FIELDS, index)
        if field.HasField("oneof_index") and not field.proto3_optional:
            said = f"One of `{message.oneof_decl[field.oneof_index].name}`. {said}".strip()
        kind = _type(file, message, field, pages_of)
        rows.append((str(field.number), code(field.name), kind, said))
    parts = [f"## {name}", file.comment(*path)]
    parts.append(table(("", "field", "type", ""), rows) if rows else "It has no fields.")
    yield "\n\n".join(part for part in parts if part)
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(
                file, nested, (*path, _NESTED, index), f"{name}.{nested.name}", pages_of
            )
    for index, enum in enumerate(message.enum_type):
        yield _enum(file, enum, (*path, _NESTED_ENUMS, index), f"{name}.{enum.name}")


def _enum(
    file: ProtoFile, enum: descriptor_pb2.EnumDescriptorProto, path: tuple[int, ...], name: str
) -> str:
    rows = [
        (str(value.number), code(value.name), file.comment(*path, _VALUES, index))
        for index, value in enumerate(enum.value)
    ]
    return f"## {name}\n\n{file.comment(*path)}\n\n" + table(("", "value", ""), rows)


def _type(
    file: ProtoFile,
    message: descriptor_pb2.DescriptorProto,
    field: _Field,
    pages_of: Mapping[str, str],
) -> str:
    entry = next((n for n in message.nested_type if n.name == _last(field.type_name)), None)
    if entry is not None and entry.options.map_entry:
        key, value = (_type(file, entry, each, pages_of) for each in entry.field)
        return f"map of {key} to {value}"
    if field.type in (_Field.TYPE_MESSAGE, _Field.TYPE_ENUM):
        kind = _linked(field.type_name, file, pages_of)
    else:
        kind = code(_SCALARS[field.type])
    if field.label == _Field.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _linked(type_name: str, file: ProtoFile, pages_of: Mapping[str, str]) -> str:
    top = re.match(rf"(\.{re.escape(file.file.package)}|\.catenary\.v1)\.(\w+)", type_name)
    where = pages_of.get(top.group(0)) if top else None
    if where is None:
        return code(type_name.lstrip("."))
    inner = type_name.removeprefix(top.group(1) + ".") if top else type_name
    anchor = inner.replace(".", "").lower()
    target = f"#{anchor}" if where == page_name(file) else f"{where}#{anchor}"
    return f"[{inner}]({target})"


def _last(type_name: str) -> str:
    return type_name.rpartition(".")[2]
