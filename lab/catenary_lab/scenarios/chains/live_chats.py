"""Chats over unlike agents on real processes, beside their simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from catenary_lab.live.chains.chats import ChatsMeasured, ChatsRun, run_live
from catenary_lab.scenarios.cells import percentile
from catenary_lab.scenarios.chains.chats import MEASURES, drawn_chats, mean_facts
from catenary_lab.scenarios.chains.schema import Chats
from catenary_lab.scenarios.chains.schema_parts import LiveChatsSpec
from catenary_lab.scenarios.kinds import Progress, Results
from catenary_lab.scenarios.live import on_processes
from catenary_lab.scenarios.placement.schema_parts import ObjectivesSpec
from catenary_lab.scenarios.report import Bars, Cell, Findings, Measure, Table, mean

Facts = dict[str, Any]
_DRAWN = ("unevenness", "ttft_p99_ms", "attainment")


def beside(scenario: Chats, results: Results, progress: Progress) -> Findings:
    """Returns what real processes make of a scenario with a `live` section.

    Args:
        scenario: The scenario.
        results: The results of its simulations, of which nothing is needed.
        progress: Told what is going on.
    """
    spec = scenario.live
    assert spec is not None  # the runner makes sure of it
    facts = list(_measured(scenario, spec, progress))
    notes = (
        f"Live: {facts[0]['processes']:g} processes and the load generator, an emulated agent for"
        f" each of {', '.join(scenario.agents)}; time dilated {spec.dilation:g} times, which is"
        f" taken out of all figures; {spec.warm_up} chats before those that count. First tokens and"
        " responses count at the client, from the moment a chat was due.",
        f"They used {max(each['cpu_cores'] for each in facts):.2f} CPU cores at most; the load"
        f" generator was at most {1e3 * max(each['send_lag_p99_s'] for each in facts):.1f} ms late"
        " (p99).",
    )
    tables = (_figures_table(facts), _accounts_table(scenario, facts))
    return Findings(tables, _panels(scenario, facts), notes, {"live": facts})


def figures_of(measured: ChatsMeasured, objectives: ObjectivesSpec) -> Facts:
    """Returns the figures of a run by the names that its simulation has for them, and accounts.

    Good chats met both objectives, late ones missed one; refused ones have no answer.
    """
    answered = [each for each in measured.chats if not each.problem]
    good = sum(
        1e3 * each.first_token_s <= objectives.ttft_ms
        and 1e3 * each.per_token_s <= objectives.atgt_ms
        for each in answered
    )
    first_ms = [1e3 * each.first_token_s for each in answered]
    busy = measured.busy_s
    refused = len(measured.chats) - len(answered)
    return {
        "unevenness": max(busy) / (sum(busy) / len(busy)),
        "ttft_p50_ms": percentile(first_ms, 50),
        "ttft_p99_ms": percentile(first_ms, 99),
        "response_ms": mean([1e3 * each.response_s for each in answered]),
        "attainment": good / len(measured.chats),
        "requests": len(measured.chats),
        "good": good,
        "late": len(answered) - good,
        "refused": refused,
        "processes": measured.processes,
        "cpu_cores": measured.cpu_cores,
        "send_lag_p99_s": measured.send_lag_p99_s,
        **{f"busy_{at}": each / measured.seconds for at, each in enumerate(busy)},
    }


def _measured(scenario: Chats, spec: LiveChatsSpec, progress: Progress) -> Iterator[Facts]:
    for rate in scenario.rates_per_s:
        for named in scenario.named:
            for policy in scenario.policies:
                runs, problems = [], Counter[str]()
                for seed in scenario.seeds:
                    learned, work = drawn_chats(scenario, rate, seed)
                    run = ChatsRun(
                        scenario, spec.dilation, policy, named, work, learned, spec.warm_up
                    )
                    progress(f"live: {rate:g}/s by {policy}, {len(work)} chats")
                    found = _serve(run, progress)
                    runs.append(figures_of(found, scenario.objectives))
                    problems.update(each.problem for each in found.chats if each.problem)
                facts = mean_facts(policy, rate, named, runs)
                yield {**facts, "problems": dict(problems)}


def _serve(run: ChatsRun, progress: Progress) -> ChatsMeasured:
    return on_processes(lambda folder: run_live(run, folder, progress))


def _figures_table(facts: Sequence[Facts]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (_label(each), *(measure.text(each[measure.key]) for measure in MEASURES)) for each in facts
    ]
    header = ("live", *(measure.caption for measure in MEASURES))
    return Table("On real processes", header, tuple(rows))


def _accounts_table(scenario: Chats, facts: Sequence[Facts]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            _label(each),
            *(f"{each[key]:g}" for key in ("requests", "good", "late", "refused")),
            *(f"{100 * each[f'busy_{at}']:.0f} %" for at in range(len(scenario.agents))),
            f"{each['cpu_cores']:.2f}",
        )
        for each in facts
    ]
    busy = (f"{kind} busy" for kind in scenario.agents)
    header = ("live", "chats", "good", "late", "refused", *busy, "CPU cores")
    return Table("All chats that arrived, and the agents", header, tuple(rows))


def _label(facts: Facts) -> str:
    return f"{facts['case']}: {facts['policy']}"


def _panels(scenario: Chats, facts: Sequence[Facts]) -> tuple[Bars, ...]:
    return tuple(_panel(scenario, facts, each) for each in MEASURES if each.key in _DRAWN)


def _panel(scenario: Chats, facts: Sequence[Facts], measure: Measure) -> Bars:
    cases = tuple(dict.fromkeys(each["case"] for each in facts))
    series: dict[str, tuple[float | None, ...]] = {
        policy: tuple(
            None if each[measure.key] is None else measure.scale * each[measure.key]
            for each in facts
            if each["policy"] == policy
        )
        for policy in scenario.policies
    }
    return Bars("on real processes", measure.caption, cases, series)
