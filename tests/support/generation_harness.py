"""A real gateway between a scripted scheduler of sessions and scripted agents that generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from catenary_protos.catenary.v1 import common_pb2, frame_pb2, generation_pb2, scheduler_pb2
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.interface import ReceivedFrame
from catenary_services.transport.settings import TransportSettings
from gateway_harness import Down, Endpoints, ScriptedScheduler, echo, gateway_among
from shared_helpers.waiting import until
from small_models.tiny_tokenizer import END, text_model, tokens_of

SESSION_TOKENS = 512


def generating(name: str = "tiny", **facts: object) -> scheduler_pb2.ServedModel:
    """A served model that generates text."""
    known: dict[str, object] = {
        "version": "1",
        "ready": True,
        "platform": "decoder",
        "generates": True,
        "session_tokens": SESSION_TOKENS,
        "default_slo_ns": 30 * 10**9,
    }
    return scheduler_pb2.ServedModel(name=name, **(known | facts))


@dataclass
class Session:
    """A session as an agent was given it."""

    agent: TextAgent
    session_id: int
    opening: frame_pb2.SessionOpening
    position: int
    """Of the next token."""

    async def say(self, text: str = "", *, finish: str = "") -> None:
        """Sends the tokens of a text, in one frame each; `finish` with the last of them."""
        tokens = tokens_of(text) + ([END] if finish == "stop" else [])
        for at, token in enumerate(tokens):
            await self.send(token, finish if at == len(tokens) - 1 else "")

    async def send(self, token_id: int, finish: str = "", **facts: object) -> None:
        """Sends the next token."""
        token = frame_pb2.SessionToken(
            session_id=self.session_id,
            position=self.position,
            token_id=token_id,
            finish_reason=finish,
            **facts,
        )
        if self.opening.timed:
            token.timings.add(
                agent_id=self.agent.agent_id, last_block=30, wait_ns=1000, compute_ns=2000
            )
        await self.agent.push(self.opening.gateway_id, [token])
        self.position += 1

    async def score_prompt(
        self, scored: Iterable[generation_pb2.TokenLogprobs], position: int = 1
    ) -> None:
        """Sends log probabilities of the prompt's tokens from a position on."""
        part = frame_pb2.SessionPromptLogprobs(
            session_id=self.session_id, position=position, logprobs=scored
        )
        await self.agent.push(self.opening.gateway_id, (), [part])

    async def fail(self, reason: str = "PARTITION_LOST") -> None:
        """Says instead of a token that it cannot go on."""
        failure = common_pb2.Failure(reason=reason, message="gone", retryable=True)
        token = frame_pb2.SessionToken(
            session_id=self.session_id, position=self.position, failure=failure
        )
        await self.agent.push(self.opening.gateway_id, [token])


@dataclass
class Move:
    """An order to move a session, as the first agent of its ring was given it."""

    epoch: int
    order: frame_pb2.SessionMove

    def session(self, agent: TextAgent, *, skip: int = 0) -> Session:
        """What the session becomes on its new ring, `skip` tokens after the order was made."""
        opening = self.order.opening
        position = len(opening.token_ids) + skip
        return Session(agent, self.order.session_id, opening, position)


@dataclass
class TextAgent:
    """Says of every session it is given what `script` does with it."""

    agent_id: str
    hub: TransportHub
    script: Callable[[Session], object] | None = None
    opened: asyncio.Queue[Session] = field(default_factory=asyncio.Queue)
    moves: asyncio.Queue[Move] = field(default_factory=asyncio.Queue)
    frames: list[frame_pb2.FrameHeader] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def receive(self, frame: ReceivedFrame) -> None:
        header = frame_pb2.FrameHeader.FromString(frame.header)
        frame.release()
        self.frames.append(header)
        if header.HasField("move"):
            self.moves.put_nowait(Move(header.epoch, header.move))
        for rows in header.session_rows:
            opening = rows.opening
            session = Session(self, rows.session_id, opening, len(opening.token_ids))
            self.opened.put_nowait(session)
            if self.script is not None:
                task = asyncio.create_task(self.script(session))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def push(
        self,
        gateway: str,
        tokens: Iterable[frame_pb2.SessionToken],
        prompts: Iterable[frame_pb2.SessionPromptLogprobs] = (),
    ) -> None:
        header = frame_pb2.FrameHeader(
            kind=frame_pb2.FRAME_KIND_SESSION_TOKENS, session_tokens=tokens, prompt_logprobs=prompts
        )
        link = await self.hub.link_to(gateway, 5.0)
        await link.push(await link.export(0, 5.0), header.SerializeToString(), 5.0)

    async def session(self) -> Session:
        """The next session it was given."""
        async with asyncio.timeout(30):
            return await self.opened.get()

    async def move(self) -> Move:
        """The next order it was given to move a session."""
        async with asyncio.timeout(30):
            return await self.moves.get()


