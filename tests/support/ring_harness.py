"""A tiny exact decoder and rings of agents, for tests of generation: real transports, no weights."""

from __future__ import annotations

import asyncio
import string
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models

from catenary_agent.decoders.base import CacheLayout, DecoderCost, StepItem
from catenary_agent.decoders.cache.slot_book import SlotBook
from catenary_agent.decoders.row_results import row_results
from catenary_agent.decoders.sampling.grammar_masks import GrammarMasks
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.generation.context import GenerationContext, GenerationLimits
from catenary_agent.generation.loop.engine import GenerationEngine
from catenary_agent.generation.loop.table import LoadedDecoder
from catenary_agent.generation.meter import GenerationMeter
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_agent.kv import CacheSpan
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, generation_pb2
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.logprobs import TokenLogprobs
from catenary_services.grammar.vocabulary import TokenVocabulary
from shared_helpers.waiting import until
from tests.support.agent_harness import SECOND_NS, Net, Node, TestPeer

MODEL = ModelKey("toy", "1")
BLOCKS = 6
HIDDEN = 4
VOCABULARY = 50
END = 49
_PRIME = 32_749
_COST = DecoderCost(0, 1000, 1000, 100)

TABLE = DecoderTable(
    model_hash="0" * 64,
    blocks=BLOCKS,
    hidden_size=HIDDEN,
    attention_heads=1,
    key_value_heads=1,
    head_size=HIDDEN,
    vocabulary_size=VOCABULARY,
    context_tokens=4096,
    end_token_ids=(END,),
    block_bytes=100,
    embedding_bytes=10,
    head_bytes=10,
    cache_bytes_per_token=2 * HIDDEN * 4,
)


@cache
def toy_vocabulary() -> TokenVocabulary:
    """Returns the tokens of the toy: one letter each, and the end."""
    letters = (string.ascii_letters + string.digits)[: VOCABULARY - 1]
    words = {letter: number for number, letter in enumerate(letters)} | {"<end>": END}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return TokenVocabulary(tokenizer.to_str(), VOCABULARY, (END,))


def letters_of(token_ids: Sequence[int]) -> str:
    """Returns the letters of tokens of the toy."""
    return "".join((string.ascii_letters + string.digits)[token] for token in token_ids)


