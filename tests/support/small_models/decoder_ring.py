"""Runs decoder executors one behind the other, as agents of a ring would, without the agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from catenary_agent.decoders.base import DecoderExecutor, StepItem, Want


class DecoderRing:
    """Executors that together have all blocks of a model, in order."""

    def __init__(self, executors: Sequence[DecoderExecutor]) -> None:
        self.executors = executors
        self.tokens: dict[int, list[int]] = {}
        """Session -> prompt and what was generated."""
        self.cached: dict[int, int] = {}

    def open(self, session: int, prompt: Sequence[int]) -> None:
        for executor in self.executors:
            executor.open_session(session, executor.key.first_block)
        self.tokens[session] = list(prompt)
        self.cached[session] = 0

    def close(self, session: int) -> None:
        for executor in self.executors:
            executor.close_session(session)
        del self.tokens[session], self.cached[session]

    def advance(self, chunks: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Runs the next so many tokens of each session in one step.

        Where they are the last known ones, the likeliest next token is appended; returns the
        logits of those sessions.
        """
        rows: dict[int, np.ndarray | None] = {}
        positions = dict(self.cached)
        for session, count in chunks.items():
            start = positions[session]
            rows[session] = np.array(self.tokens[session][start : start + count], np.int64)
            self.cached[session] += count
        done = {s for s in chunks if self.cached[s] == len(self.tokens[s])}
        for executor in self.executors:
            last = executor.key.last_block == executor.table.blocks
            items = []
            for session, inputs in rows.items():
                want: Want = "hidden" if not last else "logits" if session in done else "nothing"
                assert inputs is not None
                items.append(StepItem(session, positions[session], inputs, want))
            rows = dict(zip(rows, executor.step(items), strict=True))
        logits = {s: row for s, row in rows.items() if row is not None}
        assert logits.keys() == done
        for session, row in logits.items():
            self.tokens[session].append(int(row.argmax()))
        return logits

    def generate(
        self, prompts: Mapping[int, Sequence[int]], tokens: int, chunk: int = 1 << 20
    ) -> dict[int, list[int]]:
        """Returns so many greedy tokens per prompt; prompts in chunks, beside decoding sessions."""
        for session, prompt in prompts.items():
            self.open(session, prompt)
        answers: dict[int, list[int]] = {}
        while len(answers) < len(prompts):
            left = {s: len(self.tokens[s]) - self.cached[s] for s in prompts if s not in answers}
            self.advance({session: min(chunk, count) for session, count in left.items()})
            for session in left:
                answer = self.tokens[session][len(prompts[session]) :]
                if len(answer) == tokens:
                    answers[session] = answer
                    self.close(session)
        return answers

    def close_all(self) -> None:
        for executor in self.executors:
            executor.close()
