"""Starts the engine of a model: checks of files and version, the process, its room, its times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from catenary_agent.decoders.model_files.description import read_object
from catenary_agent.decoders.model_files.quantisation import QuantisedLayout
from catenary_agent.engines.child import EngineChild, StartLimits
from catenary_agent.engines.executor import EngineExecutor
from catenary_agent.engines.llama_server import LlamaServerProtocol, llama_server_command
from catenary_agent.engines.missing_tokens import MissingTokens, vocabulary_bytes
from catenary_agent.engines.requests import EngineBooking
from catenary_agent.engines.rounds import EngineRounds
from catenary_agent.engines.timing import EngineTimer
from catenary_agent.engines.vllm import VllmProtocol, adapter_options, vllm_command
from catenary_services.content.making import GRAPH_PREFIX
from catenary_services.domain.decoder import DecoderRuntime, form_of, why_not_loaded
from catenary_services.errors import DeviceLost, InvalidInput, NotSupported, PlanInfeasible
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_agent.decoders.base import CacheLayout
    from catenary_agent.engines.client import EngineClient
    from catenary_agent.engines.executor import TellAnswered
    from catenary_agent.engines.requests import EngineCommand, EngineProtocol
    from catenary_agent.executors.device import Device
    from catenary_agent.supervision.steps import RunningSteps
    from catenary_services.content.reading import VerifiedReading
    from catenary_services.domain.decoder import DecoderTable
    from catenary_services.domain.ids import PartitionKey
    from catenary_services.domain.model import ModelManifest
    from catenary_services.models.model_repository import ModelRepository

_log = get_logger("catenary_agent.engines")


@dataclass(frozen=True, slots=True)
class EngineHost:
    """The parts of an agent that engines need."""

    runtime: DecoderRuntime
    python: Path
    """The interpreter of the engine's virtual environment."""
    device: Device
    threads: int
    sockets: Path | None
    """The folder for sockets; None for that of temporary files."""
    silence_s: float
    """Seconds for which an engine that starts may say nothing."""
    steps: RunningSteps
    tell: TellAnswered
    """Tells the generation thread of answers."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the agent stops: an engine that is starting is not waited for any longer."""


def load_engine(
    repository: ModelRepository, key: PartitionKey, layout: CacheLayout, host: EngineHost
) -> EngineExecutor:
    """Returns an executor whose engine serves sessions; any thread may call it, and waits.

    Raises:
        InvalidInput: The partition is not the whole model, or the layout is impossible.
        NotSupported: The engine is not installed, too old, or reads no such files.
        PlanInfeasible: The engine has less room than is booked.
        ContentMismatch: The files of the model are not what was recorded.
        InternalError: The engine does not start, or does not answer as it should.
    """
    manifest, table = repository.manifest(key.model), repository.decoder_table(key.model)
    runtime = str(host.runtime)
    why = why_not_loaded(runtime, manifest.target, manifest.engines)
    if why:
        raise NotSupported(f"{key.model} cannot be loaded here: {why}")
    if (key.first_block, key.last_block) != (0, table.blocks):
        raise InvalidInput("partition", f"{key} is not the whole model, which an engine serves")
    layout.check(key)
    booking = EngineBooking.of(layout, table.blocks)
    if booking.sessions < 1:
        raise InvalidInput("cache.block_slots", "hold no session of the whole model")
    sizes = table.held(form_of(runtime, manifest.precision))
    with repository.reading(key.model) as reading:
        for name in _read_by(host.runtime, reading.names()):
            reading.expect(reading.folder / name)
        for name in _read_by(host.runtime, reading.names()):
            reading.begin(reading.folder / name)
        # Files of another content must not be given to anybody who trusts them.
        reading.finish()
        if host.runtime is DecoderRuntime.VLLM:
            _check_stored(reading.folder)
        started = _Starting(host, manifest, table, booking, reading)
        cache_bytes = sizes.slot_bytes(layout.memory_tokens(commits_on_use=True))
        command = started.command(cache_bytes)
        child = EngineChild(host.python, command, host.sockets)
        client = _client_of(child, started)
        rounds = EngineRounds(key, host.steps)
        try:
            began_s = time.monotonic()
            child.start()
            limits = StartLimits(host.silence_s, host.stopping, host.steps.renew)
            child.wait(_once(client.is_serving, child.socket), limits)
            check_version(manifest, host.runtime, child.version)
            has = client.capacity()
            if has.sessions < booking.sessions or has.tokens < booking.tokens:
                raise PlanInfeasible(
                    f"the engine of {key} keeps {has.tokens} tokens of {has.sessions} sessions;"
                    f" {booking.tokens} of {booking.sessions} are booked"
                )
            ready_s = time.monotonic()
            timer = EngineTimer(client, started.protocol, booking, table.vocabulary_size, limits)
            rounds.cost = timer.measure()
        except BaseException:
            client.close()
            child.close()
            raise
    _log.info(
        "engine_ready",
        engine=runtime,
        version=child.version,
        partition=str(key),
        pid=child.pid,
        sessions=has.sessions,
        cache_tokens=has.tokens,
        start_s=round(ready_s - began_s, 1),
        measuring_s=round(time.monotonic() - ready_s, 1),
    )
    executor = EngineExecutor(key, table, sizes, layout, (child, client, started.protocol, rounds))
    executor.tell = host.tell
    executor.adapters = frozenset(name for name, _ in manifest.adapters)

    def ended(why: str) -> None:
        lost = DeviceLost(why)
        executor.fail(lost)
        host.steps.lost(lost)

    child.ended = ended
    return executor


