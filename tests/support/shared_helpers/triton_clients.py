"""Unmodified tritonclient in all its four forms, called alike."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import gevent
import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio_client
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio_client
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tritonclient.utils import np_to_triton_dtype

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
            await self.on_thread(self._close_here)

    def _close_here(self) -> None:
        self.client.close()
        if self.form == "http":
            # gevent's loop belongs to the thread, which ends now.
            gevent.get_hub().destroy(destroy_loop=True)


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


@dataclass
class SharedObject:
    """A shared memory object, as `shm_open` makes it on Linux.

    tritonclient's own module for it needs a package that newer Pythons do not bring.
    """

    path: Path

    def put(self, array: np.ndarray, offset: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(array.tobytes())

    def array(self, dtype: type[np.generic], shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        count = int(np.prod(shape))
        return np.fromfile(self.path, dtype, count, offset=offset).reshape(shape)


@contextmanager
def shared_object(key: str, size_bytes: int) -> Iterator[SharedObject]:
    """Makes a shared memory object, and removes it."""
    path = Path("/dev/shm") / key.removeprefix("/")
    path.write_bytes(bytes(size_bytes))
    try:
        yield SharedObject(path)
    finally:
        path.unlink(missing_ok=True)


def plain(answer: Any) -> Any:
    """Returns a message as a dictionary of what is set; anything else as it is."""
    if not isinstance(answer, Message):
        return answer
    found: dict[str, Any] = {}
    for field in answer.DESCRIPTOR.fields:
        value = getattr(answer, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = {key: plain(each) for key, each in value.items()}
        elif field.is_repeated:
            found[field.name] = [_named(field, each) for each in value]
        elif not field.has_presence or answer.HasField(field.name):
            found[field.name] = _named(field, value)
    return found


def _named(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return plain(value)
