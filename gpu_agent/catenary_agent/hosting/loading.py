"""Loading and unloading of partitions by order of the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from catenary_agent.content import CONTENT, check_content, is_content_as_ordered
from catenary_agent.decoders.loading import DecoderOptions
from catenary_agent.decoders.sampling.grammar_masks import GrammarMasks
from catenary_agent.devices.device_errors import DeviceErrorKind, error_kind_of
from catenary_agent.engine.partitions import LoadedPartition
from catenary_agent.engine.reporting import FixedMessage, OutgoingMessage, is_retryable
from catenary_agent.engines.batcher import EngineBatcher
from catenary_agent.engines.executor import EngineExecutor
from catenary_agent.engines.loading import EngineHost, load_engine
from catenary_agent.executors.loading import load_executor
from catenary_agent.generation.loop.loading import DecoderLoader
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_agent.generation.state.reporting import key_message
from catenary_agent.hosting.canary import (
    Answer,
    Canary,
    CanaryKind,
    OnThread,
    decoder_answer,
    part_answer,
)
from catenary_agent.hosting.measuring import measure_between_batches
from catenary_agent.supervision.steps import StepKind
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import CatenaryError, InternalError, InvalidInput, PlanInfeasible
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from catenary_agent.decoders.base import CacheLayout, DecoderExecutor
    from catenary_agent.engine.engine import BatchEngine
    from catenary_agent.executors.base import Executor
    from catenary_agent.executors.device import Device
    from catenary_agent.generation.loop.engine import GenerationEngine
    from catenary_services.grammar.vocabulary import TokenVocabulary
    from catenary_services.models.model_repository import ModelRepository
    from catenary_services.store.store import ModelStore

_log = get_logger("catenary_agent.hosting.loading")
_MAX_BATCH = 4_096
_LIMIT, _MEMORY = "limit", "memory"
"""A key in an error's details: the limit that was exceeded."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The source of partitions, and the device they are loaded onto."""

    repository: ModelRepository
    device: Device
    threads: int
    memory_bytes: int
    decoders: DecoderOptions = field(default_factory=DecoderOptions)
    canary_class: str | None = None
    """The device class within which canary answers are compared; None if they are not."""
    engine_cache: Path | None = None
    """The folder of TensorRT's engines; None if TensorRT is not used."""
    store: ModelStore | None = None
    """The store that fetches missing files of models; None if all must be here."""
    engine: EngineHost | None = None
    """The parts that engines need, if language models are served by one; None if they are not."""