class SessionScheduler(ScriptedScheduler):
    """Starts every session on `agent`, unless `session_script` is replaced."""

    def __init__(self, models: Iterable[scheduler_pb2.ServedModel]) -> None:
        super().__init__(list(models))
        self.agent = "agent-0"
        self.starts = 0
        self.session_script = self.one_start

    def one_start(self, submit: scheduler_pb2.SubmitSession) -> list[Down]:
        return [] if submit.session_id else [self.start_session(submit.request_id)]

    def move_session(self, moved: Session, agent: str, **facts: object) -> Down:
        """The order to move a session to another agent."""
        order = self.start_session(moved.opening.request_id, agent)
        order.start_session.moved_session_id = moved.session_id
        order.start_session.move_mode = facts.get("mode", scheduler_pb2.MOVE_MODE_KV)
        return order

    def start_session(self, request_id: int, agent: str = "") -> Down:
        self.starts += 1
        hop = common_pb2.Hop(agent_id=agent or self.agent, model="tiny", last_block=30)
        return Down(
            start_session=scheduler_pb2.StartSession(
                epoch=self.epoch,
                session_id=self.epoch << 40 | self.starts,
                request_id=request_id,
                plan_id="p",
                route=[hop],
            )
        )


@dataclass
class TextStage(Endpoints):
    """A gateway that serves text and its scripted peers."""

    scheduler: SessionScheduler
    agents: list[TextAgent]

    @property
    def agent(self) -> TextAgent:
        return self.agents[0]

    @property
    def http(self) -> str:
        return f"http://{super().http}"

    def leftovers(self) -> dict[str, int]:
        """What the gateway still holds; all zero when nothing is unanswered."""
        plane, admission = self.gateway._sessions, self.gateway._capacity
        return {
            "requests": len(plane._requests),
            "sessions": len(plane._starts._sessions),
            "successors": len(plane._starts._successors),
            "deliveries": len(plane._starts._deliveries),
            "bytes": admission.bytes,
            "admitted": admission.requests,
        }

    async def is_empty(self) -> None:
        """Waits until nothing is held; fails if something stays."""
        await until(lambda: not any(self.leftovers().values()), "that all is free")

    async def start_over(self) -> None:
        """Forgets what was asked for and scripted, once nothing is held."""
        await self.is_empty()
        self.scheduler.session_script = self.scheduler.one_start
        self.scheduler.heard = asyncio.Queue()
        for agent in self.agents:
            agent.frames.clear()
            agent.opened, agent.moves = asyncio.Queue(), asyncio.Queue()


async def answering(session: Session) -> None:
    """Says "Hello!" and ends."""
    await session.say("Hello!", finish="stop")


@asynccontextmanager
async def text_stage(
    tmp_path: Path,
    *,
    agents: int = 1,
    exporter=None,
    models=(),
    agent_type: type[TextAgent] = TextAgent,
    files: Callable[[Path], object] = text_model,
    **settings: object,
) -> AsyncIterator[TextStage]:
    """Starts everything; nothing may be left over at the end.

    `files` writes the files of the model "tiny" below the repository.
    """
    files(tmp_path / "models")
    served = list(models) or [generating(), echo("toy", ("FP32", -1, 4))]
    scheduler = SessionScheduler(served)
    transports = TransportSettings(runtime_dir=tmp_path / "run")
    names = [f"agent-{number}" for number in range(agents)]
    team = [agent_type(name, TransportHub(name, transports)) for name in names]
    settings = {"model_repository": tmp_path / "models", **settings}
    started = gateway_among(tmp_path, scheduler, team, exporter=exporter, **settings)
    async with started as gateway:
        stage = TextStage(gateway, scheduler, team)
        yield stage
        await stage.is_empty()
