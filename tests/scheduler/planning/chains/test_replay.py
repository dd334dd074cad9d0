"""Sessions that arrived once are replayed on chains, by hand and beside the lower bound."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass

import pytest

from catenary_scheduler.planning.chains import (
    ChainTask,
    ComposedChain,
    Server,
    best_composition,
    recompose,
)
from catenary_scheduler.planning.chains.replay import LogReplay, SessionLog, replayed

SECOND = 10**9


def test_sessions_take_the_fastest_free_chain_and_wait_in_one_queue() -> None:
    times = {0: 10, 1: 30}
    # At 0 the fast chain, at 1 the slow one, at 2 and 3 they wait: from 10 and from 20 on it.
    responses = replayed([1, 1], [0, 1, 2, 3, 30], lambda _, rank: times[rank])
    assert responses == [10, 30, 18, 27, 10]


def test_who_ends_when_another_arrives_has_ended_before() -> None:
    assert replayed([1, 1], [0, 10], lambda _, rank: (10, 30)[rank]) == [10, 10]


def test_a_session_takes_what_its_own_tokens_take() -> None:
    tokens = [5, 50, 5]
    assert replayed([1], [0, 0, 0], lambda number, _: tokens[number]) == [5, 55, 60]
    assert replayed([2], [0, 0, 0], lambda number, _: tokens[number]) == [5, 50, 10]


def test_chains_without_room_for_a_session_are_no_chains() -> None:
    assert replayed([0, 1], [0, 0], lambda _, rank: (1, 7)[rank]) == [7, 14]


def test_a_log_is_stretched_to_the_rate_that_is_planned_for() -> None:
    log = SessionLog((100, 100 + SECOND, 100 + 4 * SECOND), (1, 2, 3), (4, 5, 6))
    slower = log.at_rate(0.25)
    assert slower.arrived_ns == (0, 2 * SECOND, 8 * SECOND)
    assert slower.output_tokens == log.output_tokens
    assert SessionLog((7, 7), (1, 1), (1, 1)).at_rate(9.0).arrived_ns == (7, 7)


@dataclass(frozen=True)
class Times:
    """Times of a session over two kinds of servers."""

    travel_s: float
    block_s: float

    def server_s(self, name: str) -> float:
        return self.block_s * (1.0 if int(name[1:]) < 4 else 1.6)

    def __call__(self, chain: ComposedChain) -> float:
        return sum(self.travel_s + self.server_s(hop.server) * hop.blocks for hop in chain.hops)


PROMPT, WHOLE = Times(0.1, 0.02), Times(1.0, 0.1)
"""A session of 100 and 20 tokens takes 0.1 s of a block, a fifth of that for its prompt."""


def task(rate_per_s: float) -> ChainTask:
    servers = tuple(
        Server(name, 40 if n < 4 else 20, WHOLE.travel_s, WHOLE.server_s(name))
        for n, name in enumerate(f"s{number}" for number in range(12))
    )
    return ChainTask(servers, 70, 1.32, 0.11, rate_per_s)


def bursts(count: int, each: int, pause_s: float, seed: int = 1) -> SessionLog:
    chance = random.Random(seed)
    moments = sorted(
        int((burst * pause_s + chance.random()) * SECOND)
        for burst in range(count // each)
        for _ in range(each)
    )
    outputs = [chance.choice((5, 35)) for _ in moments]
    return SessionLog(tuple(moments), (100,) * len(moments), tuple(outputs))


def replay_of(log: SessionLog, rate_per_s: float, most_sessions: int = 10**6) -> LogReplay:
    return LogReplay(log.at_rate(rate_per_s), PROMPT, WHOLE, 100.0, 20.0, most_sessions)


def test_bursts_get_more_caches_than_their_mean_rate_asks_for() -> None:
    log = bursts(600, 60, 1200.0)
    rate = 0.05
    replay, whole = replay_of(log, rate), task(rate)
    by_bound, by_replay = best_composition(whole), best_composition(whole, replay)
    assert by_replay.capacity > by_bound.capacity
    assert replay(by_replay) < 0.95 * replay(by_bound)
    # Not only on what was tuned for: other bursts gain too.
    others = replay_of(bursts(600, 60, 1200.0, seed=2), rate)
    assert others(by_replay) < others(by_bound)


def test_chains_in_force_are_recomposed_by_the_same_measure() -> None:
    rate = 0.05
    replay, whole = replay_of(bursts(600, 60, 1200.0), rate), task(rate)
    present = best_composition(whole)
    found = recompose(whole, present, replay)
    assert replay(found) <= 1.05 * replay(best_composition(whole, replay))
    assert recompose(whole, found, replay).moved_blocks == 0


def test_a_mean_session_alone_takes_the_time_of_its_chain() -> None:
    whole = task(0.05)
    composition = best_composition(whole)
    log = SessionLog((0,), (100,), (20,))
    alone = LogReplay(log, PROMPT, WHOLE, 100.0, 20.0, 1)
    fastest = min(WHOLE(chain) for chain in composition.chains)
    assert alone(composition) == pytest.approx(fastest)
    assert fastest == pytest.approx(min(chain.service_s for chain in composition.chains))


def test_a_chain_takes_no_more_sessions_than_a_batch() -> None:
    log, rate = bursts(120, 60, 1200.0), 0.05
    whole = task(rate)
    composition = best_composition(whole, replay_of(log, rate))
    assert replay_of(log, rate, most_sessions=1)(composition) > replay_of(log, rate)(composition)


def test_a_replay_goes_to_a_process_of_its_own() -> None:
    whole = task(0.05)
    replay = replay_of(bursts(240, 60, 1200.0), 0.05)
    there = pickle.loads(pickle.dumps(replay))
    composition = best_composition(whole)
    assert there(composition) == replay(composition)
