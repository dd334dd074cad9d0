"""The model repository: folders `<name>/<version>/` of manifest, model file and block table.

    models/
      efficientnet-lite0/
        1/
          model.yaml     how the model wants to be served (`ModelManifest`)
          model.onnx     or model.pt2
          blocks.json    where it is cut and what each block costs (`BlockTable`)
          profile.json   what each block costs on each class of device (`ModelProfile`); optional
          decoder.json   sizes of a model that generates text (`DecoderTable`); only of those
          source.json    where it came from (`SourceRecord`), if it was imported
          content.json   size and digest of every file that is loaded (`catenary_services.content`)

`blocks.json` carries the SHA-256 of the model file it was made from. A table of another file is
refused, because its tensor names would cut the wrong graph; a profile of another file or of other
cuts likewise. Emulated agents need no weights: where the model file is absent there is nothing to
compare and the table is taken as it is.

Once `content.json` is there, nothing that differs from it is read: what this module reads it
compares, and whoever reads weights does it within `ModelRepository.reading`. What this module
writes, it enters there.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from catenary_services.bounded_files import LARGEST_JSON_BYTES, read_bounded, read_yaml_text
from catenary_services.content.hashing import digests
from catenary_services.content.keeping import ContentRecords, write_durably
from catenary_services.content.reading import FileSupplier, VerifiedReading
from catenary_services.content.record import (
    FETCHED_FOLDER,
    RECORD_FILE,
    SOURCE_FILE,
    ContentRecord,
)
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, ModelKey, Nanoseconds
from catenary_services.domain.latency import OBJECTIVE_KEYS, TokenObjectives
from catenary_services.domain.model import (
    ENGINE_OF,
    LANGUAGE_PLATFORMS,
    RECOGNISED,
    BlockTable,
    ModelManifest,
)
from catenary_services.domain.packing import packing_goal
from catenary_services.domain.profile import ModelProfile, parse_profile, profile_document
from catenary_services.errors import InvalidInput, ModelNotFound
from catenary_services.json_fields import Count, converted
from catenary_services.models.block_document import (
    BLOCKS_FILE,
    document_of_table,
    table_of_document,
)
from catenary_services.models.decoder_document import decoder_of_document, document_of_decoder
from catenary_services.models.source_record import SourceRecord, decode_source, encode_source

MANIFEST_FILE = "model.yaml"
PROFILE_FILE = "profile.json"
DECODER_FILE = "decoder.json"
PLATFORMS = ("onnxruntime_onnx", "pytorch_exported", "decoder", *ENGINE_OF)
PRECISIONS = ("fp32", "int8", "int4")
TARGETS = ("cpu", "gpu", "both")
TOOL_PARSERS = (RECOGNISED, "hermes", "llama3_json", "mistral", "json", "none")
REASONING_PARSERS = (RECOGNISED, "qwen3", "deepseek_r1", "none")

ExampleShapes = tuple[tuple[tuple[int, ...], ...], ...]
"""Per boundary and tensor, a shape that the tensor had in the probing run."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# It is no number, because "model:name" asks for an adapter, and "model:number" for a version.
_ADAPTER = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,127}")
_PARSERS = ("tool_parser", "reasoning_parser")
_ENGINE_KEYS = ("engine_file", "engine_arguments", "min_version")
_ONLY_OF_DECODERS = (
    *OBJECTIVE_KEYS,
    "cache_oversubscription",
    "packing",
    *_PARSERS,
    *_ENGINE_KEYS,
    "adapters",
)
_CHOICES = {
    "platform": PLATFORMS,
    "precision": PRECISIONS,
    "target": TARGETS,
    "tool_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
_NOT_OF_DECODERS = ("dimensions", "text_tokens")
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
_Milliseconds = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
_Argument = Annotated[str, msgspec.Meta(min_length=1, max_length=1024, pattern="^[^\\x00-\\x1f]+$")]
_Subfolder = Annotated[
    str, msgspec.Meta(max_length=200, pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*$")
]


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """`model.yaml` as it lies on disk."""

    platform: str
    file: str
    slo_ms: _Milliseconds = 1000
    max_batch: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    float16_boundaries: bool = True
    precision: str = "fp32"
    target: str = "both"
    session_tokens: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)] = 2048
    text_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    time_to_first_token_slo_ms: _Milliseconds = 0
    time_per_output_token_slo_ms: _Milliseconds = 0
    cache_oversubscription: Annotated[float, msgspec.Meta(ge=1, le=64)] = 0
    packing: Any = None
    tool_parser: str = RECOGNISED
    reasoning_parser: str = RECOGNISED
    engine_file: str = ""
    engine_arguments: Annotated[tuple[_Argument, ...], msgspec.Meta(max_length=64)] = ()
    min_version: Annotated[str, msgspec.Meta(pattern=r"^\d{1,9}(\.\d{1,9}){0,5}$|^$")] = ""
    adapters: Annotated[dict[str, _Subfolder], msgspec.Meta(max_length=32)] = {}
    dimensions: Annotated[dict[str, _Size], msgspec.Meta(max_length=64)] = {}


