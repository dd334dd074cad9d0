"""A gateway that can be asked from its dashboard: one model that chats, one that sees colours.

The scheduler and both agents are scripted; what is between them and the page is real.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from catenary_gateway.observability.history import STEP_S, STEPS
from catenary_gateway.observability.outcome_kinds import OutcomeKind
from catenary_protos.catenary.v1 import admin_pb2, frame_pb2
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.settings import TransportSettings
from gateway_harness import AGENT, EchoAgent, Endpoints, gateway_among, rows_of, served, spec
from generation_harness import Session, SessionScheduler, TextAgent, generating
from scheduling_cases import large_cluster
from small_models.tiny_tokenizer import text_model

COLOURS = ("red", "green", "blue")
SIDE = 32
CHATS, SEES = "tiny", "colours"


class ColourAgent(EchoAgent):
    """Answers pictures with the mean of each of their three planes."""

    def answer(self, header: frame_pb2.FrameHeader, payload: bytes) -> None:
        means = rows_of(np.empty(0), header, payload).mean(axis=(2, 3)).astype(np.float32)
        del header.tensors[:]
        header.tensors.add(name="out_0", datatype="FP32", shape=means.shape, nbytes=means.nbytes)
        super().answer(header, means.tobytes())


@dataclass
class AskedPlace(Endpoints):
    """The gateway and its scripted peers."""

    scheduler: SessionScheduler
    writer: TextAgent
    asked: list[str]
    """The prompts of all sessions, as the writer was given them."""

    @property
    def page(self) -> str:
        return f"http://{self.http}/"


@asynccontextmanager
async def asked_place(
    tmp_path: Path, *, says: str, **settings: object
) -> AsyncIterator[AskedPlace]:
    """Starts everything; the model that chats says `says`."""
    models = tmp_path / "models"
    text_model(models, CHATS)
    (models / SEES / "1").mkdir(parents=True)
    (models / SEES / "1" / "labels.txt").write_text("\n".join(COLOURS))
    sees = served(
        SEES, [spec("in_0", "FP32", -1, 3, SIDE, SIDE)], [spec("out_0", "FP32", -1, len(COLOURS))]
    )
    scheduler = SessionScheduler([generating(CHATS), sees])
    scheduler.agent = "writer"
    scheduler.answers = large_cluster.answers()
    scheduler.answers["DrainAgent"] = lambda _: admin_pb2.DrainAgentResponse(drained=True)
    transports = TransportSettings(runtime_dir=tmp_path / "run")
    asked: list[str] = []

    async def write(session: Session) -> None:
        asked.append(bytes(max(0, token - 3) for token in session.opening.token_ids).decode())
        await session.say(says, finish="stop")

    writer = TextAgent("writer", TransportHub("writer", transports), write)
    seer = ColourAgent(TransportHub(AGENT, transports))
    known = {"model_repository": models, **settings}
    async with gateway_among(tmp_path, scheduler, [seer, writer], **known) as gateway:
        yield AskedPlace(gateway, scheduler, writer, asked)


def remember_an_hour(place: AskedPlace, seed: int = 1) -> None:
    """Gives the gateway an hour of three models behind it, with a rush in its middle."""
    draw = random.Random(seed)
    history = place.gateway._plane.request_metrics.history
    history._began_ns -= STEPS * STEP_S * 10**9
    first = history._began_ns // (STEP_S * 10**9)
    for step in range(STEPS):
        now_ns = (first + step) * STEP_S * 10**9
        rush = 3.0 if 150 < step < 200 else 1.0
        for model, rate, answer_ns in (
            ("efficientnet-lite0:1", 30, 60e6),
            ("resnet-50:1", 12, 90e6),
        ):
            for _ in range(int(draw.gauss(rate * rush, rate / 6))):
                took_ns = int(draw.lognormvariate(0, 0.35) * answer_ns * rush)
                late = took_ns > 4 * answer_ns
                kind = OutcomeKind.LATE if late else OutcomeKind.GOOD
                if rush > 1 and draw.random() < 0.12:
                    history.add(model, now_ns, OutcomeKind.REFUSED)
                else:
                    history.add(model, now_ns, kind, took_ns)
        if step > 40:
            history.add("smollm2-135m:1", now_ns, OutcomeKind.GOOD, int(draw.uniform(1e9, 3e9)))
            for _ in range(draw.randrange(200, 320)):
                history.add_token("smollm2-135m:1", now_ns)


def picture(*, red: int, green: int, blue: int, side: int = 64) -> bytes:
    """Returns a PNG file of one colour."""
    row = b"\0" + bytes((red, green, blue)) * side
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * side)),
        (b"IEND", b""),
    )
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + chunks
