"""Stages about sessions: caches that travel, answers that go on, and a lack of memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.models.choosing import next_tokens, sampler
from benchmarks.gpu.models.models import Made, Wanted, decoder, make, prompt, random_tokens, small
from benchmarks.gpu.stage import Context
from catenary_agent.decoders.base import StepItem
from catenary_agent.decoders.model_files.weights import stored_tensors
from catenary_agent.decoders.transfers.tensor_reader import TensorReader
from catenary_agent.devices.device_errors import DeviceErrorKind, error_kind_of
from catenary_agent.kv.span import CacheSpan
from catenary_services.errors import CatenaryError

ROOT = Path(__file__).resolve().parents[3]
_TEMPERATURE = 0.9
_VERDICTS = {True: "yes", False: "NO"}


def caches(here: Context) -> None:
    """Moves sessions to another executor by their caches, and compares their answers there."""
    made = small(here)
    here_, there = (decoder(here, made, 4, 128) for _ in range(2))
    blocks, tokens = here_.table.blocks, 40
    for session in range(3):
        logits = prompt(here_, session, random_tokens(here_, tokens, session))
        first = int(logits.argmax())
        span = CacheSpan(0, blocks, 0, tokens)
        rows = here_.export_cache(session, span)
        there.open_session(session, 0)
        there.import_cache(session, span, rows)
        again = there.export_cache(session, span)
        here.row(
            f"session {session}: values of the cache that changed",
            int((rows != again).sum()),
            at_most=0,
        )
        stayed, moved = (_greedy(each, session, first, 16) for each in (here_, there))
        here.row(
            f"session {session}: tokens that differ after it",
            sum(a != b for a, b in zip(stayed, moved, strict=True)),
            at_most=0,
        )

    here.sync()
    _compare_pieces(here, there)
    _compare_readers(here, made)


def _compare_pieces(here: Context, executor: Any) -> None:
    """Compares caches that leave and arrive in pieces with the rows of the pool."""
    pool, cache, blocks = executor._pool, executor._caches[0], executor.table.blocks
    span = CacheSpan(1, blocks, 3, 37)
    starts = cache.starts[span.first_block : span.last_block]
    rows = [
        numbers[int(start) + 3 : int(start) + 37].cpu()
        for start in starts
        for numbers in (pool.keys, pool.values)
    ]
    expected = np.stack([each.numpy() for each in rows])
    for most_bytes in (None, 40_000, 1):
        found = pool.read(cache, span, 0, most_bytes)
        pool.write_part(cache, span, 0, np.zeros_like(found))
        pool.write_part(cache, span, 0, found, most_bytes or 40_000)
        again = pool.read(cache, span, 0)
        wrong = int((found.reshape(expected.shape) != expected).sum() + (again != found).sum())
        here.row(f"caches in pieces of {most_bytes or 'any'} bytes: values off", wrong, at_most=0)


def _compare_readers(here: Context, made: Made) -> None:
    """Compares the tensors that reach the device in pieces with those that safetensors reads."""
    import torch
    from safetensors.torch import load_file

    file = min(made[0].folder(made[1]).glob("*.safetensors"))
    expected, wrong = load_file(file), 0
    with TensorReader(here.torch_device) as reader:
        for name, where in stored_tensors(file).items():
            found = reader.read(file, name, where).cpu()
            wrong += found.dtype != expected[name].dtype or not torch.equal(found, expected[name])
    here.row("tensors of a file that arrive otherwise", wrong, at_most=0, note=f"{len(expected)}")


def _greedy(executor: Any, session: int, token: int, count: int) -> list[int]:
    said = []
    for _ in range(count):
        item = StepItem(session, executor._book.cached[session], np.array([token]), "logits")
        token = int(executor.step([item])[0].argmax())
        said.append(token)
    return said


def recovery(here: Context) -> None:
    """Restarts answers in their middle, with prompt and history as one, as after a lost agent."""
    made = small(here)
    sessions, tokens = (16, 64) if here.is_cuda else (3, 12)
    for name, temperature in (("greedy", 0.0), (f"sampled at {_TEMPERATURE}", _TEMPERATURE)):
        undisturbed = _answers(here, made, sessions, tokens, temperature, broken_at=0)
        broken = _answers(here, made, sessions, tokens, temperature, broken_at=tokens // 2)
        equal = sum(a == b for a, b in zip(undisturbed, broken, strict=True))
        same = np.mean(
            [
                np.argmin([*(x == y for x, y in zip(a, b, strict=True)), False])
                for a, b in zip(undisturbed, broken, strict=True)
            ]
        )
        here.row(
            f"{name}: answers equal after a restart",
            equal / sessions,
            "",
            at_least=None if here.is_cuda else 1.0,
            note=f"of {sessions}; equal up to token {same:.1f} of {tokens}",
        )


def _answers(
    here: Context, made: Made, sessions: int, tokens: int, temperature: float, *, broken_at: int
) -> list[list[int]]:
    """Returns the answers of concurrent sessions, which all restart at token `broken_at`."""
    executor = decoder(here, made, sessions, 40 + tokens)
    texts = [random_tokens(executor, 12 + session, session) for session in range(sessions)]
    ways = [sampler(text, seed, temperature) for seed, text in enumerate(texts)]
    said: list[list[int]] = [[] for _ in texts]
    last = np.stack([prompt(executor, s, text) for s, text in enumerate(texts)])
    for step in range(tokens):
        for session, token in enumerate(next_tokens(last, ways)):
            said[session].append(token)
        if step + 1 == broken_at:
            for session in range(sessions):
                executor.close_session(session)
            histories = [np.array([*texts[s], *said[s]], np.int64) for s in range(sessions)]
            last = np.stack([prompt(executor, s, each) for s, each in enumerate(histories)])
            continue
        items = [
            StepItem(s, executor._book.cached[s], np.array([said[s][-1]]), "logits")
            for s in range(sessions)
        ]
        last = np.stack(executor.step(items))
    executor.close()
    return said


def errors(here: Context) -> None:
    """Makes steps fail, each in a process of its own, and checks how the errors are classified."""
    for name in ("memory", "sticky"):
        command = [sys.executable, "-m", "benchmarks.gpu.stages.check_sessions", name]
        command += [str(here.folder), *(["tiny"] * here.tiny)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
        for line in done.stdout.splitlines():
            what, _, value = line.rpartition(": ")
            if value in _VERDICTS.values():  # other lines say more about what happened
                here.row(
                    f"{name}: {what}", 0 if value == _VERDICTS[True] else 1, at_most=0, note=value
                )
        here.row(f"{name}: exit code", done.returncode, at_most=0)


def without_memory(here: Context) -> None:
    """Takes nearly all memory away, and runs a prompt that needs more."""
    # The layers are as wide as real ones, because tiny ones hardly need memory.
    made = make(here, Wanted("smollm2-135m", 4096, layers=1, on_device=True))
    length, spare_bytes = (4000, 24 << 20) if here.is_cuda else (1600, 6 << 20)
    executor = decoder(here, made, 2, 4096)
    logits = prompt(executor, 0, random_tokens(executor, 20, 0))
    executor.open_session(1, 0)
    long = StepItem(1, 0, random_tokens(executor, length, 1), "logits")
    give_back = _take_memory(here, spare_bytes)
    trouble = DeviceErrorKind.OTHER
    try:
        executor.step([long])
    except (CatenaryError, MemoryError) as error:
        trouble = error_kind_of(error)
    _say("a prompt that does not fit is out of memory", trouble is DeviceErrorKind.MEMORY)
    token = np.array([int(logits.argmax())])
    (during,) = executor.step([StepItem(0, 20, token, "logits")])
    _say("a session beside it goes on", bool(np.isfinite(during).all()))
    give_back()
    (after,) = executor.step([long])
    fresh = decoder(here, made, 2, 4096)
    fresh.open_session(1, 0)
    (wanted,) = fresh.step([long])
    _say("with memory again it says what it should", np.allclose(after, wanted, atol=1e-3))


def _take_memory(here: Context, spare: int) -> Any:
    """Leaves `spare` bytes, fewer than the prompt needs; returns a function that undoes it."""
    if here.is_cuda:
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        share = (torch.cuda.memory_reserved() + spare) / total
        torch.cuda.set_per_process_memory_fraction(share)
        return lambda: torch.cuda.set_per_process_memory_fraction(1.0)
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_AS, before)


def with_a_sticky_error(here: Context) -> None:
    """Looks up a row that does not exist, which on a GPU only the device itself detects."""
    import torch

    device = here.torch_device
    table = torch.zeros(4, 8, device=device)
    began = time.monotonic()
    trouble = None
    try:
        torch.nn.functional.embedding(torch.tensor([5], device=device), table)
        here.sync()
    except Exception as error:
        trouble = error_kind_of(error)
        print(type(error).__name__, str(error).splitlines()[0], flush=True)
    wanted = DeviceErrorKind.STICKY if here.is_cuda else DeviceErrorKind.OTHER
    _say(f"the error is {wanted.value}", trouble is wanted)
    _say("it is known within a second", time.monotonic() - began < 1.0 or not here.is_cuda)
    if here.is_cuda:
        try:
            torch.zeros(1, device=device).sum().item()
        except Exception as error:
            _say("what follows is sticky as well", error_kind_of(error) is DeviceErrorKind.STICKY)
        else:
            _say("what follows is sticky as well", yes=False)


def _say(what: str, yes: bool) -> None:
    print(f"{what}: {_VERDICTS[bool(yes)]}", flush=True)


if __name__ == "__main__":
    _PARTS = {"memory": without_memory, "sticky": with_a_sticky_error}
    _PARTS[sys.argv[1]](Context(Path(sys.argv[2]), tiny=len(sys.argv) > 3))
