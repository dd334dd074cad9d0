"""Stability of sampled answers when they are computed again, in each datatype of PyTorch.

An agent that takes over a session computes prompt and answer again, many rows at a time, where the
first one computed the answer row by row: sums are added in another order. Both are done here with
the executor of agents, on a CPU, at temperature 0.9 without filters:

* answers: prompts of different length are answered in mixed steps, a session that decodes beside
  chunks of others' prompts. Then the first half of every answer is read again behind its prompt, in
  chunks, and the rest is generated anew. An answer is equal if the second half is the same.
* flips: for every token of every answer, whether the logits of the one way and of the other choose
  different tokens with the same noise, of several seeds.

    python -m benchmarks.decoders.sampling flips --answers 48 --numbers float16 bfloat16
    python -m benchmarks.decoders.sampling times
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.decoders.decoding import MODELS, NAMES
from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.sampling.choosing import TokenSampler
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.sampling import SessionSampler
from catenary_agent.decoders.torch.torch_executor import TorchDecoder
from catenary_agent.executors.device import Device
from catenary_lab.limits import Figure, at_least, at_most, table
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model

NUMBERS = ("float32", "float16", "bfloat16")
LIMITS = {"float32": 1.0, "float16": 0.9, "bfloat16": 0.9}
"""Share of answers that must stay equal, by datatype."""
ANSWER_TOKENS, KEPT_TOKENS = 64, 32
CHUNK_TOKENS = 64
SESSIONS = 8
"""Number of sessions that one step samples for."""
SESSION_TOKENS = 256
TEMPERATURE = 0.9
DRAWS = 8
"""Number of seeds for every token; the sampler's own seed is the first."""
TOPICS = ("rain", "a bridge", "bread", "the moon", "a server that is slow", "trees in winter")
ASKED = (
    "Write a short story about {}.",
    "Explain {} to a child, in simple words and with an example from daily life.",
    "What is it about {} that people like? Name three reasons, and say which one is the best.",
    "Write a letter to a friend who has never heard of {}.",
    "{}?",
    "List things that have to do with {}.",
    "Write a poem about {} with two verses. It should not rhyme, it should be about loss, and the"
    " last line should be the same as the first.",
    "Two people disagree about {}. Write down what they say.",
)


@dataclass(slots=True)
class Answer:
    """One session: the known part of its text, and the logits behind each token of the answer."""

    number: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)


@dataclass(slots=True)
class Compared:
    """Counts over all answers in one datatype."""

    answers: int = 0
    equal: int = 0
    draws: int = 0
    flips: int = 0
    difference: float = 0.0
    """Sum over tokens of the standard deviation by which logits differ."""

    @property
    def flipped(self) -> float:
        """Share of tokens that flip."""
        return self.flips / max(1, self.draws)


def prompts(repository: ModelRepository, count: int) -> list[list[int]]:
    """Returns chats as token ids, at most 48 of them."""
    from transformers import AutoTokenizer

    key = ensure_model(MODELS, NAMES["fp32"])
    tokenizer: Any = AutoTokenizer.from_pretrained(repository.folder(key))
    texts = [asked.format(topic) for topic in TOPICS for asked in ASKED]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in texts[:count]
    ]


def load(numbers: str, threads: int) -> TorchDecoder:
    """Returns an executor of the whole of SmolLM2-135M on a CPU."""
    key = ensure_model(MODELS, NAMES["fp32"])
    repository = ModelRepository(MODELS)
    blocks = repository.decoder_table(key).blocks
    layout = CacheLayout((SESSIONS + 1) * blocks, SESSION_TOKENS, (0,))
    whole = PartitionKey(key, 0, blocks)
    return TorchDecoder(repository, whole, Device.parse("cpu"), layout, threads, numbers)


def sampler_of(answer: Answer, known: Sequence[int], draw: int = 0) -> SessionSampler:
    """Returns the sampler of an answer behind the tokens `known`, prompt included."""
    seed = 1000 * draw + answer.number
    parameters = SamplingParameters(
        temperature=TEMPERATURE, seed=seed, max_tokens=ANSWER_TOKENS, ignore_eos=True
    )
    return SessionSampler(parameters, known, len(answer.prompt), ())


def generate(executor: TorchDecoder, chooser: TokenSampler, answers: Sequence[Answer]) -> None:
    """Continues answers to `ANSWER_TOKENS`, in steps that mix chunks and single tokens.

    One session joins every third step, and a step computes at most one chunk.
    """
    cached: dict[int, int] = {}
    waiting = list(answers)
    running: list[Answer] = []
    step = 0
    while waiting or running:
        if waiting and step % 3 == 0 and len(running) < SESSIONS:
            running.append(waiting.pop(0))
            executor.open_session(running[-1].number, 0)
            cached[running[-1].number] = 0
        items: list[StepItem] = []
        computed: list[Answer] = []
        left = CHUNK_TOKENS
        for answer in running:
            known = [*answer.prompt, *answer.tokens]
            at = cached[answer.number]
            count = min(len(known) - at, max(1, left))
            if count > 1:
                left -= count
            elif len(known) - at > 1:
                continue
            rows = np.array(known[at : at + count], np.int64)
            is_end = at + count == len(known)
            items.append(StepItem(answer.number, at, rows, "logits" if is_end else "nothing"))
            computed.append(answer)
            cached[answer.number] += count
        for answer, logits in zip(computed, executor.step(items), strict=True):
            if logits is None:
                continue
            known = [*answer.prompt, *answer.tokens]
            sampler = sampler_of(answer, known)
            answer.tokens += chooser.choose(logits[None], [(answer.number, sampler)], [0])
            answer.logits.append(logits)
        for answer in [each for each in running if len(each.tokens) == ANSWER_TOKENS]:
            executor.close_session(answer.number)
            running.remove(answer)
        step += 1