class ModelRepository:
    """Reads and writes the models below one folder."""

    def __init__(self, root: Path, *, records: bool = True) -> None:
        """Creates a view of the models below `root`.

        Args:
            root: The folder.
            records: False where models are being made, so that nothing is recorded of their files
                yet.
        """
        self.root = root
        self.supply: Callable[[ModelKey], FileSupplier | None] = lambda key: None
        """Returns what brings in the files of a version; None if there is nothing to bring."""
        self._makes_records = records
        self._records = ContentRecords(digests())

    def list(self) -> list[ModelKey]:
        """Returns every model and version with a manifest, by name, then version ascending."""
        if not self.root.is_dir():
            return []
        found = [
            ModelKey(path.parent.parent.name, path.parent.name)
            for path in self.root.glob(f"*/*/{MANIFEST_FILE}")
            if _NAME.fullmatch(path.parent.parent.name) and _NAME.fullmatch(path.parent.name)
        ]
        return sorted(found, key=lambda key: (key.name, _version_order(key.version)))

    def resolve(self, reference: str) -> ModelKey:
        """Returns the key of "name" (its highest version) or "name:version".

        Raises:
            ModelNotFound: If there is no such model or version.
        """
        name, _, version = reference.partition(":")
        found = [key for key in self.list() if key.name == name and version in ("", key.version)]
        if not found:
            known = {key.name for key in self.list()} | {str(key) for key in self.list()}
            guess = did_you_mean(reference, known)
            raise ModelNotFound(f"model {reference!r} is not in the repository{guess}")
        return found[-1]

    def folder(self, key: ModelKey) -> Path:
        """Returns the folder of one version; it need not exist yet."""
        for part, text in (("model_name", key.name), ("model_version", key.version)):
            if not _NAME.fullmatch(text):
                raise InvalidInput(part, f"{text!r} is not a plain name of letters, digits, . _ -")
        return self.root / key.name / key.version

    def manifest(self, key: ModelKey) -> ModelManifest:
        """Returns the manifest of a version.

        Raises:
            ModelNotFound: The version has no manifest.
            InvalidInput: The file is no manifest; the field names file and key.
        """
        try:
            with self._reading_known(key) as reading:
                return manifest_in(reading, key)
        except (FileNotFoundError, ModelNotFound):
            raise ModelNotFound(f"model {key} is not in the repository") from None

    def model_file(self, key: ModelKey) -> Path:
        """Returns the path of the model's file, which may be absent (emulated agents need none)."""
        return self._inside(key, self.manifest(key).file)

    def model_hash(self, key: ModelKey) -> str:
        """Returns the SHA-256 of the model's file as it is now, in hexadecimal.

        Raises:
            ModelNotFound: The file is absent.
        """
        path = self.model_file(key)
        try:
            return digests().whole(path)
        except FileNotFoundError:
            raise ModelNotFound(f"model {key} has no file {path.name}") from None

    def content(self, key: ModelKey) -> ContentRecord | None:
        """Returns the content record of a version, and makes it if there is none.

        Returns None if there is no record and model.yaml or the model's file is absent: emulated
        devices need no weights, and absent files cannot be recorded.

        Raises:
            ContentMismatch: The record is damaged.
            Unavailable: The files are being written.
        """
        known = self._records.known(self.folder(key), str(key))
        is_fetched = (self.folder(key) / FETCHED_FOLDER).exists()
        if known is not None or not self._makes_records or is_fetched:
            return known  # what was only fetched in part must not be taken for the whole
        try:
            manifest = self.manifest(key)
        except ModelNotFound:
            return None
        if not self._inside(key, manifest.file).is_file():
            return None
        return self._records.known_or_made(self.folder(key), str(key), manifest.precision)

    def content_digest(self, key: ModelKey) -> str:
        """Returns the digest of a version's content; empty if it has no record."""
        record = self.content(key)
        return record.digest if record is not None else ""

    def is_recorded(self, key: ModelKey) -> bool:
        """Returns True if a content record lies in the version's folder."""
        return (self.folder(key) / RECORD_FILE).exists()

    def record_content(self, key: ModelKey) -> ContentRecord:
        """Records the files of a version as they are now, whatever was recorded before.

        Raises:
            ModelNotFound: There is no such version.
            InvalidInput: The version was fetched from peers, perhaps not all of it.
            Unavailable: The files are being written.
        """
        if (self.folder(key) / FETCHED_FOLDER).exists():
            text = "was fetched from the cluster: its record is that of the original"
            raise InvalidInput(str(key), text)
        path = self.folder(key) / MANIFEST_FILE
        try:
            document = yaml.safe_load(read_yaml_text(path, f"{key}/{MANIFEST_FILE}"))
        except FileNotFoundError:
            raise ModelNotFound(f"model {key} is not in the repository") from None
        precision = _manifest_of(key, document).precision
        return self._records.make(self.folder(key), str(key), precision)

    def enter_derived(self, key: ModelKey, folder: str) -> None:
        """Enters files of a subfolder, made here from the other files, into the content record."""
        root = self.folder(key)
        files = [p.relative_to(root).as_posix() for p in (root / folder).rglob("*") if p.is_file()]
        self._records.update(root, str(key), files, derived=True)

    def reading(self, key: ModelKey) -> VerifiedReading:
        """Returns a context that checks the files of a version while they are read.

        Raises:
            ContentMismatch: The record is damaged.
        """
        record, supplier = self.content(key), self.supply(key)
        return VerifiedReading(str(key), self.folder(key), record, digests(), supplier)

    def _reading_known(self, key: ModelKey) -> VerifiedReading:
        """Returns such a context without making a record: the files may not be complete yet."""
        folder = self.folder(key)
        return VerifiedReading(str(key), folder, self._records.known(folder, str(key)), digests())

    def block_table(self, key: ModelKey) -> BlockTable:
        """Returns the table of the model's blocks.

        Of the model file only the hash is used: the recorded one if there is a record, else that of
        the file.

        Raises:
            ModelNotFound: The model does not exist, or has not been cut yet.
            InvalidInput: The table is malformed or was made from another model file.
        """
        where = f"{key}/{BLOCKS_FILE}"
        table = table_of_document(self._made_document(key, BLOCKS_FILE, "prepared"), where)
        if self._recorded_hash(key, table.model_hash) != table.model_hash:
            raise InvalidInput(
                f"{where}.model_hash", "is of another model file: prepare the model again"
            )
        return table

    def decoder_table(self, key: ModelKey) -> DecoderTable:
        """Returns the table of sizes of a model that generates text.

        Raises:
            ModelNotFound: The model was not imported as one that generates text.
            InvalidInput: The file is malformed.
        """
        document = self._made_document(key, DECODER_FILE, "imported")
        return decoder_of_document(document, f"{key}/{DECODER_FILE}")

    def write_decoder_table(self, key: ModelKey, table: DecoderTable) -> None:
        """Writes `decoder.json`, and enters it into the content record."""
        document = document_of_decoder(table)
        self._write(key, DECODER_FILE, json.dumps(document, indent=1) + "\n")

    def source(self, key: ModelKey) -> SourceRecord | None:
        """Returns where a version came from; None if nobody wrote it down."""
        try:
            content = read_bounded(self.folder(key) / SOURCE_FILE, LARGEST_JSON_BYTES)
        except (OSError, InvalidInput):
            return None
        return decode_source(content)

    def write_source(self, key: ModelKey, source: SourceRecord) -> None:
        """Writes `source.json`, and enters it into the content record."""
        write_file(self.folder(key) / SOURCE_FILE, encode_source(source))
        self._records.update(self.folder(key), str(key), [SOURCE_FILE], derived=True)

    def example_shapes(self, key: ModelKey) -> ExampleShapes:
        """Returns, per boundary, the shapes its tensors had in the one-row probing run.

        They stand in for sizes that are free in the table. Without them every free size counts as
        1.
        """
        where = f"{key}/{BLOCKS_FILE}"
        document = self._made_document(key, BLOCKS_FILE, "prepared")
        table = table_of_document(document, where)
        shapes = []
        for i, boundary in enumerate(table.boundaries):
            row = []
            for j, spec in enumerate(boundary.tensors):
                entry = document["boundaries"][i]["tensors"][j]
                named = f"{where}.boundaries[{i}].tensors[{j}].example_shape"
                given = entry.get("example_shape", [max(1, size) for size in spec.shape])
                if not isinstance(given, list) or len(given) != len(spec.shape):
                    raise InvalidInput(named, "is not a shape of the tensor's rank")
                row.append(converted(given, tuple[Count, ...], named))
            shapes.append(tuple(row))
        return tuple(shapes)

    def profile(self, key: ModelKey) -> ModelProfile | None:
        """Returns the model's cost on each class of device, None if nobody has profiled it.

        Raises:
            ModelNotFound: The model has not been cut into blocks.
            InvalidInput: The profile is malformed, or of another model file or other blocks than
                the table beside it; the field names file and key.
        """
        where = f"{key}/{PROFILE_FILE}"
        try:
            document = self._document(key, PROFILE_FILE)
        except FileNotFoundError:
            return None
        profile = parse_profile(document, where)
        table = self.block_table(key)
        if profile.model_hash != table.model_hash:
            raise InvalidInput(
                f"{where}.model_hash", "is of another model file: profile the model again"
            )
        if not profile.is_cut_like(table):
            raise InvalidInput(
                f"{where}.blocks", f"are not those of {BLOCKS_FILE}: profile the model again"
            )
        return profile

    def write_profile(self, key: ModelKey, profile: ModelProfile) -> None:
        """Writes `profile.json`, replacing the present one."""
        write_file(self.folder(key) / PROFILE_FILE, json.dumps(profile_document(profile)) + "\n")

    def write_manifest(self, manifest: ModelManifest) -> None:
        """Writes `model.yaml`, and makes the folder if needed."""
        self._inside(manifest.key, manifest.file)
        document = {
            "platform": manifest.platform,
            "file": manifest.file,
            "slo_ms": manifest.slo_ns / NANOSECONDS_PER_MILLISECOND,
            "max_batch": manifest.max_batch,
            "float16_boundaries": manifest.float16_boundaries,
        }
        if manifest.dimensions:
            document["dimensions"] = dict(manifest.dimensions)
        if manifest.text_tokens:
            document["text_tokens"] = manifest.text_tokens
        if manifest.generates_text:
            document["precision"] = manifest.precision
            if manifest.target != "both":
                document["target"] = manifest.target
            document["session_tokens"] = manifest.session_tokens
            if manifest.objectives is not None:
                for name, slo_ns in manifest.objectives.named().items():
                    document[name] = slo_ns / NANOSECONDS_PER_MILLISECOND
            if manifest.cache_oversubscription is not None:
                document["cache_oversubscription"] = manifest.cache_oversubscription
            if manifest.packing is not None:
                document["packing"] = manifest.packing
            for name in _PARSERS:
                if getattr(manifest, name) != RECOGNISED:
                    document[name] = getattr(manifest, name)
            engine = {name: getattr(manifest, name) for name in _ENGINE_KEYS}
            document |= {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in engine.items()
                if value
            }
            if manifest.adapters:
                document["adapters"] = dict(manifest.adapters)
        _manifest_of(manifest.key, document)
        text = yaml.safe_dump(document, sort_keys=False)
        self._write(manifest.key, MANIFEST_FILE, text)

    def write_block_table(
        self, key: ModelKey, table: BlockTable, examples: ExampleShapes | None = None
    ) -> None:
        """Writes `blocks.json`, with the example shapes of every boundary if given."""
        document = document_of_table(table)
        for entry, shapes in zip(document["boundaries"], examples or (), strict=False):
            for tensor, shape in zip(entry["tensors"], shapes, strict=True):
                tensor["example_shape"] = list(shape)
        text = json.dumps(document, indent=1)
        self._write(key, BLOCKS_FILE, text + "\n")

    def _made_document(self, key: ModelKey, name: str, made: str) -> Any:
        """Returns the JSON document in a file that every model which was `made` has."""
        try:
            return self._document(key, name)
        except FileNotFoundError:
            text = (
                f"model {key} has no {name} in the model repository of this machine: it was "
                f"not {made}, or not copied here"
            )
            raise ModelNotFound(text) from None

    def _document(self, key: ModelKey, name: str) -> Any:
        content = self._json_bytes(key, name)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{key}/{name}", f"is not JSON: {error}") from None

    def _json_bytes(self, key: ModelKey, name: str) -> bytes:
        path = self.folder(key) / name
        if name == PROFILE_FILE:  # measured later and repeatedly, so no part of the content
            return read_bounded(path, LARGEST_JSON_BYTES, f"{key}/{name}")
        if not path.exists():
            raise FileNotFoundError(path)
        with self._reading_known(key) as reading:
            reading.begin(path)
            return read_bounded(path, LARGEST_JSON_BYTES, f"{key}/{name}")

    def _recorded_hash(self, key: ModelKey, unknown: str) -> str:
        """Returns the SHA-256 of the model's file; `unknown` where the file is absent."""
        path = self.model_file(key)
        record = self._records.known(self.folder(key), str(key))
        if record is not None:
            file = record.files.get(self.manifest(key).file)
            return file.sha256 if file is not None else unknown
        return self.model_hash(key) if path.exists() else unknown

    def _write(self, key: ModelKey, name: str, text: str) -> None:
        write_file(self.folder(key) / name, text)
        self._records.update(self.folder(key), str(key), [name])

    def _inside(self, key: ModelKey, file: str) -> Path:
        folder = self.folder(key)
        path = folder / file
        if not file or not path.resolve().is_relative_to(self.root.resolve()):
            raise InvalidInput(f"{key}/{MANIFEST_FILE}.file", f"{file!r} is outside the repository")
        return path


