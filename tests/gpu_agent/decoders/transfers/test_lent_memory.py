"""Memory that one process lends and another reads: of the host, and of a CUDA device."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from catenary_agent.decoders.transfers.lent_memory import memory_of
from catenary_agent.kv import CacheSpan
from catenary_services.errors import Unavailable
from tests.support.small_models.lent_caches import SLOTS, TOKENS, borrowing, pool_of

HAS_CUDA = torch.cuda.is_available()
DEVICES = ["cpu", *(["cuda"] if HAS_CUDA else [])]
NBYTES = 1 << 20
SPAN = CacheSpan(2, 9, 5, 49)
NAMES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}


def device_of(name: str) -> torch.device:
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def random_bytes(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:catenary-lent")


def test_what_the_lender_writes_the_other_process_reads(device):
    source = memory_of(device_of(device))
    memory = source.make(NBYTES)
    with borrowing(device) as other:
        for _ in range(2):
            data = random_bytes(NBYTES)
            memory.put(data)
            wanted = hashlib.sha256(data).hexdigest()
            assert memory.get(NBYTES) == data
            assert other.open(memory, source.place) == wanted
        memory.put(b"others")  # what is open shows it at once
        assert other.ask("digest") == hashlib.sha256(b"others" + data[6:]).hexdigest()
        assert other.ask("close") == "closed"
    memory.close()
    memory.close()
    with pytest.raises(Unavailable):
        memory.get(1)


@pytest.mark.parametrize("lent", NAMES)
@pytest.mark.parametrize("kept", NAMES)
def test_a_borrowed_part_is_what_would_have_come_in_frames(device, lent, kept):
    pool, cache = pool_of(device, lent)
    random = torch.Generator().manual_seed(7)
    for rows in (pool.keys, pool.values):
        rows.copy_(torch.randn(rows.shape, generator=random))
    other_pool, other_cache = pool_of(device, kept)
    other_pool.write_part(other_cache, SPAN, 0, pool.read(cache, SPAN, 0))
    expected = other_pool.read(other_cache, SPAN, 0)

    source = memory_of(device_of(device))
    memory = source.make(NBYTES)
    datatype = pool.lend(cache, SPAN, 0, memory.tensor)
    assert datatype == NAMES[lent]
    with borrowing(device) as other:
        assert len(other.open(memory, source.place)) == 64
        span = [SPAN.first_block, SPAN.last_block, SPAN.first_token, SPAN.last_token]
        dtype, shape, digest = other.ask("borrow", span=span, datatype=datatype, dtype=kept)
    memory.close()
    assert (dtype, tuple(shape)) == (expected.dtype.name, expected.shape)
    assert digest == hashlib.sha256(expected.tobytes()).hexdigest()


def test_memory_is_free_again_though_the_borrower_was_killed(device):
    where = device_of(device)
    source = memory_of(where)
    nbytes = 256 << 20
    source.make(4096).close()  # what the library and the driver take for themselves
    before = mapped()
    free_before = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else 0
    memory = source.make(nbytes)
    with borrowing(device) as other:
        assert len(other.open(memory, source.place)) == 64
        other.kill()
    memory.close()
    assert mapped() == before
    if where.type == "cuda":
        # What the process itself had is given back a moment after its end.
        deadline = time.monotonic() + 20
        while torch.cuda.mem_get_info(where)[0] < free_before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert torch.cuda.mem_get_info(where)[0] >= free_before


def test_a_borrower_goes_on_when_the_lender_is_killed(device):
    with borrowing(device) as lender, borrowing(device) as other:
        handle = lender.ask("make", nbytes=NBYTES)
        values = {**handle, "nbytes": NBYTES}
        assert len(other.ask("open", **values)) == 64
        lender.kill()
        assert other.ask("close") == "closed"
        handle = {**memory_made(device), "nbytes": NBYTES}
        assert len(other.ask("open", **{k: handle[k] for k in values})) == 64
        handle["memory"].close()


def memory_made(device: str) -> dict:
    import base64

    source = memory_of(device_of(device))
    memory = source.make(NBYTES)
    encoded = base64.b64encode(memory.handle).decode()
    return {"handle": encoded, "place": source.place, "memory": memory}


def test_a_handle_of_something_else_opens_nothing(device):
    source = memory_of(device_of(device))
    memory = source.make(NBYTES)
    with borrowing(device) as other:
        assert other.open(memory, "elsewhere").startswith("no: ")
        assert other.open(memory, source.place, os.urandom(64)).startswith("no: ")
        assert other.open(memory, source.place, b"1").startswith("no: ")
        memory.nbytes = 3 * NBYTES + 1
        if device == "cuda":
            memory.nbytes = 64 << 20
        assert other.open(memory, source.place).startswith("no: ")
        memory.nbytes = NBYTES
        assert len(other.open(memory, source.place)) == 64
    memory.close()


def test_files_that_are_no_lent_memory_are_not_opened(tmp_path):
    source = memory_of(torch.device("cpu"))
    others = [
        os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR),
        os.memfd_create("catenary-lent", os.MFD_ALLOW_SEALING),  # it may shrink under its reader
        os.memfd_create("catenary-other", os.MFD_ALLOW_SEALING),
    ]
    try:
        for fd in others:
            os.truncate(fd, NBYTES)
            with pytest.raises(Unavailable):
                source.open(f"{os.getpid()}:{fd}".encode(), NBYTES, source.place)
        with pytest.raises(Unavailable):
            source.open(b"999999999:3", NBYTES, source.place)
    finally:
        for fd in others:
            os.close(fd)


def test_more_than_there_is_cannot_be_lent(device):
    with pytest.raises(Unavailable):
        memory_of(device_of(device)).make(1 << 60)


def test_parts_that_are_larger_than_the_memory_are_refused(device):
    pool, cache = pool_of(device, "float32")
    memory = memory_of(device_of(device)).make(1000)
    with pytest.raises(RuntimeError):
        pool.lend(cache, CacheSpan(0, SLOTS, 0, TOKENS), 0, memory.tensor)
    memory.close()
