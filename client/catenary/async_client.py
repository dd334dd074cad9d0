"""The asyncio client; each client belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any, TypeVar

from catenary import moving, recent, types
from catenary.async_channels import AsyncChannels, each
from catenary.errors import CatenaryError, UnavailableError
from catenary.rpc import calls, importing, messages, plan_search
from catenary.rpc.attempts import RetryAttempts
from catenary.rpc.calls import RpcCall
from catenary.rpc.connection import DEFAULT_TARGET, NO_RETRY, Connection, TlsConfig
from catenary.rpc.machines import MachineInfo, machines_of
from catenary.rpc.plan_search import PlanDemand, PlanSearch
from catenary.rpc.retry import RetryPolicy
from catenary.rpc.targets import Addresses, targets_of
from catenary.tensors import Array
from catenary.text.async_generating import GeneratesTextAsync
from catenary.text.async_text_streams import AsyncTextStream
from catenary.text.continuing import TextCall

Reply = TypeVar("Reply")


class AsyncClient(GeneratesTextAsync):
    """The asyncio form of `Client`; close it, or use it in an `async with` statement.

    Args:
        target: Host and port of the gateway's gRPC port for clients, or any gRPC target. Several,
            with commas or as a sequence, are gateways of one cluster: where one is not available,
            repeatable calls go to the next, and answers that it had begun go on there.
        api_key: API key, sent as `authorization: Bearer ...`.
        tls: Certificates to trust and to show. Without it only this machine is addressed,
            unencrypted.
        insecure: Allows unencrypted connections to other machines.
        timeout_s: The longest wait for one call that names no limit of its own.
        admin_target: The admin port; port 8003 of the target's host if None. One for all targets,
            or one for each.
        retry: Repeats calls that are safe to repeat. None repeats nothing; see `RetryPolicy`.

    Every method may raise any `CatenaryError`.
    """

    def __init__(  # noqa: PLR0913 - settings of one thing, all but the first by name
        self,
        target: Addresses = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        tls: TlsConfig | None = None,
        insecure: bool = False,
        timeout_s: float = 60.0,
        admin_target: Addresses | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        common = Connection(
            DEFAULT_TARGET, api_key, tls, insecure, timeout_s, None, retry or NO_RETRY
        )
        self._targets = targets_of(common, target, admin_target)
        self._channels = AsyncChannels(self._targets.current)

    async def infer(  # noqa: PLR0913 - the fields of one request, all but two by name
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str = "",
        outputs: Sequence[str] | None = None,
        slo_ms: float | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        priority: int | None = None,
    ) -> types.InferResult:
        """Returns a model's outputs for some inputs.

        Args:
            model: Name of the model.
            inputs: Arrays by input name; NumPy dtypes choose the datatypes.
            version: Version of the model; empty for the server's choice.
            outputs: Names of the outputs wanted; None for all.
            slo_ms: Milliseconds until the answer must be there; None for the model's default.
            timeout_s: The gRPC deadline, which bounds the SLO too. None waits as long as the
                client's own `timeout_s`, which the server does not see.
            request_id: An id that the result repeats and `trace` knows; None draws one.
            priority: Higher goes first, where the server supports it.
        """
        request = types.InferRequest(model, inputs, version, outputs, slo_ms, request_id, priority)
        return await self.send(request, timeout_s=timeout_s)

    async def send(
        self, request: types.InferRequest, *, timeout_s: float | None = None
    ) -> types.InferResult:
        """Returns the result of a request that was made beforehand; see `infer`."""
        return await self._run(calls.infer(request, timeout_s))

    async def infer_stream(
        self,
        requests: Iterable[types.InferRequest] | AsyncIterable[types.InferRequest],
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[types.InferResult, None]:
        """Yields results over one stream as they arrive; a failed one has `error` set.

        The requests are taken while results arrive, so they may be an endless generator.

        Args:
            requests: The requests to send.
            timeout_s: Bound on the whole stream; None for none.
        """
        failed: list[Exception] = []

        async def outgoing() -> AsyncIterator[Any]:
            try:
                async for request in each(requests):
                    yield messages.infer_request(request)
            except Exception as error:
                # gRPC would swallow it where it sends; it is raised to the caller below.
                failed.append(error)

        connection = self._targets.current
        method = self._channels.stub("inference", connection).ModelStreamInfer
        replies = self._channels.stream(method, outgoing(), timeout_s, connection)
        try:
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    yield messages.stream_result(reply)
        except UnavailableError:
            self._targets.leave(connection)
            raise
        if failed:
            raise failed[0]

    async def live(self) -> bool:
        """Returns whether the server process runs."""
        return await self._run(calls.live())

    async def ready(self) -> bool:
        """Returns whether every required model is ready."""
        return await self._run(calls.ready())

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Returns whether one model can be served at present."""
        return await self._run(calls.model_ready(name, version))

    async def models(self) -> list[types.ModelInfo]:
        """Returns the models of the server's repository."""
        return await self._run(calls.models())

    async def model_metadata(self, name: str, version: str = "") -> types.ModelMetadata:
        """Returns a model's inputs and outputs."""
        return await self._run(calls.model_metadata(name, version))

    async def status(self) -> types.ClusterStatus:
        """Returns the state of the cluster at this moment (admin port)."""
        return await self._run(calls.status())

    async def machines(self) -> list[MachineInfo]:
        """Returns the machines of the cluster: their devices, and why one is idle (admin port)."""
        return machines_of(await self.status())

    async def trace(self, request_id: str = "") -> types.Trace:
        """Returns where a recent request's time went; that of the latest one without an id."""
        return await self._run(calls.trace(request_id))

    async def requests(self, limit: int = 50) -> list[recent.RecentRequest]:
        """Returns the latest requests of this gateway, the newest first (admin port)."""
        return await self._run(recent.requests(limit))

    async def plan(self) -> types.ActivePlan:
        """Returns the plan in force (admin port)."""
        return await self._run(calls.plan())

    async def search_plan(  # noqa: PLR0913 - the fields of one question, all but two by name
        self,
        model: str,
        gpus: Mapping[str, int],
        *,
        version: str = "",
        objective: str = "throughput",
        rate_per_s: float = 0.0,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        timeout_s: float | None = None,
    ) -> PlanSearch:
        """Returns what would serve a model on devices that need not be there (admin port).

        Nothing changes in the cluster. The answer takes seconds.

        Args:
            model: A model of the repository; it need not be deployed.
            gpus: Number of devices by class: one of the cluster, or of its catalogue, such as "L4".
            version: Version of the model; empty for the latest.
            objective: What decides once objectives are met: "throughput", or "gpus" for the fewest.
            rate_per_s: Requests or sessions per second; 0 for what arrives now.
            prompt_tokens: Mean length of prompts; 0 for that of the sessions seen.
            output_tokens: Mean length of answers, likewise.
            timeout_s: The longest wait.
        """
        demand = PlanDemand(
            model, gpus, version, objective, rate_per_s, prompt_tokens, output_tokens
        )
        return await self._run(plan_search.search_plan(demand, timeout_s))

    async def apply_plan(
        self, document: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> str:
        """Puts a plan in force and returns its id (admin port)."""
        return await self._run(calls.apply_plan(document, timeout_s))

    async def replan(self, *, timeout_s: float | None = None) -> types.Replanned:
        """Plans anew for the present agents and load, replacing any plan applied by hand.

        Returns what came of it once the new plan is in force (admin port).
        """
        return await self._run(calls.replan(timeout_s))

    async def deploy(  # noqa: PLR0913 - the fields of one deployment, all but one by name
        self,
        model: str,
        *,
        version: str = "",
        slo_ms: float | None = None,
        partitions: int = 0,
        max_batch: int = 0,
        packing: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """Deploys a model and returns the id of the plan that serves it (admin port).

        Args:
            model: A model of the repository.
            version: Version of the model; empty for the latest.
            slo_ms: Default SLO of its requests; None leaves it to the scheduler, as 0 does below.
            partitions: Number of parts to cut it into.
            max_batch: The largest batch.
            packing: The goal for which running sessions are moved: "pack" (onto few chains),
                "balance" or "off"; empty leaves it to the model and the scheduler.
            timeout_s: The longest wait.
        """
        deployment = calls.Deployment(model, version, slo_ms, partitions, max_batch, packing)
        return await self._run(calls.deploy(deployment, timeout_s))

    async def undeploy(
        self, model: str, *, version: str = "", timeout_s: float | None = None
    ) -> str:
        """Serves a model no longer; returns the version that goes (admin port).

        Requests that run are finished; the files stay in the repository.

        Args:
            model: A model that is deployed.
            version: Its version; empty if only one is deployed.
            timeout_s: The longest wait for a plan without it.
        """
        return await self._run(importing.undeploy(model, version, timeout_s))

    async def pull(
        self,
        order: importing.ImportOrder | str,
        *,
        watch: importing.ImportWatch | None = None,
        timeout_s: float | None = None,
    ) -> importing.ImportProgress:
        """Fetches a model from elsewhere and imports it into the repository (admin port).

        The machine of the repository does the work. Whoever stops waiting cancels it; what was
        fetched is kept for the next time.

        Args:
            order: The source, or what to do with it.
            watch: Called with each step.
            timeout_s: The longest wait; None for none.

        Returns:
            The last step, with name and version of the model.
        """
        wanted = importing.ImportOrder(order) if isinstance(order, str) else order
        request = importing.import_request(wanted)
        connection = self._targets.current
        method = self._channels.stub("admin", connection).ImportModel
        replies = self._channels.stream(method, request, timeout_s, connection)
        last: importing.ImportProgress | None = None
        async with contextlib.aclosing(replies):
            async for reply in replies:
                last = importing.progress_of(reply)
                if watch is not None:
                    watch(last)
        return importing.result_of(last)

    async def drain(self, agent_id: str, *, timeout_s: float | None = None) -> bool:
        """Takes an agent out of service; returns whether it is empty now (admin port)."""
        return await self._run(calls.drain(agent_id, timeout_s))

    async def undrain(self, agent_id: str, *, timeout_s: float | None = None) -> None:
        """Uses an agent again that was drained (admin port)."""
        await self._run(importing.undrain(agent_id, timeout_s))

    async def sessions(self, model: str = "") -> list[moving.SessionInfo]:
        """Returns the sessions that generate for a model, or for all, and where (admin port)."""
        return await self._run(moving.sessions(model))

    async def story(self, session: int | str) -> list[moving.StateChange]:
        """Returns what happened to a request and its sessions, and why (admin port).

        Args:
            session: The id of a session, or of a request that this gateway serves or served a while
                ago.
        """
        return await self._run(moving.story(session))

    async def move_session(
        self,
        session: int | str,
        *,
        chain_id: str = "",
        mode: str = "auto",
        wait_s: float = 10.0,
        timeout_s: float | None = None,
    ) -> moving.SessionMove:
        """Moves a running session to another chain; its stream goes on (admin port).

        Args:
            session: Its id, or the id of its request at the gateway that serves it.
            chain_id: The chain to move to; empty for the best one.
            mode: What travels: "kv" (its caches), "tokens" (computed again there), or "auto".
            wait_s: Seconds to wait for the end of the move; 0 returns when it has begun.
            timeout_s: The longest wait for an answer.
        """
        return await self._run(moving.move_session(session, chain_id, mode, wait_s, timeout_s))

    async def close(self) -> None:
        """Closes the connections; calls in flight are cancelled."""
        await self._channels.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, call: RpcCall[Reply]) -> Reply:
        attempts = RetryAttempts(call, self._targets)
        while True:
            try:
                return await self._channels.call(call, attempts)
            except CatenaryError as error:
                wait_s = attempts.wait_s(error)
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)
            attempts.again()

    def _text_stream(self, call: TextCall) -> AsyncTextStream:
        def send(
            request: Any, timeout_s: float | None, connection: Connection
        ) -> AsyncGenerator[Any, None]:
            method = self._channels.stub(call.service, connection).Generate
            return self._channels.stream(method, request, timeout_s, connection)

        return AsyncTextStream(call, self._targets, send)