class ToyDecoder:
    """A recurrence in exact integers: outputs depend on every cached token and on their order."""

    exports_caches = True
    takes_drafts = True
    adapters = frozenset()
    caches_on_host = True
    lending = None

    def __init__(self, key: PartitionKey, layout: CacheLayout) -> None:
        self.key = key
        self.table = TABLE
        self.sizes = TABLE.held(None)
        self.memory_bytes = 1000
        self.book = SlotBook(key, TABLE, layout)
        self._state: dict[tuple[int, int], list[np.ndarray]] = {}
        """Per session and block: the state in front of each token, and behind the last one."""
        self.closed = False
        self.chooser = numpy_chooser(VOCABULARY)
        self.steps: list[list[tuple[int, int, int]]] = []
        """Per step: session, position, tokens of each item."""
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fails: Exception | None = None
        self.takes_s = 0.0
        self.period = 0
        """Number of tokens after which an answer repeats itself; 0 if it never does."""

    @property
    def layout(self) -> CacheLayout:
        return self.book.layout

    @property
    def free_block_slots(self) -> int:
        return self.book.free

    @property
    def sessions(self) -> int:
        return len(self.book.entries)

    @property
    def cached_block_tokens(self) -> int:
        return self.book.cached_block_tokens

    def block_tokens(self, session: int, tokens: int = 0) -> int:
        return self.book.block_tokens(session, tokens)

    def open_session(self, session: int, entry_block: int, tokens: int = 0) -> None:
        assert not self.closed
        self.book.open(session, entry_block, tokens)
        for block in range(entry_block, self.key.last_block):
            self._state[session, block] = [np.full(HIDDEN, block + 1, np.int64)]

    def close_session(self, session: int) -> None:
        if self.book.close(session):
            self._state = {key: value for key, value in self._state.items() if key[0] != session}

    def step(self, items: Sequence[StepItem]) -> list[np.ndarray | None]:
        assert not self.closed
        self.entered.set()
        assert self.gate.wait(20)
        if self.takes_s:
            time.sleep(self.takes_s)
        if self.fails is not None:
            raise self.fails
        self.book.check(items)
        for item in items:
            if item.scores is not None:
                # Made up, but a function of the tokens alone.
                item.scores.prompt += [TokenLogprobs(t, -t / 8, 1) for t in item.scores.following]
        self.steps.append([(each.session, each.position, len(each.inputs)) for each in items])
        return [self._run(item) for item in items]

    def _run(self, item: StepItem) -> np.ndarray | None:
        entry = self.book.entries[item.session]
        if entry == 0:
            places = np.arange(HIDDEN) + 1
            hidden = (item.inputs[:, None] * 17 * places + 3 * places) % _PRIME
        else:
            hidden = item.inputs.astype(np.int64)
        for block in range(entry, self.key.last_block):
            states = self._state[item.session, block]
            state = states[-1]
            assert len(states) == item.position + 1
            out = np.empty_like(hidden)
            for row, value in enumerate(hidden):
                state = (state * 31 + np.roll(value, 1) * (block + 7) + 13) % _PRIME
                out[row] = (value + state) % _PRIME
                states.append(state)
            hidden = out
        self.book.cached[item.session] = item.position + len(item.inputs)
        if item.want == "hidden":
            return hidden.astype(np.float32)
        if item.want == "nothing":
            return None
        ends = hidden[-1 - len(item.drafts) :]
        mixed = ends @ np.array([1, 257, 65_537, 91])
        if self.period:
            first = item.position + len(item.inputs) - len(item.drafts)
            mixed = (first + np.arange(len(ends))) % self.period
        logits = (mixed[:, None] * (np.arange(VOCABULARY) + 3) * 7919) % 10_007
        (made,) = row_results(self.chooser, logits.astype(np.float32), [item])
        return made

    def truncate(self, session: int, tokens: int) -> None:
        self.book.truncate(session, tokens)
        for block in range(self.book.entries[session], self.key.last_block):
            del self._state[session, block][tokens + 1 :]

    def export_cache(self, session: int, span: CacheSpan) -> np.ndarray:
        """Keys are the states behind the tokens, values their negatives."""
        self.book.check_export(session, span)
        made = np.empty((span.blocks, 2, span.tokens, 1, HIDDEN), np.float32)
        for row, block in zip(made, range(span.first_block, span.last_block), strict=True):
            states = self._state[session, block][span.first_token + 1 : span.last_token + 1]
            row[0, :, 0] = states
            row[1, :, 0] = np.negative(states)
        return made

    def import_cache(self, session: int, span: CacheSpan, rows: np.ndarray) -> None:
        if self.fails is not None:
            raise self.fails
        self.book.check_import(session, span, rows)
        assert (rows[:, 0] == -rows[:, 1]).all()
        for row, block in zip(rows, range(span.first_block, span.last_block), strict=True):
            states = self._state[session, block]
            assert len(states) == span.first_token + 1
            states += list(row[0, :, 0].astype(np.int64))
        self.book.imported(session, span)

    def prepare_layout(self, layout: CacheLayout) -> CacheLayout:
        layout.check(self.key)
        return layout

    def apply_layout(self, prepared: CacheLayout) -> None:
        self.book.layout = prepared

    def close(self) -> None:
        assert not self.closed
        assert not self.book.entries
        self.closed = True


def toy(first: int = 0, last: int = BLOCKS, *entries: int, slots: int = 600, tokens: int = 512):
    layout = CacheLayout(slots, tokens, tuple(sorted({first, *entries})))
    return ToyDecoder(PartitionKey(MODEL, first, last), layout)


def undisturbed(
    prompt: Sequence[int], count: int, *, ends: bool = False, period: int = 0
) -> list[int]:
    """Returns the greedy tokens of one session alone on the whole model."""
    decoder = toy(tokens=4096)
    decoder.period = period
    decoder.open_session(1, 0)
    known, pending = list(prompt), list(prompt)
    while len(known) < len(prompt) + count:
        position = len(known) - len(pending)
        [logits] = decoder.step([StepItem(1, position, np.array(pending, np.int64), "logits")])
        pending = [int(np.argmax(logits))]
        known += pending
        if ends and pending[0] == END:
            break
    return known[len(prompt) :]


Span = tuple[str, int, int]
"""An agent, and the blocks really processed there."""


def opening(
    ring: Sequence[Span],
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    prompt_tokens: int | None = None,
    budget_ns: int = 20 * SECOND_NS,
    gateway: str = "gw-0",
    timed: bool = False,
    traceparent: str = "",
    model: ModelKey = MODEL,
    decode: Sequence[Span] = (),
    **sampling: object,
) -> frame_pb2.SessionOpening:
    def hops(spans: Sequence[Span]) -> list[common_pb2.Hop]:
        return [
            common_pb2.Hop(
                agent_id=agent,
                model=model.name,
                model_version=model.version,
                first_block=first,
                last_block=last,
            )
            for agent, first, last in spans
        ]

    sampling.setdefault("ignore_eos", True)
    return frame_pb2.SessionOpening(
        gateway_id=gateway,
        request_id=7,
        route=hops(ring),
        decode_route=hops(decode),
        token_ids=prompt,
        prompt_tokens=len(prompt) if prompt_tokens is None else prompt_tokens,
        sampling=generation_pb2.SamplingParameters(max_tokens=max_tokens, **sampling),
        budget_ns=budget_ns,
        timed=timed,
        traceparent=traceparent,
    )