class PartitionLoader:
    """Carries out LoadPartition and UnloadPartition, one load at a time.

    Invariant: every LoadPartition is answered by PartitionLoaded or PartitionFailed. An order for a
    partition that is being loaded is answered together with the first one.
    """

    def __init__(
        self,
        engine: BatchEngine,
        generation: GenerationEngine,
        host: LoadTarget,
        tell: Callable[[OutgoingMessage], None],
    ) -> None:
        """Loads into `engine`, and decoders into `generation`; answers through `tell`."""
        self._engine = engine
        self._generation = generation
        self._decoders = DecoderLoader(
            generation,
            self._open_decoder,
            self._check_fits,
            self._check_decoder,
            self._batcher_for,
        )
        self._host = host
        self._tell = tell
        self._turn = asyncio.Lock()
        self._loading: dict[PartitionKey, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_loading(self) -> bool:
        """True while an ordered partition is not loaded yet."""
        return bool(self._loading)

    @property
    def models(self) -> set[ModelKey]:
        """The models of which something is loaded, or being loaded."""
        engine, decoders = self._engine.partitions, self._generation.decoders
        return {each.key.model for each in (*engine, *decoders)} | {
            key.model for key in self._loading
        }

    def load(self, order: scheduler_pb2.LoadPartition) -> None:
        """Begins to load, or answers at once if the partition is here as ordered."""
        key = key_of(order.key)
        if key in self._loading:
            return
        here = self._here(key, order)
        if here is not None:
            self._tell(FixedMessage(scheduler_pb2.AgentMessage(partition_loaded=here)))
            return
        task = asyncio.get_running_loop().create_task(self._load(key, order))
        self._loading[key] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def unload(self, order: scheduler_pb2.UnloadPartition) -> None:
        """Accepts no more batches for a partition, which is closed when its last use ends."""
        key = key_of(order.key)
        task = self._loading.pop(key, None)
        if task is not None:
            task.cancel()
            is_wanted = any(each.model == key.model for each in self._loading)
            if self._host.store is not None and not is_wanted:
                self._host.store.abandon(key.model)
        self._engine.partitions.retire(key)
        self._generation.retire_decoder(key)

    def describe_all(self) -> list[scheduler_pb2.PartitionLoaded]:
        """Returns every loaded partition, for the hello to a scheduler."""
        decoders = [loaded.described() for loaded in self._generation.decoders]
        return [*(described(loaded) for loaded in self._engine.partitions), *decoders]

    async def close(self) -> None:
        """Cancels all loads in progress. Idempotent."""
        if self._host.engine is not None:
            self._host.engine.stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _here(
        self, key: PartitionKey, order: scheduler_pb2.LoadPartition
    ) -> scheduler_pb2.PartitionLoaded | None:
        """Returns the description of the partition if it is here as ordered, else None."""
        if order.HasField("cache"):
            decoder = self._generation.decoders.get(key)
            is_here = decoder is not None and self._decoders.is_as_ordered(decoder, order)
            return decoder.described() if decoder is not None and is_here else None
        loaded = self._engine.partitions.get(key)
        is_here = loaded is not None and _is_as_ordered(loaded, order)
        return described(loaded) if loaded is not None and is_here else None

    async def _load(self, key: PartitionKey, order: scheduler_pb2.LoadPartition) -> None:
        async with self._turn:
            try:
                if order.HasField("cache"):
                    told = (await self._decoders.bring_in(key, order)).described()
                else:
                    told = described(await self._bring_in(key, order))
            except CatenaryError as error:
                _log.warning("partition_failed", partition=str(key), reason=error.message)
                self._tell(_failed(order, error))
            except Exception as failure:
                _log.exception("partition_failed", partition=str(key))
                self._tell(_failed(order, _told(failure)))
            else:
                _log.info("partition_loaded", partition=str(key), **_times(told))
                self._tell(FixedMessage(scheduler_pb2.AgentMessage(partition_loaded=told)))
            finally:
                if self._loading.get(key) is asyncio.current_task():
                    del self._loading[key]

    async def _bring_in(
        self, key: PartitionKey, order: scheduler_pb2.LoadPartition
    ) -> LoadedPartition:
        if not 0 < order.max_batch <= _MAX_BATCH:
            raise InvalidInput("max_batch", f"{order.max_batch}; 1 to {_MAX_BATCH} are possible")
        present = self._engine.partitions.get(key)
        if present is not None:
            check_content(f"what is loaded of {key.model}", present.content, order)
        if present is not None and present.float16_boundaries == order.float16_boundaries:
            return await self._enlarge(present, order.max_batch)
        # A thread cannot be cancelled: `shield` lets it finish, and its executor is closed then.
        work = partial(self._open, key, order)
        steps = self._engine.steps
        opening = asyncio.ensure_future(asyncio.to_thread(steps.run, work, StepKind.LOADING, key))
        try:
            executor, content = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_late)
            raise
        try:
            self._check_memory(executor)
            compute_ns = await measure_between_batches(
                executor, order.max_batch, self._engine.on_compute_thread
            )
            await self._check_answer(executor, content, order)
        except BaseException:
            # A measurement may still run; the executor is closed behind it on the same thread.
            self._engine.on_compute_thread(lambda: _close(executor))
            raise
        pads = self._host.repository.manifest(key.model).text_tokens > 0
        loaded = LoadedPartition(
            executor,
            order.float16_boundaries,
            order.max_batch,
            compute_ns,
            content,
            pads,
            executor.ends.units,
            any_thread=not executor.is_tied_to_thread,
        )
        self._engine.partitions.add(loaded)
        return loaded

    async def _check_answer(
        self, executor: Executor, content: str, order: scheduler_pb2.LoadPartition
    ) -> None:
        """Runs the canary test of a part; see `_check_canary`."""
        precision = "float16" if order.float16_boundaries else "fp32"
        if self._host.device.kind == "cuda":
            precision = "cuda"
        ask = partial(part_answer, executor)
        await self._check_canary(executor, precision, content, ask, self._engine.on_compute_thread)

    async def _check_decoder(self, executor: DecoderExecutor, content: str) -> None:
        """Runs the canary test of decoder blocks; see `_check_canary`. Engines show no logits."""
        if isinstance(executor, EngineExecutor):
            return
        precision = self._host.repository.manifest(executor.key.model).precision
        if type(executor).__name__ == "TorchDecoder" and self._host.device.kind == "cuda":
            precision = "cuda" if precision == "fp32" else f"cuda-{precision}"
        ask = partial(decoder_answer, executor)
        await self._check_canary(executor, precision, content, ask, self._generation.on_thread)

    async def _check_canary(
        self,
        executor: Executor | DecoderExecutor,
        precision: str,
        content: str,
        ask: Callable[[], Answer],
        on_thread: OnThread,
    ) -> None:
        """Compares an answer with that of others of the executor's kind, if canaries are on.

        Raises:
            CanaryFailed: The executor computes something else than others of its kind.
        """
        host, key = self._host, executor.key
        if host.canary_class is None or host.device.kind == "emulated":
            return
        kind = CanaryKind(type(executor).__name__, host.canary_class, precision, content)
        await Canary(host.repository.folder(key.model)).check(key, kind, ask, on_thread)

    async def _enlarge(self, present: LoadedPartition, max_batch: int) -> LoadedPartition:
        """Measures a loaded partition for larger batches."""
        self._engine.partitions.hold(present)
        try:
            present.compute_ns = await measure_between_batches(
                present.executor, max_batch, self._engine.on_compute_thread
            )
            present.max_batch = max_batch
        finally:
            self._engine.partitions.let_go(present)
        return present

    def _open(self, key: PartitionKey, order: scheduler_pb2.LoadPartition) -> tuple[Executor, str]:
        host = self._host
        content = self._content_of(key.model, order)
        table = host.repository.block_table(key.model)
        if order.block_table_hash and order.block_table_hash != table.model_hash:
            raise PlanInfeasible(
                f"{key.model} is cut differently here: "
                f"{table.model_hash[:12]}, the plan is for {order.block_table_hash[:12]}"
            )
        executor = load_executor(
            host.repository,
            key,
            device=host.device,
            float16_boundaries=order.float16_boundaries,
            threads=host.threads,
            engine_cache=host.engine_cache,
        )
        return executor, content

    def _open_decoder(
        self, key: PartitionKey, layout: CacheLayout, order: scheduler_pb2.LoadPartition
    ) -> tuple[DecoderExecutor, str]:
        work = partial(self._read_decoder, key, layout, order)
        return self._engine.steps.run(work, StepKind.LOADING, key)

    def _read_decoder(
        self, key: PartitionKey, layout: CacheLayout, order: scheduler_pb2.LoadPartition
    ) -> tuple[DecoderExecutor, str]:
        from catenary_agent.decoders.loading import load_decoder, runtime_of

        host, model_hash = self._host, order.block_table_hash
        content = self._content_of(key.model, order)
        table = host.repository.decoder_table(key.model)
        if model_hash not in ("", table.model_hash):
            raise PlanInfeasible(
                f"{key.model} is another model here: "
                f"{table.model_hash[:12]}, the plan is for {model_hash[:12]}"
            )
        choice = host.decoders
        runtime = runtime_of(host.device, choice) or ""
        held = table.held_by(runtime, host.repository.manifest(key.model).precision)
        # Only the caches are known before anything is read; `DecoderLoader` checks the whole later.
        self._check_fits(key, held.slot_bytes(layout.memory_tokens))
        if host.engine is not None:
            return load_engine(host.repository, key, layout, host.engine), content
        executor = load_decoder(
            host.repository,
            key,
            host.device,
            layout,
            host.threads,
            choice.library,
            choice.numbers,
            self._generation.chunk_tokens,
        )
        if key.last_block == table.blocks and host.device.kind != "emulated":
            # Brought in while there are peers; it is parsed for the first answer with a grammar.
            with host.repository.reading(key.model) as reading:
                if reading.lists(tokenizer := reading.folder / "tokenizer.json"):
                    reading.begin(tokenizer, first=True)
        return executor, content

    def _batcher_for(self, executor: DecoderExecutor) -> PartitionBatcher:
        """Returns the queues in front of an executor."""
        if isinstance(executor, EngineExecutor):
            return EngineBatcher(executor)
        return PartitionBatcher(executor, masks=self._masks_for(executor))

    def _masks_for(self, executor: DecoderExecutor) -> GrammarMasks | None:
        """Returns the masks of a partition that samples tokens; an emulated one makes them up."""
        key, table, host = executor.key, executor.table, self._host
        if key.last_block != table.blocks or host.device.kind == "emulated":
            return None

        def read() -> TokenVocabulary:
            from catenary_services.grammar.vocabulary import TokenVocabulary

            with host.repository.reading(key.model) as reading:
                return TokenVocabulary.read(reading, table.vocabulary_size, table.end_token_ids)

        return GrammarMasks(read, self._generation.grammar_compiled)

    def _content_of(self, model: ModelKey, order: scheduler_pb2.LoadPartition) -> str:
        """Returns the content digest of this machine's copy of a model.

        Where there is no copy, one is begun: its record and small files are fetched.

        Raises:
            ContentMismatch: It is not the one that was ordered.
            Unavailable: There is none, and it cannot be fetched.
        """
        if self._host.store is not None:
            self._host.store.prepare(model, order.content_digest, order.sources)
        content = self._host.repository.content_digest(model)
        check_content(f"the copy of {model}", content, order)
        return content

    def _check_memory(self, executor: Executor) -> None:
        old = self._engine.partitions.get(executor.key)
        replaced = old.executor.memory_bytes if old is not None else 0
        self._check_fits(executor.key, executor.memory_bytes - replaced)

    def _check_fits(self, key: PartitionKey, more_bytes: int) -> None:
        """Raises PlanInfeasible unless `more_bytes` more than now fit into memory."""
        held = self._engine.partitions.memory_bytes + self._generation.decoders.memory_bytes
        if more_bytes > 0 and held + more_bytes > self._host.memory_bytes:
            raise PlanInfeasible(
                f"{key} does not fit: {held + more_bytes} of {self._host.memory_bytes} bytes",
                details={_LIMIT: _MEMORY},
            )


