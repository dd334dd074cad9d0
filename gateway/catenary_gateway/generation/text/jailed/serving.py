"""The process of one model's templates and tokenizer: `serve` runs in the jail.

Orders are worked on one after the other. The kernel ends the process when one of them takes more
processor time than it may: a template or a tokenizer that never comes back cannot prevent that.
"""

from __future__ import annotations

import os
import signal
from typing import BinaryIO

import msgspec

from catenary_gateway.generation.text.jailed.model_text import ModelText
from catenary_gateway.generation.text.jailed.orders import (
    ANSWER_HEADER,
    ORDER_HEADER,
    AnswerKind,
    TextFiles,
    TextOrder,
    TextRefusal,
)
from catenary_services.errors import InvalidInput
from catenary_services.jail.child import JailWorkspace
from catenary_services.jail.confinement import keep_memory
from catenary_services.jail.orders import JailLimit

MEMORY_BYTES = 256 << 20
"""Address space beyond what the process has, for an order of a usual size."""
_USUAL_BYTES = 64 << 10
_MEMORY_PER_BYTE = 256
"""Address space of a larger order for each of its bytes. Where each is a token, it takes 180."""
_WORDS = 400


def serve(job: bytes, room: JailWorkspace) -> bytes:
    """Reads a model's files from the channel, describes them, and answers orders until it ends."""
    assert room.channel is not None
    with os.fdopen(room.channel, "rb") as orders:
        speaker = _Speaker(room.channel)
        content = _next(orders)
        model = None if content is None else _loaded(content, speaker)
        while model is not None and (content := _next(orders)) is not None:
            is_usual = len(content) <= _USUAL_BYTES
            if not is_usual:
                keep_memory(MEMORY_BYTES + _MEMORY_PER_BYTE * len(content))
            if not _answered(model, content, speaker):
                break
            if not is_usual:
                del content
                keep_memory(MEMORY_BYTES)
    return b""


class _Speaker:
    """Writes answers; processor time counts until one begins to be written."""

    def __init__(self, channel: int) -> None:
        self._channel = channel

    def say(self, kind: AnswerKind, content: bytes) -> None:
        """Writes the answer to one order into the channel."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        rest = memoryview(ANSWER_HEADER.pack(len(content), kind) + content)
        while rest:
            rest = rest[os.write(self._channel, rest) :]


def _next(orders: BinaryIO) -> bytes | None:
    """Returns the next order, whose time begins; None if there are no more."""
    header = orders.read(ORDER_HEADER.size)
    if len(header) < ORDER_HEADER.size:
        return None
    size, cpu_us = ORDER_HEADER.unpack(header)
    content = orders.read(size)
    # Nothing handles the signal, so the kernel ends the process, wherever it is.
    signal.setitimer(signal.ITIMER_PROF, cpu_us / 1e6)
    return content if len(content) == size else None


def _loaded(content: bytes, speaker: _Speaker) -> ModelText | None:
    keep_memory(MEMORY_BYTES + _MEMORY_PER_BYTE * len(content))
    try:
        model = ModelText.load(msgspec.msgpack.decode(content, type=TextFiles))
        described = msgspec.msgpack.encode(model.description())
    except BaseException as error:
        _say_failed(error, speaker)
        return None
    speaker.say(AnswerKind.RESULT, described)
    keep_memory(MEMORY_BYTES)
    return model


_orders = msgspec.msgpack.Decoder(TextOrder)


def _answered(model: ModelText, content: bytes, speaker: _Speaker) -> bool:
    """Answers one order; returns False if the process must end."""
    try:
        answer = msgspec.msgpack.encode(model.answer(_orders.decode(content)))
    except InvalidInput as error:
        refusal = TextRefusal(error.field, error.message.partition(": ")[2][:_WORDS])
        speaker.say(AnswerKind.REFUSAL, msgspec.msgpack.encode(refusal))
        return True
    except BaseException as error:
        return _say_failed(error, speaker)
    speaker.say(AnswerKind.RESULT, answer)
    return True


def _say_failed(error: BaseException, speaker: _Speaker) -> bool:
    """Says what went wrong; returns False if the process is not to be trusted after it."""
    if isinstance(error, Exception) and not isinstance(error, MemoryError):
        text = f"{type(error).__name__}: {error}"[:_WORDS]
        speaker.say(AnswerKind.FAILURE, text.encode(errors="replace"))
        return True
    # A binding that panics raises what is no `Exception`; its state is anybody's guess.
    limit = JailLimit.MEMORY if isinstance(error, MemoryError) else JailLimit.CRASH
    speaker.say(AnswerKind.END, limit.encode())
    return False
