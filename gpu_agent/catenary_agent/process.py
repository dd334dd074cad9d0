"""The agent process: it connects transports, engines and control, and starts and stops them."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from catenary_agent.control import ControlTimeouts, SchedulerLink
from catenary_agent.decoders.loading import DecoderOptions, runtime_of
from catenary_agent.device_check import check_device
from catenary_agent.devices.facts import device_facts
from catenary_agent.engine.engine import BatchEngine, EngineLimits
from catenary_agent.engine.meter import BatchMeter
from catenary_agent.engine.reporting import FixedMessage, OutgoingMessage
from catenary_agent.engines.executor import ENGINE_CHUNK_TOKENS
from catenary_agent.engines.loading import EngineHost
from catenary_agent.executors.device import Device
from catenary_agent.generation.context import GenerationContext, GenerationLimits
from catenary_agent.generation.loop.engine import GenerationEngine
from catenary_agent.generation.meter import GenerationMeter
from catenary_agent.generation.state.holdings import HoldingsAnswer
from catenary_agent.generation.state.partition_batcher import PROMPT_PAUSE_NS, chunk_tokens_for
from catenary_agent.hosting.loading import LoadTarget, PartitionLoader
from catenary_agent.links.link_echoes import LinkEchoes
from catenary_agent.outbox import Outbox
from catenary_agent.share import ShareRequest, take_share
from catenary_agent.supervision.faults import FaultInjector
from catenary_agent.supervision.steps import RunningStep
from catenary_agent.supervision.termination import EXIT_DEVICE_LOST, EXIT_STUCK, ProcessTermination
from catenary_agent.supervision.watchdog import Watchdog, WatchdogRules
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.domain.groups import chosen_group, metadata_of_group
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.domain.model import ENGINE_OF
from catenary_services.errors import DeviceFailed, DeviceLost, NotSupported
from catenary_services.grpc.probes import Probes
from catenary_services.log import get_logger
from catenary_services.models.model_repository import ModelRepository
from catenary_services.security.identity import Role
from catenary_services.security.own_certificate import OwnCertificate
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.store.messages import fetch_message
from catenary_services.store.settings import store_settings
from catenary_services.store.store import ModelStore
from catenary_services.telemetry.metrics import Metrics, start_metrics_server
from catenary_services.telemetry.tracing import Tracer
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.settings import TransportSecurity, TransportSettings
from catenary_services.version import software_version

if TYPE_CHECKING:
    from catenary_agent.settings import AgentSettings

_log = get_logger("catenary_agent")
_GAUGE_PERIOD_S = 1.0
_CALM_LOOKS = 2
_LAST_WORDS_S = 0.05
"""Seconds that a thread needs to report the failure it has just had."""
_QUIET_S = 0.5
"""Seconds without a frame after which nobody needs a drained agent any more."""


class AgentProcess:
    """The process of one agent. Implements `catenary_services.lifecycle.Process`."""

    def __init__(self, settings: AgentSettings) -> None:
        """Uses nothing but `settings`, and opens no connection before `start`.

        Raises:
            InvalidInput: The settings contradict each other, or name a device that is absent or
                that no installed library can compute on.
        """
        self.settings = settings
        # This comes first: an MPS share only counts if CUDA has not been used yet.
        self.share = take_share(_share_request_of(settings))
        free_bytes = check_device(self.share.device, self.share.memory_bytes)
        self._device_facts = device_facts(str(self.share.device), self.share.cores, free_bytes)
        self.incarnation = secrets.randbits(63)
        self.metrics = Metrics()
        self.outbox = Outbox()
        self._client_security = ClientSecurity.from_settings(settings)
        self._server_security = ServerSecurity.from_settings(settings)
        self._certificate = OwnCertificate(settings, Role.AGENT, settings.agent_id)
        self._tracer = Tracer(
            "catenary-agent",
            settings.agent_id,
            otlp_endpoint=settings.otlp_endpoint,
            sample_ratio=settings.trace_sample_ratio,
        )
        self.hub = TransportHub(
            settings.agent_id,
            self._transport_settings(),
            lambda why: self.metrics.frames_refused.labels(why).inc(),
        )
        self.engine = BatchEngine(
            settings.agent_id,
            self.hub,
            self.outbox.put,
            EngineLimits(
                settings.max_held_bytes,
                settings.max_assemblies,
                settings.push_timeout_s,
                settings.link_bytes_per_second if settings.emulated_link else None,
                FaultInjector(settings.faults_file),
            ),
            self._tracer,
            BatchMeter(self.metrics),
        )
        self.ending = ProcessTermination(self._farewell)
        self.engine.steps.lost = self._device_lost
        self._watchdog = Watchdog(self.engine.steps, _rules_of(settings), self._stuck)
        self.generation = GenerationEngine(
            settings.agent_id,
            GenerationContext(
                self.hub,
                self._tell,
                self.engine.held,
                GenerationMeter(self.metrics),
                self._tracer,
                self.engine.link,
                self.engine.steps,
                self.hub.is_local,
            ),
            GenerationLimits(
                settings.prefill_chunk_tokens or _chunk_tokens(settings, self.share.device),
                settings.draft_tokens,
                _prompt_pause_ns(settings),
                keeps_prefixes=settings.prefix_cache == "on",
                prefix_host_bytes=settings.prefix_host_bytes,
                narrows_rows=settings.row_numbers == "bfloat16",
                push_timeout_s=settings.push_timeout_s,
            ),
        )
        self.engine.hand_frames_to(self.generation.on_frame, self.generation.frame_kinds)
        self._decoders = DecoderOptions(settings.decoder, settings.decoder_numbers)
        self._runtime = _runtime_of(self.share.device, self._decoders)
        repository = ModelRepository(settings.model_repository)
        self._model_store = ModelStore(repository, self.hub, store_settings(settings))
        self._model_store.waiting = self.engine.steps.renew
        self._model_store.fetched = self.metrics.fetched_bytes.inc
        self.engine.hand_frames_to(self._model_store.on_frame, self._model_store.frame_kinds)
        self._echoes = LinkEchoes(self.hub, self._tell, lambda: self._is_at_work)
        self.engine.hand_frames_to(self._echoes.on_frame, self._echoes.frame_kinds)
        host = LoadTarget(
            repository,
            self.share.device,
            self.share.threads,
            self.share.memory_bytes,
            self._decoders,
            self.share.device_class if settings.canary == "on" else None,
            settings.engine_cache_dir,
            self._model_store,
            self._engine_host(),
        )
        self._loader = PartitionLoader(self.engine, self.generation, host, self.outbox.put)
        self.control = SchedulerLink(
            settings.scheduler_addresses,
            self._client_security,
            self,
            self.outbox,
            ControlTimeouts(settings.heartbeat_s, settings.silence_s),
            metadata_of_group(
                chosen_group(
                    settings.scheduler_group, settings.agent_id, settings.scheduler_groups
                ),
                settings.scheduler_groups,
            ),
        )
        self.control.invalid = self.metrics.invalid_messages.labels("scheduler").inc
        self._tasks: list[asyncio.Task[None]] = []
        self._draining: asyncio.Task[None] | None = None
        self._probes = Probes()
        self._is_leaving = False
        self._calm_looks = 0
        self._stop_metrics: Callable[[], None] | None = None
        self.health_port: int | None = None
        self.metrics_port: int | None = None

    @property
    def name(self) -> str:
        return self.settings.agent_id

    # -- Process ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when frames and orders can arrive; a scheduler may connect later."""
        settings = self.settings
        self.ending.start()
        self._watchdog.start()
        self.engine.start()
        self.generation.start()
        self._model_store.start()
        await self.hub.start(self.engine.on_frame)
        self._certificate.start(self.metrics)
        if settings.metrics_port is not None:
            self.metrics_port, self._stop_metrics = start_metrics_server(
                settings.metrics_host, settings.metrics_port, self.metrics.registry
            )
        if settings.health_port is not None:
            self.health_port = await self._probes.start(settings.health_host, settings.health_port)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.control.run(), name="control"),
            loop.create_task(self._refresh_gauges(), name="gauges"),
        ]

    async def failed(self) -> None:
        """Raises when an engine or the control task has crashed, which is a bug."""
        watching = [
            asyncio.ensure_future(self.engine.failed()),
            asyncio.ensure_future(self.generation.failed()),
        ]
        watched = [*watching, *self._tasks]
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for each in watching:
                each.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Tells the scheduler, and continues until no more frames arrive.

        From then on the scheduler plans without this agent. Until it has done so (other agents may
        have to load its partitions first) batches still arrive, and none of them is lost.
        """
        deadline = time.monotonic() + timeout_s
        self._is_leaving = True
        self._model_store.leave()
        self._probes.set_ready(False)
        self._tell(_DRAINED)
        await self.control.flush(min(1.0, timeout_s / 4))
        while (left_s := deadline - time.monotonic()) > 0:
            seen = self.engine.received_frames
            if not await self._wait_idle(left_s):
                return
            await asyncio.sleep(min(_QUIET_S, max(0.0, deadline - time.monotonic())))
            if self._is_idle and self.engine.received_frames == seen:
                break
        await self.control.flush(max(0.0, min(1.0, deadline - time.monotonic())))

    async def stop(self) -> None:
        """Ends everything. Idempotent."""
        self._watchdog.stop()
        tasks = [*self._tasks, *([self._draining] if self._draining else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._echoes.close()
        await self._model_store.close()
        await self._loader.close()
        await self.generation.close()
        await self.engine.close()
        await self.hub.close()
        await self._certificate.close()
        await self._probes.stop()
        if self._stop_metrics is not None:
            await asyncio.to_thread(self._stop_metrics)
            self._stop_metrics = None
        await asyncio.to_thread(self._tracer.shutdown)

    # -- Orders ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.engine.epoch

    def raise_epoch(self, epoch: int) -> None:
        self.engine.raise_epoch(epoch)
        self.generation.raise_epoch(epoch)

    def forget_epoch(self) -> None:
        """Accepts the next leader, whatever its epoch."""
        self.engine.forget_epoch()
        self.generation.forget_epoch()

    def hear_clock(self, clock_ns: int) -> None:
        self.engine.clock.heard(self.epoch, clock_ns, time.monotonic_ns())

    def refused(self) -> None:
        self.metrics.orders_refused.inc()

    def hello(self) -> scheduler_pb2.AgentHello:
        settings = self.settings
        return scheduler_pb2.AgentHello(
            agent_id=settings.agent_id,
            incarnation=self.incarnation,
            peer=self._peer(),
            device=settings.device,
            device_class=self.share.device_class,
            memory_bytes=self.share.memory_bytes,
            server_id=settings.server_id,
            link_bytes_per_second=settings.link_bytes_per_second,
            epoch=self.engine.epoch,
            leader=self.control.leader,
            draining=self._is_leaving,
            partitions=self._loader.describe_all(),
            batches=self.engine.snapshot(),
            virtual_level=settings.virtual_level,
            device_id=settings.device_id,
            sessions=self.generation.snapshot(),
            commits_caches_on_use=True,
            decoder_runtime=self._runtime,
            prefill_chunk_tokens=self.generation.chunk_tokens,
            software_version=software_version(),
            device_facts=self._device_facts,
        )

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        beat = self.engine.steps.heartbeat()
        beat.fetches.extend(fetch_message(each) for each in self._model_store.progress())
        return beat

    def obey(self, message: scheduler_pb2.SchedulerToAgentMessage) -> None:
        match message.WhichOneof("kind"):
            case "load_partition":
                self._loader.load(message.load_partition)
            case "unload_partition":
                self._loader.unload(message.unload_partition)
            case "directory":
                self.hub.update_directory(message.directory.peers)
            case "cancel_batch":
                for batch_id in message.cancel_batch.batch_ids:
                    self.engine.cancel(batch_id)
            case "close_sessions":
                self.generation.close_sessions(message.close_sessions.session_ids)
            case "report_holdings":
                self.generation.report_holdings(message.report_holdings.number)
            case "measure_link":
                self._echoes.measure(message.measure_link)
            case "end_process":
                why = f"the scheduler says: {message.end_process.why}"
                self.ending.begin(EXIT_STUCK, DeviceFailed.reason, why)
            case "drain":
                if self._draining is None or self._draining.done():
                    self._draining = asyncio.get_running_loop().create_task(self._drain_order())
            case _:
                pass

    async def _drain_order(self) -> None:
        """Answers with Drained when nothing is left; the process stays usable."""
        await self._wait_idle(self.settings.drain_timeout_s)
        self._tell(_DRAINED)

    @property
    def _is_idle(self) -> bool:
        return self.engine.held_batches == 0 and self.generation.sessions == 0

    @property
    def _is_at_work(self) -> bool:
        return not self._is_idle or self._model_store.is_transferring

    async def _wait_idle(self, timeout_s: float) -> bool:
        """Returns True once neither batches nor sessions are held, False on timeout."""
        deadline = time.monotonic() + timeout_s
        while not self._is_idle:
            left_s = deadline - time.monotonic()
            if not (
                await self.engine.wait_idle(left_s)
                and await self.generation.wait_idle(deadline - time.monotonic())
            ):
                _log.warning(
                    "drain_unfinished",
                    batches=self.engine.held_batches,
                    sessions=self.generation.sessions,
                )
                return False
        return True

    # -- the end ---------------------------------------------------------------------------------

    def _device_lost(self, error: BaseException) -> None:
        """Ends the process; called on a computing thread that has lost the device."""
        text = (str(error).splitlines() or [""])[0][:300]
        self.ending.begin(EXIT_DEVICE_LOST, DeviceLost.reason, f"{type(error).__name__}: {text}")

    def _stuck(self, step: RunningStep, age_ns: Nanoseconds) -> None:
        """Ends the process; called on the watchdog's thread."""
        what = f"a step ({step.kind.value}) of {step.partition or 'no partition'}"
        why = f"{what} goes on for {age_ns / 1e9:.1f} s; booked were {step.booked_ns / 1e9:.3f} s"
        self.ending.begin(EXIT_STUCK, DeviceFailed.reason, why)

    async def _farewell(self, reason: str, why: str) -> None:
        """Tells the scheduler, behind the failures of the last computations."""
        await asyncio.sleep(_LAST_WORDS_S)
        ending = scheduler_pb2.Ending(reason=reason, why=why)
        self._tell(FixedMessage(scheduler_pb2.AgentMessage(ending=ending)))
        await self.control.flush(1.0)

    # -- parts -----------------------------------------------------------------------------------

    def _engine_host(self) -> EngineHost | None:
        """Returns what there is for engines; None if language models are computed by blocks."""
        settings, device = self.settings, self.share.device
        runtime = ENGINE_OF.get(settings.decoder)
        if runtime is None or device.kind == "emulated":
            return None
        return EngineHost(
            runtime,
            settings.engine_python or Path(sys.executable),
            device,
            self.share.threads,
            settings.runtime_dir,
            settings.engine_start_s,
            self.engine.steps,
            self.generation.engine_answered,
        )

    def _tell(self, message: OutgoingMessage) -> None:
        if isinstance(message, HoldingsAnswer):
            message.complete(self.engine.snapshot(computed=True), self.engine.partitions)
        self.outbox.put(message)

    def _peer(self) -> common_pb2.Peer:
        addresses = [
            common_pb2.TransportAddress(
                transport=each.transport, address=each.address, host_id=each.host_id
            )
            for each in self.hub.addresses
        ]
        return common_pb2.Peer(
            peer_id=self.settings.agent_id, incarnation=self.incarnation, addresses=addresses
        )

    def _transport_settings(self) -> TransportSettings:
        settings = self.settings
        chosen = TransportSettings(
            enabled=tuple(settings.transports),
            host=settings.transport_host,
            advertise_host=settings.advertise_host,
            tcp_port=settings.transport_port,
            trusted_network=settings.trusted_network,
            security=TransportSecurity(self._server_security, self._client_security),
        )
        if settings.runtime_dir is not None:
            chosen = replace(chosen, runtime_dir=settings.runtime_dir)
        return chosen

    def _tell_probes(self) -> None:
        """Reports readiness: a scheduler leads, and has had its first orders loaded.

        Two looks, a period apart, must agree, because orders follow a moment after the welcome.
        """
        if not self.control.connected.is_set() or self._is_leaving:
            self._calm_looks = 0
        elif self._calm_looks >= _CALM_LOOKS or not self._loader.is_loading:
            self._calm_looks += 1
        else:
            self._calm_looks = 0
        self._probes.set_ready(self._calm_looks >= _CALM_LOOKS)

    async def _refresh_gauges(self) -> None:
        while True:
            self.metrics.queued_batches.set(self.engine.queued_batches)
            decoders = self.generation.decoders
            hosted = (*self.engine.partitions, *decoders)
            self.metrics.partitions.set(len(hosted))
            self.metrics.partition_bytes.set(
                self.engine.partitions.memory_bytes + decoders.memory_bytes
            )
            used, slots = self.generation.block_slots
            self.metrics.block_slots_used.set(used)
            self.metrics.block_slots.set(slots)
            self.metrics.generation_sessions.set(self.generation.sessions)
            self.metrics.kept_block_tokens.set(self.generation.kept_block_tokens)
            self.metrics.epoch.set(self.engine.epoch)
            self._model_store.release_unused(self._loader.models)
            self._tell_probes()
            await asyncio.sleep(_GAUGE_PERIOD_S)


