"""A model from elsewhere becomes a version: listed, checked, fetched, imported in the jail.

What a repository shows is whole: files are fetched below `.downloads`, and the version is made
aside (`catenary_services.models.staging`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from catenary_agent.decoders.importing.adapters import add_adapters
from catenary_agent.decoders.importing.engine_models import import_engine_model, keep_gguf
from catenary_agent.decoders.importing.import_worker import check_config
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.encoders.importing import EncoderOptions, import_encoder, is_encoder
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput, Unavailable
from catenary_services.models.model_repository import ModelRepository
from catenary_services.models.source_record import SOURCE_FORMAT, SourceFileRecord, SourceRecord
from catenary_services.models.staging import staged
from catenaryd.sources.choosing import ChosenFiles, ModelForm, choose
from catenaryd.sources.downloads import Download, sweep
from catenaryd.sources.graph_models import USUAL_SLO_NS, import_graph
from catenaryd.sources.hub import list_hub
from catenaryd.sources.listing import ListedFile, SourceListing, list_folder, revision_of
from catenaryd.sources.room import announcement, check_room, expected, writable
from catenaryd.sources.source_names import ModelSource, SourceKind
from catenaryd.sources.steps import ImportPhase, ImportStep, Tell
from catenaryd.sources.versions import PullOptions, key_of, known_offline

_TRY_S = 1.0
_TRY_BYTES = 8 << 20
_TOLD_S = 0.5
_ENGINE_FORMS = {"vllm": ModelForm.SAFETENSORS, "llama_server": ModelForm.GGUF}


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model that is in the repository, or would be."""

    key: ModelKey
    total_bytes: int
    """Size of its files in the source; 0 if nobody was asked for it."""
    known: bool


def bring(
    repository: ModelRepository, source: ModelSource, options: PullOptions, tell: Tell
) -> PulledModel:
    """Brings a model into the repository, unless the same revision of the source is there.

    Raises:
        CatenaryError: It cannot be brought in; the message names the source or the field.
    """
    if (here := known_offline(repository, source, options)) is not None:
        return _there(here, 0, tell)
    listing = _listed(source, options)
    source = listing.source
    folder, wanted = Path(source.place), source.file
    if source.kind is SourceKind.FILE and folder.is_file():
        folder, wanted = folder.parent, folder.name
    chosen = choose(listing.files, wanted, source.text)
    _check_form(chosen, options)
    if not listing.revision:
        listing = replace(listing, revision=revision_of(chosen.files))
    key, is_there = key_of(repository, listing, options)
    if is_there:
        return _there(key, chosen.total_bytes, tell)
    work = ModelImport(repository, listing, chosen, key, options, tell)
    with writable(repository):
        if listing.transport is None:
            work.take(folder)
        else:
            work.fetch_and_take()
    return PulledModel(key, chosen.total_bytes, known=False)


def _listed(source: ModelSource, options: PullOptions) -> SourceListing:
    if source.kind is SourceKind.FILE:
        return list_folder(source)
    if source.kind is SourceKind.HUB:
        return list_hub(source, options.hub)
    from catenaryd.sources.file_systems import list_file_system

    return list_file_system(source)


def _check_form(chosen: ChosenFiles, options: PullOptions) -> None:
    """Refuses what an engine does not read, before it is fetched."""
    reads = _ENGINE_FORMS.get(options.engine)
    if reads is not None and chosen.form is not reads:
        text = f"{options.engine} reads {reads}, and {chosen.main} is {chosen.form}: name a file"
        raise InvalidInput("engine", text)
    if options.adapters and options.engine != "vllm":
        raise InvalidInput("adapters", "are for models that vLLM alone serves (--engine vllm)")
    if options.keeps_gguf and chosen.form is not ModelForm.GGUF:
        raise InvalidInput("keep_gguf", f"{chosen.main} is no GGUF file")


def _there(key: ModelKey, size: int, tell: Tell) -> PulledModel:
    text = f"{key} is in the repository already"
    tell(ImportStep(ImportPhase.LISTED, text, model=key.name, version=key.version))
    return PulledModel(key, size, known=True)