def read_again(executor: TorchDecoder, answer: Answer) -> NDArray[np.float32]:
    """Returns the logits behind every token of an answer, [tokens, vocabulary], in chunks."""
    import torch

    known = [*answer.prompt, *answer.tokens[:-1]]
    executor.open_session(answer.number, 0)
    rows = []
    for at in range(0, len(known), CHUNK_TOKENS):
        part = np.array(known[at : at + CHUNK_TOKENS], np.int64)
        (hidden,) = executor.step([StepItem(answer.number, at, part, "hidden")])
        assert hidden is not None
        rows.append(hidden)
    executor.close_session(answer.number)
    whole = torch.from_numpy(np.concatenate(rows)[len(answer.prompt) - 1 :])
    with torch.inference_mode():
        found: NDArray[np.float32] = executor._model.logits(whole).numpy()
    return found


def compare(numbers: str, count: int, threads: int) -> Compared:
    """Answers `count` prompts in a datatype, and reads them again."""
    executor = load(numbers, threads)
    chooser = numpy_chooser(executor.table.vocabulary_size)
    found = Compared()
    asked = [Answer(n, p) for n, p in enumerate(prompts(ModelRepository(MODELS), count))]
    for first in range(0, len(asked), SESSIONS):
        group = asked[first : first + SESSIONS]
        generate(executor, chooser, group)
        # The sessions run together with others than before, in another order.
        again = [Answer(a.number, a.prompt, a.tokens[:KEPT_TOKENS]) for a in reversed(group)]
        generate(executor, chooser, again)
        found.answers += len(group)
        found.equal += sum(a.tokens == b.tokens for a, b in zip(group, again[::-1], strict=True))
        for answer in group:
            _count_flips(chooser, answer, read_again(executor, answer), found)
            answer.logits.clear()
    executor.close()
    return found


def _count_flips(
    chooser: TokenSampler, answer: Answer, again: NDArray[np.float32], found: Compared
) -> None:
    for place, (before, after) in enumerate(zip(answer.logits, again, strict=True)):
        known = [*answer.prompt, *answer.tokens[:place]]
        found.difference += float((before - after).std())
        both = np.stack([before, after])
        for draw in range(DRAWS):
            asked = [(number, sampler_of(answer, known, draw)) for number in (0, 1)]
            one, other = chooser.choose(both, asked, [0, 1])
            found.draws += 1
            found.flips += one != other


def measure(numbers: Sequence[str], count: int, threads: int) -> list[Figure]:
    """Returns the figures of `compare` for each datatype."""
    figures = []
    for each in numbers:
        found = compare(each, count, threads)
        figures += [
            at_least(
                f"{each}: {found.equal} of {found.answers} answers stay equal",
                100 * found.equal / found.answers,
                "%",
                100 * LIMITS[each],
            ),
            at_most(f"{each}: tokens that flip", 100 * found.flipped, "%"),
            at_most(f"{each}: difference of logits", found.difference * DRAWS / found.draws, "sd"),
        ]
    return figures


def times(numbers: Sequence[str], threads: int, rounds: int) -> list[Figure]:
    """Returns the CPU time of a step of eight sessions, and of a chunk, in each datatype."""
    executors = {each: load(each, threads) for each in numbers}
    chunk = np.arange(1000, 1000 + CHUNK_TOKENS)
    best: dict[str, float] = {}
    at = CHUNK_TOKENS
    for executor in executors.values():
        for session in range(SESSIONS):
            executor.open_session(session, 0)
            executor.step([StepItem(session, 0, chunk, "nothing")])
    for _ in range(rounds):
        for name, executor in executors.items():
            decoding = [StepItem(s, at, np.array([77]), "logits") for s in range(SESSIONS)]
            executor.open_session(SESSIONS, 0)
            for what, items in (
                ("step of 8 sessions", decoding),
                ("chunk of 64", [StepItem(SESSIONS, 0, chunk, "logits")]),
            ):
                started = time.process_time()
                executor.step(items)
                took = 1e3 * (time.process_time() - started)
                label = f"{name}, {what}"
                best[label] = min(best.get(label, took), took)
            executor.close_session(SESSIONS)
        at += 1
    for executor in executors.values():
        executor.close()
    return [at_most(label, took, "ms") for label, took in best.items()]


def run(quick: bool) -> list[Figure]:
    """Returns the figures of this bench."""
    return measure(NUMBERS, 8 if quick else 48, 2) + times(NUMBERS, 2, 4 if quick else 16)


def main() -> None:
    """Prints the figures that the command line names."""
    parser = argparse.ArgumentParser(prog="benchmarks.decoders.sampling", description=__doc__)
    parser.add_argument("what", choices=("flips", "times"))
    parser.add_argument("--answers", type=int, default=48, help="at most 48")
    parser.add_argument("--numbers", nargs="+", choices=NUMBERS, default=NUMBERS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=16)
    arguments = parser.parse_args()
    for numbers in arguments.numbers:
        if arguments.what == "flips":
            figures = measure([numbers], arguments.answers, arguments.threads)
        else:
            figures = times([numbers], arguments.threads, arguments.rounds)
        print(table(figures), flush=True)


if __name__ == "__main__":
    main()
