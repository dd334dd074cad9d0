"""What the processes of live chats are given, and what is made of what they measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.emulated import EmulatedDecoder
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.executors.device import Device
from catenary_lab.live.chains.chats import (
    ChatsMeasured,
    ChatsRun,
    asked_of,
    first_chats,
    plan_document,
    times_of,
    undilated,
)
from catenary_lab.live.chains.chats_load import AnsweredChat
from catenary_lab.live.chains.emulation import KEY, write_decoder
from catenary_lab.scenarios.chains import live_chats
from catenary_lab.scenarios.chains.chats import drawn_chats
from catenary_lab.scenarios.chains.schema import FILES, Chats
from catenary_lab.scenarios.placement.settings import lines_of
from catenary_lab.scenarios.report import Report
from catenary_scheduler.planning.placement import parse_placement
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository
from cluster_harness import ROOT

SCENARIO = ROOT / "scenarios" / "chains" / "unlike-chats-live.yaml"
BLOCKS = 8
SESSIONS = 3


def scenario(*, quick: bool = False) -> Chats:
    found = FILES.load(SCENARIO, quick=quick)
    assert isinstance(found, Chats)
    return found


def run(dilation: float = 2.0) -> ChatsRun:
    wanted = scenario()
    learned, work = drawn_chats(wanted, 2.0, 1)
    return ChatsRun(wanted, dilation, "jffc", True, work, learned, 5)


@pytest.mark.parametrize("kind", ["new", "old"])
def test_steps_of_an_agent_take_what_its_lines_say_dilated(kind: str, tmp_path: Path) -> None:
    dilation, worker = 3.0, scenario().workers[kind]
    repository = ModelRepository(tmp_path / "models")
    write_decoder(
        repository, blocks=BLOCKS, block_bytes=1, cache_bytes_per_token=1, session_tokens=512
    )
    profile = tmp_path / "times.json"
    profile.write_text(json.dumps({KEY.name: times_of(worker, dilation)}))
    device = Device.parse("emulated:any", profile=profile)
    layout = CacheLayout(SESSIONS * BLOCKS, 512, (0,))
    decoder = load_decoder(repository, PartitionKey(KEY, 0, BLOCKS), device, layout)
    assert isinstance(decoder, EmulatedDecoder)
    lines = lines_of(worker, scenario().chunk_tokens)
    cost = decoder.cost
    assert cost.prefill_ns + 100 * cost.prefill_token_ns == pytest.approx(
        dilation * lines.prefill(100), rel=1e-6
    )
    assert cost.decode_lone_ns == pytest.approx(dilation * lines.decode(1, 300), rel=1e-6)
    several = cost.decode_ns + SESSIONS * cost.decode_session_ns
    assert several + 900 * cost.decode_context_token_ns == pytest.approx(
        dilation * lines.decode(SESSIONS, 900), rel=1e-6
    )


def test_every_agent_has_a_chain_with_the_cache_that_its_memory_has_room_for() -> None:
    (model,) = parse_placement(plan_document(run())).models
    assert [chain.hops[0].agent for chain in model.chains] == ["new-0", "old-1"]
    for chain, kind in zip(model.chains, scenario().agents, strict=True):
        assert chain.capacity == scenario().slots
        assert chain.cache_tokens == int(scenario().workers[kind].cache_tokens)


def test_chats_are_those_of_the_simulation_at_dilated_moments() -> None:
    work = run().work
    asked = asked_of(run(dilation=2.0))
    assert [each.due_s for each in asked] == [2.0 * ns / 1e9 for ns in work.arrived_ns]
    assert [each.input_tokens for each in asked] == work.prompts
    assert [each.output_tokens for each in asked] == work.answers
    first = first_chats(run())
    assert len(first) == 5
    assert [each.output_tokens for each in first] == list(run().learned.answers[:5])


def test_dilation_is_taken_out_of_what_was_measured() -> None:
    chat = undilated(AnsweredChat(101, 12.0, 2.0), 2.0)
    assert (chat.response_s, chat.first_token_s) == (6.0, 1.0)
    assert chat.per_token_s == pytest.approx(0.05)
    assert AnsweredChat(1, 1.0, 1.0).per_token_s == 0.0


MEASURED = ChatsMeasured(
    (
        AnsweredChat(101, 5.5, 0.5),  # within 800 ms and 90 ms a token
        AnsweredChat(101, 5.9, 0.9),  # its first token is late
        AnsweredChat(101, 10.5, 0.5),  # its others are slow
        AnsweredChat(101, 0.1, problem="DEADLINE: refused"),
    ),
    (30.0, 10.0),
    40.0,
    5,
    0.5,
    0.001,
)


def test_good_late_and_refused_are_of_all_chats_that_arrived() -> None:
    found = live_chats.figures_of(MEASURED, scenario().objectives)
    assert (found["good"], found["late"], found["refused"]) == (1, 2, 1)
    assert found["attainment"] == 0.25
    assert found["unevenness"] == pytest.approx(1.5)
    assert (found["busy_0"], found["busy_1"]) == (0.75, 0.25)
    assert found["ttft_p50_ms"] == pytest.approx(500.0)
    nothing = replace(MEASURED, chats=MEASURED.chats[-1:])
    assert live_chats.figures_of(nothing, scenario().objectives)["ttft_p99_ms"] is None


def test_the_report_has_every_policy_and_load_and_says_why_chats_were_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = []

    async def measured(run: ChatsRun, folder: Path, progress: object) -> ChatsMeasured:
        served.append((run.policy, run.named, len(run.work)))
        return MEASURED

    monkeypatch.setattr(live_chats, "run_live", measured)
    wanted = scenario()
    found = live_chats.beside(wanted, {}, lambda _line: None)
    cases = len(wanted.rates_per_s) * len(wanted.named) * len(wanted.policies)
    assert len(served) == len(found.facts["live"]) == cases
    assert {policy for policy, _, _ in served} == {"jffc", "least-time"}
    assert found.facts["live"][0]["problems"] == {"DEADLINE: refused": 1}
    text = Report("chats", wanted.title, (), ()).beside(found).markdown()
    assert "| 2/s: jffc | 4 | 1 | 2 | 1 | 75 % | 25 % | 0.50 |" in text


def test_agents_of_one_model_have_one_size_of_it() -> None:
    document = scenario().model_dump(exclude={"expect", "quick"})
    document["workers"]["old"]["weights_gb"] = 13
    with pytest.raises(InvalidInput, match="weights_gb"):
        FILES.parse(document)
    del document["live"]
    assert FILES.parse(document)


def test_the_short_form_serves_one_policy() -> None:
    short = scenario(quick=True)
    assert short.live is not None
    assert short.policies == ["least-time"]
