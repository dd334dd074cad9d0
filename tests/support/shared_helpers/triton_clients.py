"""Unmodified tritonclient in all its four forms, called alike."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio_client
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio_client
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from tritonclient.utils import np_to_triton_dtype
from tritonclient.utils.shared_memory import (
    create_shared_memory_region,
    destroy_shared_memory_region,
)

FORMS: dict[str, ModuleType] = {
    "grpc": grpc_client,
    "http": http_client,
    "grpc.aio": grpc_aio_client,
    "http.aio": http_aio_client,
}
PATIENCE_S = 60


@dataclass
class TritonClient:
    """One client, whose methods are all called from a coroutine."""

    form: str
    module: ModuleType
    client: Any
    thread: ThreadPoolExecutor
    """The one thread that uses the client, as gevent demands of the one for HTTP."""
    headers: dict[str, str] | None = None

    @property
    def is_grpc(self) -> bool:
        return self.form.startswith("grpc")

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Returns what the method answers; messages and texts as plain values."""
        function = getattr(self.client, method)
        if self.headers:
            kwargs["headers"] = self.headers
        async with asyncio.timeout(PATIENCE_S):
            if inspect.iscoroutinefunction(function):
                return plain(await function(*args, **kwargs))
            return plain(await self.on_thread(lambda: function(*args, **kwargs)))

    async def on_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def input(self, name: str, array: np.ndarray) -> Any:
        given = self.module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        given.set_data_from_numpy(array)
        return given

    def input_in(self, name: str, array: np.ndarray, region: str, **where: int) -> Any:
        """An input in shared memory."""
        given = self.module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        given.set_shared_memory(region, where.pop("byte_size", array.nbytes), **where)
        return given

    def output(self, name: str, **how: Any) -> Any:
        return self.module.InferRequestedOutput(name, **how)

    def output_in(self, name: str, region: str, byte_size: int, **where: int) -> Any:
        """An output in shared memory."""
        wanted = self.module.InferRequestedOutput(name)
        wanted.set_shared_memory(region, byte_size, **where)
        return wanted

    async def close(self) -> None:
        if inspect.iscoroutinefunction(self.client.close):
            await self.client.close()
        else:
            await self.on_thread(self.client.close)


@asynccontextmanager
async def triton_client(
    form: str, grpc: str, http: str, key: str | None = None
) -> AsyncIterator[TritonClient]:
    """Connects one of `FORMS`, and closes it."""
    module = FORMS[form]
    address = grpc if form.startswith("grpc") else http
    headers = {"authorization": f"Bearer {key}"} if key else None
    with ThreadPoolExecutor(1) as thread:
        if form.endswith("aio"):
            client = module.InferenceServerClient(address)
        else:
            client = await asyncio.wrap_future(thread.submit(module.InferenceServerClient, address))
        made = TritonClient(form, module, client, thread, headers)
        try:
            yield made
        finally:
            await made.close()


@contextmanager
def shared_object(key: str, size_bytes: int) -> Iterator[Any]:
    """Makes a shared memory object as tritonclient's users do, and removes it."""
    handle = create_shared_memory_region(key, key, size_bytes)
    try:
        yield handle
    finally:
        destroy_shared_memory_region(handle)


def plain(answer: Any) -> Any:
    """Returns a message as a dictionary with numbers as numbers; anything else as it is."""
    if not isinstance(answer, Message):
        return answer
    return _numbers(
        MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )


def _numbers(value: Any) -> Any:
    """JSON of protobuf has numbers of 64 bits as texts."""
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    is_number = isinstance(value, str) and value.lstrip("-").isdecimal()
    return int(value) if is_number else value