def opening_frame(session_id: int, made: frame_pb2.SessionOpening, epoch: int = 1):
    return frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_STEP,
        epoch=epoch,
        session_rows=[frame_pb2.SessionRows(session_id=session_id, opening=made)],
    )


def begin_frame(
    session_id: int,
    moved: int,
    made: frame_pb2.SessionOpening,
    *,
    by_tokens: bool = False,
    epoch: int = 1,
):
    """Returns what a gateway says to move a session; `made` has the new ring."""
    return frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_MOVE,
        epoch=epoch,
        move=frame_pb2.SessionMove(
            session_id=session_id,
            moved_session_id=moved,
            step=frame_pb2.SessionMove.STEP_BEGIN,
            by_tokens=by_tokens,
            opening=made,
        ),
    )


class Caller:
    """A gateway that collects the tokens of its sessions and checks their order."""

    def __init__(self, peer: TestPeer) -> None:
        self.peer = peer
        self.tokens: dict[int, list[frame_pb2.SessionToken]] = {}
        self.prompts: dict[int, list[generation_pb2.TokenLogprobs]] = {}
        """Log probabilities of the prompts that ask for them, the first token's left out."""
        self.wrong: list[str] = []
        self.moved: dict[int, int] = {}
        """What a session was before it moved."""
        self._opened: dict[int, frame_pb2.SessionOpening] = {}
        self._starts: dict[int, int] = {}
        self._changed = asyncio.Event()

    def on_frame(self, frame) -> None:
        header = frame_pb2.FrameHeader.FromString(frame.header)
        frame.release()
        for part in header.prompt_logprobs:
            scored = self.prompts.setdefault(part.session_id, [])
            if part.position != len(scored) + 1 or part.session_id in self.tokens:
                self.wrong.append(f"{part.session_id}: scores from {part.position} on")
            scored.extend(part.logprobs)
        for token in header.session_tokens:
            got = self.tokens.setdefault(token.session_id, [])
            if token.session_id in self.moved:
                self._starts.setdefault(token.session_id, token.position)
            if token.position != self._starts[token.session_id] + len(got):
                self.wrong.append(f"{token.session_id}: {token.position} after {len(got)} tokens")
            got.append(token)
        self._changed.set()

    async def open(self, session_id: int, made: frame_pb2.SessionOpening, epoch: int = 1) -> None:
        self._starts[session_id] = len(made.token_ids)
        self._opened[session_id] = made
        await self.peer.send(made.route[0].agent_id, opening_frame(session_id, made, epoch))

    async def move(
        self,
        moved: int,
        session_id: int,
        ring: Sequence[Span],
        *,
        by_tokens: bool = False,
        epoch: int = 1,
    ) -> None:
        """Asks for a session to go on as another one on another ring."""
        before = self._opened[moved]
        made = frame_pb2.SessionOpening()
        made.CopyFrom(before)
        del made.route[:], made.decode_route[:], made.token_ids[:]
        made.token_ids.extend(self.known(moved))
        hop = before.route[0]
        model = ModelKey(hop.model, hop.model_version)
        made.route.extend(opening(ring, [0], model=model).route)
        self._opened[session_id] = made
        self.moved[session_id] = moved
        first = (before.decode_route or before.route)[0].agent_id
        begin = begin_frame(session_id, moved, made, by_tokens=by_tokens, epoch=epoch)
        await self.peer.send(first, begin)

    async def ended(self, session_id: int, timeout_s: float = 30.0) -> list[int]:
        """Returns the whole answer once it is here, whether the last moves came in time or not."""
        async with asyncio.timeout(timeout_s):
            while self._end(session_id) is None:
                self._changed.clear()
                await self._changed.wait()
        return self.answer(session_id)

    def _end(self, session_id: int) -> int | None:
        """Returns which of a session and those it was had the last token; None if none had yet."""
        way: int | None = session_id
        while way is not None:
            if any(token.finish_reason for token in self.tokens.get(way, ())):
                return way
            way = self.moved.get(way)
        return None

    def known(self, session_id: int) -> list[int]:
        """Returns the prompt and all tokens of a session and of those it was, by position."""
        if session_id not in self.moved:
            known = list(self._opened[session_id].token_ids)
        else:
            known = self.known(self.moved[session_id])
        for token in self.tokens.get(session_id, ()):
            if token.position < len(known):
                assert known[token.position] == token.token_id
            else:
                assert token.position == len(known)
                known.append(token.token_id)
        return known

    def answer(self, session_id: int) -> list[int]:
        """Returns all tokens that were generated, wherever."""
        prompt = self._opened[session_id].prompt_tokens
        return self.known(session_id)[prompt:]

    async def wait_for(self, session_id: int, count: int, timeout_s: float = 30.0) -> list[int]:
        """Returns a session's tokens once it has `count`, or fails if the answer has ended."""
        async with asyncio.timeout(timeout_s):
            while (came := len(self.tokens.get(session_id, ()))) < count:
                end = self._end(session_id)
                assert end is None, f"{session_id} has {came} of {count} tokens: {end} had the last"
                self._changed.clear()
                await self._changed.wait()
        return [token.token_id for token in self.tokens[session_id]]

    async def finished(self, session_id: int, timeout_s: float = 30.0) -> list[int]:
        """Returns the tokens once the last one is here."""
        async with asyncio.timeout(timeout_s):
            while not (got := self.tokens.get(session_id)) or not got[-1].finish_reason:
                self._changed.clear()
                await self._changed.wait()
        assert not self.wrong
        return [token.token_id for token in self.tokens[session_id]]