def manifest_in(reading: VerifiedReading, key: ModelKey) -> ModelManifest:
    """Returns the manifest of a version whose files are being read.

    Raises:
        FileNotFoundError: The version has no manifest.
        InvalidInput: The file is no manifest; the field names file and key.
    """
    path = reading.folder / MANIFEST_FILE
    if path.exists() or reading.lists(path):
        reading.begin(path)
    try:
        document = yaml.safe_load(read_yaml_text(path, f"{key}/{MANIFEST_FILE}"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{key}/{MANIFEST_FILE}", f"is not YAML: {error}") from None
    return _manifest_of(key, document)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns words for the end of an error about an unknown name; empty if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _manifest_of(key: ModelKey, document: Any) -> ModelManifest:
    where = f"{key}/{MANIFEST_FILE}"
    given = converted(document, _Manifest, where)
    for name, known in _CHOICES.items():
        value = getattr(given, name)
        if value not in known:
            raise InvalidInput(f"{where}.{name}", f"{value!r} is none of {', '.join(known)}")
    for name in _ONLY_OF_DECODERS:
        if name in document and given.platform not in LANGUAGE_PLATFORMS:
            raise InvalidInput(f"{where}.{name}", "is only for models that generate text")
    for name in _NOT_OF_DECODERS:
        if name in document and given.platform in LANGUAGE_PLATFORMS:
            raise InvalidInput(f"{where}.{name}", "is not for models that generate text")
    if given.engine_file and (given.platform != "decoder" or not _is_gguf(given.engine_file)):
        text = "is for a GGUF file beside the blocks of a decoder: other platforms have `file`"
        raise InvalidInput(f"{where}.engine_file", text)
    if given.platform == "llama_server" and not _is_gguf(given.file):
        raise InvalidInput(f"{where}.file", "is no GGUF file, which llama-server needs")
    if given.adapters and given.platform != "vllm":
        text = "are for models that vLLM alone serves (platform: vllm)"
        raise InvalidInput(f"{where}.adapters", text)
    for name in given.adapters:
        if not _ADAPTER.fullmatch(name):
            text = f"{name[:80]!r} is no name: letters, digits, '.', '_' and '-', a letter first"
            raise InvalidInput(f"{where}.adapters", text)
    objectives = TokenObjectives(
        *(_nanoseconds(getattr(given, name)) if name in document else 0 for name in OBJECTIVE_KEYS)
    )
    packing = packing_goal(given.packing, f"{where}.packing") if "packing" in document else None
    return ModelManifest(
        key=key,
        platform=given.platform,
        file=given.file,
        slo_ns=_nanoseconds(given.slo_ms),
        max_batch=given.max_batch,
        float16_boundaries=given.float16_boundaries,
        precision=given.precision,
        session_tokens=given.session_tokens,
        objectives=objectives if objectives != TokenObjectives() else None,
        cache_oversubscription=given.cache_oversubscription or None,
        packing=packing,
        dimensions=tuple(given.dimensions.items()),
        text_tokens=given.text_tokens,
        target=given.target,
        tool_parser=given.tool_parser,
        reasoning_parser=given.reasoning_parser,
        engine_file=given.engine_file,
        engine_arguments=given.engine_arguments,
        min_version=given.min_version,
        adapters=tuple(given.adapters.items()),
    )


def _is_gguf(file: str) -> bool:
    return file.endswith(".gguf") and "/" not in file


def _nanoseconds(milliseconds: float) -> Nanoseconds:
    return max(1, round(milliseconds * NANOSECONDS_PER_MILLISECOND))


def _version_order(version: str) -> tuple[int, int, str]:
    """Returns a sort key that puts numbers before names, and orders numbers by value.

    For example, "2" < "10" < "beta".
    """
    return (0, int(version), "") if version.isdecimal() else (1, 0, version)


def write_file(path: Path, text: str) -> None:
    """Replaces a file atomically, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text.encode())