def _rules_of(settings: AgentSettings) -> WatchdogRules:
    return WatchdogRules(
        int(settings.stuck_s * NANOSECONDS_PER_SECOND),
        settings.stuck_factor,
        int(settings.stuck_load_s * NANOSECONDS_PER_SECOND),
    )


def _chunk_tokens(settings: AgentSettings, device: Device) -> int:
    """Returns the usual chunk of prompts; an engine has one of its own, and is only told of all."""
    return ENGINE_CHUNK_TOKENS if settings.decoder in ENGINE_OF else chunk_tokens_for(device)


def _prompt_pause_ns(settings: AgentSettings) -> Nanoseconds:
    """Returns how long a prompt may hold up a ring; 0 where an operator or an engine decides."""
    is_given = settings.prefill_chunk_tokens or settings.decoder in ENGINE_OF
    return 0 if is_given else PROMPT_PAUSE_NS


def _runtime_of(device: Device, choice: DecoderOptions) -> str:
    """Returns the runtime of decoders on the device; empty if it has none or emulates none.

    If a decoder is ordered nevertheless, the answer to that order says why it cannot be loaded.
    """
    try:
        return runtime_of(device, choice) or ""
    except (NotSupported, ImportError) as error:
        _log.warning("no_decoders_here", device=str(device), error=str(error))
        return ""


def _share_request_of(settings: AgentSettings) -> ShareRequest:
    device = Device.parse(
        settings.device,
        slowdown=settings.emulated_slowdown,
        profile=settings.emulated_profile,
        virtual_level=settings.virtual_level,
    )
    return ShareRequest(
        device,
        settings.device_class,
        settings.memory_bytes,
        settings.threads,
        settings.host_devices,
        settings.cpu_cores,
    )


_DRAINED = FixedMessage(scheduler_pb2.AgentMessage(drained=scheduler_pb2.Drained()))
