"""Answers with grammars by a whole model in this process, several sessions a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from catenary_agent.decoders.base import DecoderExecutor, StepItem
from catenary_agent.decoders.sampling.grammar_masks import GrammarMasks
from catenary_agent.decoders.sampling.sampling import STOP, SessionSampler
from catenary_services.domain.sampling import SamplingParameters


@dataclass
class ConstrainedAnswer:
    """The tokens of an answer, why it ended, and its text."""

    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    text: str = ""


def answers(
    executor: DecoderExecutor,
    masks: GrammarMasks,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    asked: Sequence[SamplingParameters],
) -> list[ConstrainedAnswer]:
    """Returns what a model answers to a prompt, once for each of some parameters."""
    found = [ConstrainedAnswer() for _ in asked]
    ends = executor.table.end_token_ids
    samplers = []
    for session, parameters in enumerate(asked):
        sampler = SessionSampler(parameters, prompt, len(prompt), ends)
        if parameters.grammar:
            sampler.mask = masks.begin(session, parameters.grammar, (), parameters.min_tokens)
        samplers.append(sampler)
        executor.open_session(session, 0, len(prompt) + parameters.max_tokens)
    position, running = 0, list(range(len(asked)))
    while running:
        items = [
            StepItem(
                session,
                position,
                np.array(found[session].tokens[-1:] or prompt, np.int64),
                "token",
                samplers[session],
            )
            for session in running
        ]
        position += len(items[0].inputs)
        for session, result in zip(list(running), executor.step(items), strict=True):
            assert result is not None
            token, answer = int(result[0]), found[session]
            assert token >= 0, (asked[session].grammar, samplers[session].mask)
            answer.reason = samplers[session].accept(token)
            if answer.reason != STOP:
                answer.tokens.append(token)
            if answer.reason:
                running.remove(session)
                executor.close_session(session)
    for answer in found:
        answer.text = tokenizer.decode(answer.tokens, skip_special_tokens=False)
    return found
