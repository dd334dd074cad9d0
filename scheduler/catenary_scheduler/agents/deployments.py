"""The models that a cluster is to serve, with what the repository says about them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from catenary_scheduler.planning import DeployedModel
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.stored import DeploymentSpec
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.profile import ModelProfile
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import CatenaryError, InvalidInput, ModelNotFound
from catenary_services.log import get_logger
from catenary_services.models.model_repository import ModelRepository

_log = get_logger(__name__)
_CONTENT_S = 1.0
"""Longest time for which a deployment waits for the digest of a model, in seconds."""
SESSIONS_PER_CHAIN = 16
"""Largest number of simultaneous sessions of a chain, for models that name none."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model that is served, with everything known about it."""

    spec: DeploymentSpec
    manifest: ModelManifest
    table: BlockTable
    decoder: DecoderTable | None = None
    """Blocks and caches of a model that generates text, from which `table` is derived; None for
    other models."""
    profile: ModelProfile | None = None
    """Cost of its blocks on each class of device; None if nobody measured or estimated it."""
    file_bytes: int = 0
    """Size of the model's file in bytes; 0 if it is not in this repository."""
    usual_packing: PackingGoal = "off"
    """Packing goal used where neither spec nor manifest name one."""
    content: str = ""
    """Digest of the model's content; empty if this repository does not have all of it."""

    @property
    def block_weight_bytes(self) -> tuple[int, ...]:
        """Memory of each block in bytes; empty if it is not known."""
        return self.profile.block_weight_bytes if self.profile is not None else ()

    @property
    def assumed_block_bytes(self) -> tuple[int, ...]:
        """Memory of each block in bytes; without a profile, even shares of the model's file."""
        if self.block_weight_bytes or not self.file_bytes:
            return self.block_weight_bytes
        return (-(-self.file_bytes // self.table.blocks),) * self.table.blocks

    @property
    def slo_ns(self) -> Nanoseconds:
        """Deadline of a request that names none, in nanoseconds."""
        return self.spec.slo_ns or self.manifest.slo_ns

    @property
    def packing(self) -> PackingGoal:
        """Goal for which sessions of the model are moved; "off" if it generates no text."""
        if self.decoder is None:
            return "off"
        return self.spec.packing or self.manifest.packing or self.usual_packing

    @property
    def max_batch(self) -> int:
        """Largest batch to plan for; of a model that generates text, most sessions per chain."""
        limit = self.spec.max_batch or self.manifest.max_batch
        if self.decoder is not None and not self.spec.max_batch and limit == 1:
            return SESSIONS_PER_CHAIN  # a manifest that names no number has 1
        return limit if self.table.batched else 1

    def for_planning(self) -> DeployedModel:
        return DeployedModel(
            key=self.manifest.key,
            table=self.table,
            slo_ns=self.slo_ns,
            max_batch=self.max_batch,
            float16_boundaries=self.manifest.float16_boundaries,
            partitions=self.spec.partitions,
            decoder=self.decoder,
            session_tokens=self.manifest.session_tokens if self.decoder is not None else 0,
            objectives=self.manifest.objectives,
            cache_oversubscription=self.manifest.cache_oversubscription,
            packing=self.packing,
            block_bytes=self.assumed_block_bytes,
            precision=self.manifest.precision,
            target=self.manifest.target,
            engines=self.manifest.engines,
            has_blocks=self.manifest.has_blocks,
        )


class Deployments:
    """All deployed models; the repository is read off the event loop.

    Args:
        repository: The repository of models.
        packing: Packing goal of models that name none.
    """

    table = RedisTable.DEPLOYMENTS

    def __init__(self, repository: ModelRepository, packing: PackingGoal = "off") -> None:
        self._repository = repository
        self._packing = packing
        self.ready: dict[ModelKey, Deployment] = {}
        self.problems: dict[str, str] = {}
        """Reasons why wanted models cannot be served, by reference ("name" or "name:version")."""
        self.profile_problems: dict[ModelKey, str] = {}
        """Reasons why existing profiles of models cannot be used."""
        self._wanted: dict[str, DeploymentSpec] = {}
        self._withdrawn: dict[str, float] = {}
        """Moments at which models were undeployed, in seconds since 1970, by name and version."""
        self._recording: dict[ModelKey, asyncio.Future[str]] = {}
        """Computations of digests that are still running."""

    def resolve(self, name: str, version: str) -> ModelKey | None:
        """Returns a deployed model, or None; an empty `version` stands for the highest one."""
        if version:
            key = ModelKey(name, version)
            return key if key in self.ready else None
        found = [key for key in self.ready if key.name == name]
        return max(found, key=lambda key: (len(key.version), key.version), default=None)

    async def want(self, references: Iterable[str]) -> None:
        """Deploys models by reference; one that fails is kept as a problem and retried."""
        for reference in references:
            self._wanted.setdefault(reference, DeploymentSpec())
        await self.retry()

    async def want_own(self, references: Iterable[str], started_s: float) -> None:
        """Deploys the models of this process's settings, except those undeployed since it started.

        Args:
            references: The models.
            started_s: The start of the process, in seconds since 1970.
        """
        gone = {name for name, at_s in self._withdrawn.items() if at_s >= started_s}
        gone |= {name.partition(":")[0] for name in gone}
        await self.want(each for each in references if each not in gone)

    @property
    def is_empty(self) -> bool:
        """True if no model is deployed, and none is wanted that could not be deployed yet."""
        return not self.ready and not self._wanted

    def withdraw(self, key: ModelKey, now_s: float) -> None:
        """Forgets a model, which is to be served no longer.

        Args:
            key: The model, which is deployed.
            now_s: The moment, in seconds since 1970.
        """
        del self.ready[key]
        self.profile_problems.pop(key, None)
        self._recording.pop(key, None)
        self._withdrawn[str(key)] = now_s

    async def retry(self) -> bool:
        """Tries the models that could not be deployed; True if one of them now is."""
        changed = False
        for reference, spec in list(self._wanted.items()):
            try:
                await self.deploy(reference, spec)
                changed = True
            except (CatenaryError, OSError, ValueError) as error:  # a bad name may raise these
                if self.problems.get(reference) != str(error):
                    _log.warning("model_not_deployed", model=reference, error=str(error))
                self.problems[reference] = str(error)
        return changed

    async def deploy(self, reference: str, spec: DeploymentSpec) -> ModelKey:
        """Deploys "name" or "name:version", or changes the options of its deployment.

        Raises:
            ModelNotFound: The model is not in the repository.
            InvalidInput: The repository's files about it are wrong, or the options do not fit it.
            ContentMismatch: Its files differ from what was recorded.
        """
        found = await self._found(reference)
        key, table = found.manifest.key, found.table
        content = await self._content_in_time(key)
        if spec == DeploymentSpec() and key in self.ready:
            spec = self.ready[key].spec
        if spec.packing is not None and found.decoder is None:
            raise InvalidInput("packing", f"{key} does not generate text")
        if spec.max_batch < 0 or (spec.partitions or 0) > table.blocks:
            raise InvalidInput("partitions", f"{key} has {table.blocks} blocks")
        self.ready[key] = replace(found, spec=spec, content=content)
        self.problems.pop(reference, None)
        self._wanted.pop(reference, None)
        self._withdrawn.pop(str(key), None)
        return key

    async def find(self, name: str, version: str) -> Deployment:
        """Returns a deployed model, or one of the repository as it would be deployed.

        Raises:
            ModelNotFound: The model is not in the repository.
            InvalidInput: The repository's files about it are wrong.
        """
        key = self.resolve(name, version)
        if key is not None:
            return self.ready[key]
        return await self._found(f"{name}:{version}" if version else name)

    async def _found(self, reference: str) -> Deployment:
        """Returns a model of the repository, without the digest of its content."""
        key, manifest, table, decoder = await asyncio.to_thread(self._read, reference)
        profile = await asyncio.to_thread(self._read_profile, key)
        size = await asyncio.to_thread(self._size_of, key)
        spec = DeploymentSpec()
        return Deployment(spec, manifest, table, decoder, profile, size, self._packing)

    async def refresh_profiles(self) -> None:
        """Reads the profiles again: they may have been measured since the models were deployed."""
        for key in list(self.ready):
            profile = await asyncio.to_thread(self._read_profile, key)
            if key in self.ready:
                self.ready[key] = replace(self.ready[key], profile=profile)

    async def restore(self, stored: Mapping[str, DeploymentSpec]) -> None:
        """Deploys what an earlier scheduler had deployed."""
        for reference, spec in stored.items():
            if spec.undeployed_s:
                self._withdrawn[reference] = spec.undeployed_s
            else:
                self._wanted[reference] = spec
        await self.retry()

    def records(self) -> dict[str, str | None]:
        """Returns the records that Redis keeps. Models with a problem are wanted too."""
        specs = {name: DeploymentSpec(undeployed_s=at_s) for name, at_s in self._withdrawn.items()}
        specs |= self._wanted
        specs |= {str(key): each.spec for key, each in self.ready.items()}
        return {name: encode_document(spec) for name, spec in specs.items()}

    def _read_profile(self, key: ModelKey) -> ModelProfile | None:
        """Returns a model's profile; None, with the reason noted, if it is absent or wrong."""
        self.profile_problems.pop(key, None)
        try:
            return self._repository.profile(key)
        except (CatenaryError, OSError) as error:
            self.profile_problems[key] = str(error)
            _log.warning("profile_unreadable", model=str(key), error=str(error))
            return None

    def _size_of(self, key: ModelKey) -> int:
        try:
            return self._repository.model_file(key).stat().st_size
        except OSError:
            return 0

    async def _content_in_time(self, key: ModelKey) -> str:
        """Returns the digest of a model's content; empty if computing it takes long.

        The first time, all of the model is read. A change of leader must not wait for that, so the
        digest is entered once it is known; until then the content that most agents have counts.
        """
        recording = self._recording.pop(key, None)
        if recording is None:
            recording = asyncio.ensure_future(asyncio.to_thread(self._content_of, key))
        done, _ = await asyncio.wait({recording}, timeout=_CONTENT_S)
        if done:
            return recording.result()
        _log.info("content_is_read", model=str(key))
        self._recording[key] = recording
        recording.add_done_callback(partial(self._enter_content, key))
        return ""

    def _enter_content(self, key: ModelKey, recording: asyncio.Future[str]) -> None:
        if self._recording.get(key) is not recording:
            return  # a later deployment of the model has the digest
        del self._recording[key]
        if recording.cancelled() or key not in self.ready:
            return
        if (error := recording.exception()) is not None:
            _log.warning("content_unknown", model=str(key), error=str(error))
            return
        self.ready[key] = replace(self.ready[key], content=recording.result())

    def _content_of(self, key: ModelKey) -> str:
        try:
            return self._repository.content_digest(key)
        except OSError as error:
            raise ModelNotFound(f"model {key} cannot be read: {error}") from error

    def _read(
        self, reference: str
    ) -> tuple[ModelKey, ModelManifest, BlockTable, DecoderTable | None]:
        key = self._repository.resolve(reference)
        try:
            manifest = self._repository.manifest(key)
            if manifest.generates_text:
                decoder = self._repository.decoder_table(key)
                return key, manifest, _table_of(decoder), decoder
            return key, manifest, self._repository.block_table(key), None
        except OSError as error:
            raise ModelNotFound(f"model {key} cannot be read: {error}") from error


def _table_of(decoder: DecoderTable) -> BlockTable:
    """Returns a decoder's blocks in the form of other models, without times."""
    hidden = TensorSpec("hidden_states", "FP32", (ANY, decoder.hidden_size))
    boundary = Boundary((hidden,), hidden.nbytes([decoder.hidden_size]))
    return BlockTable(
        decoder.model_hash, True, (boundary,) * (decoder.blocks + 1), (0,) * decoder.blocks
    )