def key_of(key: scheduler_pb2.PartitionKey) -> PartitionKey:
    """Returns the domain type of a partition's key."""
    return PartitionKey(ModelKey(key.model, key.model_version), key.first_block, key.last_block)


def described(loaded: LoadedPartition) -> scheduler_pb2.PartitionLoaded:
    """Returns the message that describes a loaded partition to the scheduler."""
    return scheduler_pb2.PartitionLoaded(
        key=key_message(loaded.key),
        memory_bytes=loaded.executor.memory_bytes,
        compute_ns=loaded.compute_ns,
        content_digest=loaded.content,
        max_batch=loaded.max_batch,
    )


def _times(told: scheduler_pb2.PartitionLoaded) -> dict[str, object]:
    """Returns the measured times in nanoseconds, for the log."""
    if not told.HasField("generation"):
        return {"compute_ns": list(told.compute_ns)}
    cost = told.generation
    return {"decode_ns": cost.decode_ns, "prefill_token_ns": cost.prefill_token_ns}


def _is_as_ordered(loaded: LoadedPartition, order: scheduler_pb2.LoadPartition) -> bool:
    return (
        is_content_as_ordered(loaded.content, order)
        and loaded.float16_boundaries == order.float16_boundaries
        and loaded.max_batch >= order.max_batch
    )


def _told(failure: Exception) -> CatenaryError:
    """Returns the error that the scheduler is told of an unexpected exception."""
    if error_kind_of(failure) is DeviceErrorKind.MEMORY:
        return PlanInfeasible("the device ran out of memory", details={_LIMIT: _MEMORY})
    return InternalError("the partition could not be loaded")


def _failed(order: scheduler_pb2.LoadPartition, error: CatenaryError) -> FixedMessage:
    failure = common_pb2.Failure(
        reason=error.reason, message=error.message, retryable=is_retryable(error)
    )
    return FixedMessage(
        scheduler_pb2.AgentMessage(
            partition_failed=scheduler_pb2.PartitionFailed(
                key=order.key,
                failure=failure,
                out_of_memory=error.details.get(_LIMIT) == _MEMORY,
                content_digest=error.details.get(CONTENT, ""),
            )
        )
    )


def _close(executor: Executor) -> int:
    executor.close()
    return 0


def _close_late(opening: asyncio.Future[tuple[Executor, str]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()