@dataclass
class RingNode:
    """An agent that generates."""

    node: Node
    generation: GenerationEngine
    decoders: list

    @property
    def told(self):
        return self.node.told

    def host(self, decoder, read: Callable[[], TokenVocabulary] = toy_vocabulary) -> object:
        """Serves an executor, whose answers keep to grammars over what `read` returns."""
        self.decoders.append(decoder)
        masks = GrammarMasks(read, self.generation.grammar_compiled)
        batcher = PartitionBatcher(decoder, _COST, masks)
        self.generation.add_decoder(LoadedDecoder(batcher, decoder.layout, _COST))
        return decoder

    async def settled(self) -> None:
        """Returns when everything posted before was handled."""
        await self.generation.on_thread(lambda: None)
        await asyncio.sleep(0)


class RingNet:
    """Agents and gateways that know each other."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.nodes: dict[str, RingNode] = {}

    async def caller(self, peer_id: str = "gw-0") -> Caller:
        hub = self.net._hub(peer_id)
        caller = Caller(TestPeer(peer_id, hub))
        await hub.start(caller.on_frame)
        self.net.introduce()
        return caller

    async def agent(self, agent_id: str, *decoders, chunk: int = 128, **options) -> RingNode:
        node = await self.net.agent(agent_id, options.pop("engine_limits", None))
        around = GenerationContext(
            node.hub,
            node.told,
            node.engine.held,
            GenerationMeter(options.pop("metrics", None)),
            options.pop("tracer", None),
            node.engine.link,
            is_local=node.hub.is_local,
            validates=True,
        )
        # Most tests count steps and rows: guesses are for those that ask for them.
        options.setdefault("draft_tokens", 0)
        limits = GenerationLimits(chunk_tokens=chunk, **options)
        generation = GenerationEngine(agent_id, around, limits)
        generation.start()
        node.engine.hand_frames_to(generation.on_frame, generation.frame_kinds)
        made = RingNode(node, generation, [])
        self.nodes[agent_id] = made
        for decoder in decoders:
            made.host(decoder)
        await made.settled()
        return made

    async def remove(self, agent_id: str) -> None:
        """Takes an agent away without a word."""
        made = self.nodes.pop(agent_id)
        await self.net.remove(agent_id)
        for decoder in made.decoders:
            decoder.gate.set()
        await made.generation.close()

    async def all_free(self, timeout_s: float = 30.0) -> None:
        """Fails unless every slot, byte and session comes free."""
        for made in self.nodes.values():
            generation = made.generation
            idle = await generation.wait_idle(timeout_s)
            assert idle, (generation.agent_id, generation.snapshot())
            await made.settled()
            await until(lambda g=generation: not g._peers._lines)
            assert generation.block_slots[0] == 0
            await until(lambda m=made: m.node.engine.held_bytes == 0)  # a frame may come late
            for decoder in made.decoders:
                assert decoder.sessions == 0

    async def close(self) -> None:
        for made in self.nodes.values():
            for decoder in made.decoders:
                getattr(decoder, "gate", threading.Event()).set()
            await made.generation.close()