def _client_of(child: EngineChild, started: _Starting) -> EngineClient:
    # What speaks HTTP is memory that agents without an engine need not have.
    from catenary_agent.engines.client import EngineClient

    table = started.table
    return EngineClient(child.socket, started.protocol, table.vocabulary_size, table.end_token_ids)


@dataclass(frozen=True, slots=True)
class _Starting:
    """The parts of a start that depend on the kind of engine."""

    host: EngineHost
    manifest: ModelManifest
    table: DecoderTable
    booking: EngineBooking
    reading: VerifiedReading

    @property
    def protocol(self) -> EngineProtocol:
        if self.host.runtime is DecoderRuntime.VLLM:
            return VllmProtocol(self.booking.sessions)
        folder, size = self.reading.folder, self.table.vocabulary_size
        unsaid = MissingTokens(lambda: vocabulary_bytes(folder, size))
        booking = self.booking
        return LlamaServerProtocol(unsaid, booking.sessions, is_unified=booking.is_shared)

    def command(self, cache_bytes: int) -> EngineCommand:
        # The engine has another working folder than the agent.
        host, folder = self.host, self.reading.folder.absolute()
        arguments = self.manifest.engine_arguments
        if host.runtime is DecoderRuntime.VLLM:
            command = vllm_command(
                folder, self.booking, cache_bytes, host.device, host.threads, arguments
            )
            loras = adapter_options(folder, self.manifest.adapters)
            return replace(command, arguments=(*command.arguments, *loras))
        weights = folder / (self.manifest.engine_file or self.manifest.file)
        return llama_server_command(weights, self.booking, host.device, host.threads, arguments)


def _read_by(runtime: DecoderRuntime, names: Sequence[str]) -> list[str]:
    """Returns the recorded files of a model that an engine reads."""
    others = ".gguf" if runtime is DecoderRuntime.VLLM else ".safetensors"
    return [
        name for name in names if not name.startswith(GRAPH_PREFIX) and not name.endswith(others)
    ]


def _check_stored(folder: Path) -> None:
    """Raises NotSupported for codes of a GGUF file, which imports store in a form of our own."""
    path = folder / "config.json"
    said = read_object(path).get("quantization_config") if path.exists() else None
    if isinstance(said, dict) and said.get("quant_method") == QuantisedLayout.PLAIN:
        raise NotSupported("vLLM does not read the four-bit codes that were kept of a GGUF file")


def check_version(manifest: ModelManifest, runtime: DecoderRuntime, version: str) -> None:
    """Raises NotSupported if a model asks for a newer version of its engine."""
    if manifest.min_version and _numbers(version) < _numbers(manifest.min_version):
        least = manifest.min_version
        raise NotSupported(f"{manifest.key} needs {runtime} {least}; here is {version or 'none'}")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with: "0.11.2rc1" is (0, 11, 2)."""
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)


def _once(is_serving: Callable[[], bool], socket: Path) -> Callable[[], bool]:
    """Returns a question that is asked only once there is a socket."""
    return lambda: socket.exists() and is_serving()