@dataclass(frozen=True, slots=True)
class ModelImport:
    """The import of chosen files of a source as one version."""

    repository: ModelRepository
    listing: SourceListing
    chosen: ChosenFiles
    key: ModelKey
    options: PullOptions
    tell: Tell

    def take(self, folder: Path) -> None:
        """Imports files that lie in a folder of this machine."""
        self._check_room(0)
        self._announce("")
        if not self.options.dry_run:
            self._make(folder, {})

    def fetch_and_take(self) -> None:
        """Fetches the files, what is left of them, and imports them."""
        files = self.chosen.files
        sweep(self.repository.root, time.time())
        with Download(self.repository.root, self.listing).held() as download:
            self._check_room(download.missing_bytes(files))
            largest = max(files, key=lambda each: each.size)
            rate = download.try_rate(largest, _TRY_S, _TRY_BYTES)
            self._announce(expected(download.missing_bytes(files), rate))
            if not self.options.dry_run:
                self._make(download.files, self._fetch(download))
                download.drop()

    def _check_room(self, missing: int) -> None:
        target = "gpu" if self.options.engine else self.options.target
        check_room(self.repository, missing, self.chosen, target)

    def _announce(self, to_come: str) -> None:
        text = announcement(self.listing, self.chosen, self.key, to_come)
        self._step(ImportPhase.LISTED, text)

    def _step(self, phase: ImportPhase, text: str) -> None:
        key, total = self.key, self.chosen.total_bytes
        self.tell(ImportStep(phase, text, "", 0, total, key.name, key.version))

    def _fetch(self, download: Download) -> dict[str, SourceFileRecord]:
        total = self.chosen.total_bytes
        done = total - download.missing_bytes(self.chosen.files)
        told_s = 0.0

        def came(file: ListedFile, count: int) -> None:
            nonlocal done, told_s
            done = min(total, done + count)
            now_s = time.monotonic()
            if now_s - told_s >= _TOLD_S or done == total:
                told_s = now_s
                self.tell(ImportStep(ImportPhase.FETCHING, "", file.path, done, total))

        # The small files first: a token that is no good, or a model that cannot be served, is
        # found before the large ones.
        records = {}
        for file in sorted(self.chosen.files, key=lambda each: each.size):
            records[file.path] = download.bring(file, came)
            if self.options.engine:
                continue  # it decides itself what it serves
            if file.path == "config.json" and not is_encoder(download.files):
                check_config(download.files, self._decoder_options())
        return records

    def _make(self, folder: Path, files: dict[str, SourceFileRecord]) -> None:
        """Makes the version of the files in a folder, and shows it when it is whole."""
        key, chosen, source = self.key, self.chosen, self.listing.source
        record = SourceRecord(
            SOURCE_FORMAT, source.text, self.listing.revision, source.revision, files
        )
        slo_ns = self.options.slo_ns or USUAL_SLO_NS
        with staged(self.repository, key) as made:
            is_plain = not self.options.engine
            if is_plain and chosen.form is ModelForm.SAFETENSORS and is_encoder(folder):
                import_encoder(made, folder, key, EncoderOptions(slo_ns=slo_ns), self._importing)
            elif chosen.form in (ModelForm.SAFETENSORS, ModelForm.GGUF):
                place = folder / chosen.main if chosen.form is ModelForm.GGUF else folder
                self._make_decoder(made, place)
            else:
                self._importing("cutting it into blocks")
                import_graph(made, folder, chosen, key, slo_ns)
            made.write_source(key, record)
        if self.repository.source(key) != record:
            raise Unavailable(f"{key} was imported by somebody else meanwhile")

    def _make_decoder(self, made: ModelRepository, place: Path) -> None:
        """Makes a model that generates text, of a GGUF file or a folder with safetensors."""
        key, chosen, options = self.key, self.options, self._decoder_options()
        if chosen.engine:
            import_engine_model(made, place, key, chosen.engine, options, self._importing)
            if chosen.adapters:
                add_adapters(made, key, chosen.adapters, copies=chosen.copies)
            return
        import_decoder(made, place, key, options, self._importing)
        if chosen.keeps_gguf:
            keep_gguf(made, key, place, copies=chosen.copies)

    def _importing(self, text: str) -> None:
        self._step(ImportPhase.IMPORTING, text)

    def _decoder_options(self) -> ImportOptions:
        chosen = self.options
        plain = ImportOptions(
            precision=chosen.precision,
            target=chosen.target,
            copies=chosen.copies,
            session_tokens=chosen.session_tokens,
        )
        return replace(plain, slo_ns=chosen.slo_ns) if chosen.slo_ns else plain
