"""Sessions of a real model that move between real agents: answers, stalls, a drained agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catenary_lab.live.packing.figures import (
    RESTART,
    Answer,
    Drained,
    LayoutMeasured,
    spread,
)
from catenary_lab.live.packing.load import MODES
from catenary_lab.live.packing.run import run_live
from catenary_lab.scenarios.kinds import Progress
from catenary_lab.scenarios.live import on_processes
from catenary_lab.scenarios.packing.live_schema import LiveMoves
from catenary_lab.scenarios.report import Cell, Findings, Table

Facts = dict[str, Any]


def serve(scenario: LiveMoves, progress: Progress) -> Findings:
    """Returns what real processes made of a scenario.

    Raises:
        Unavailable: They were not ready in time, or lost an answer that nothing disturbed.
    """
    return report(scenario, on_processes(lambda folder: run_live(scenario, folder, progress)))


def report(scenario: LiveMoves, measured: Sequence[LayoutMeasured]) -> Findings:
    """Returns tables and facts of a run."""
    layouts = [layout_facts(each) for each in measured]
    found = targets(scenario, layouts)
    met = all(each["met"] for each in found)
    facts = {"layouts": layouts, "targets": found, "met": met}
    notes = [
        f"{scenario.model} on {scenario.agents} CPU agents of one thread each; "
        f"{scenario.streams} greedy answers of {scenario.answer_tokens} tokens at a time. A stall "
        "is the time between a stream's last token on one chain and its first on the next, over "
        "the stream's median time between tokens just before and after.",
        *(
            f"{each['layout']}: {'; '.join(each['chains'])}. {each['answers']} answers, "
            f"{_row(each['step_ms'], ('p50',), 1)} ms a token; {each['cache_bytes'] / 1e6:.0f} MB "
            f"of caches were sent, {each['restarts']} sessions begun again."
            for each in layouts
        ),
    ]
    tables = (_moves_table(layouts), _targets_table(found))
    return Findings(tables, (), tuple(notes), {"live": facts})


def layout_facts(measured: LayoutMeasured) -> Facts:
    """Returns the figures of a layout as plain JSON values."""
    stalls = [stall for answer in measured.answers for stall in answer.stalls()]
    return {
        "layout": measured.layout.label,
        "chains": list(measured.chains),
        **_outcomes(measured, measured.answers),
        "moves": {mode: _moves_facts(measured, mode, stalls) for mode in MODES},
        "cache_bytes": measured.cache_bytes,
        "step_ms": spread([gap / 1e6 for each in measured.answers for gap in each.gaps_ns[1:]]),
        # Stalls that such a stream shows without a move.
        "undisturbed_steps": spread(_other_steps(measured.reference)),
        "steps_between_moves": spread(_other_steps(measured.answers)),
        "drain": None if measured.drained is None else _drain_facts(measured, measured.drained),
        "seconds": measured.seconds,
    }


def _outcomes(measured: LayoutMeasured, answers: Sequence[Answer]) -> Facts:
    return {
        "answers": len(answers),
        "equal": sum(measured.is_equal(each) for each in answers),
        "lost": sum(bool(each.problem) for each in answers),
        "problems": sorted({each.problem for each in answers if each.problem}),
        "restarts": sum(change.how == RESTART for each in answers for change in each.changes),
    }


def _moves_facts(measured: LayoutMeasured, mode: str, stalls: Sequence[tuple[str, float]]) -> Facts:
    requested = [each for each in measured.moves if each.mode == mode]
    done = [each for each in requested if each.outcome == "moved"]
    failed = [each for each in requested if each.outcome == "failed"]
    return {
        "moved": len(done),
        "failed": len(failed),
        "not_begun": len(requested) - len(done) - len(failed),
        "problems": sorted({each.problem for each in requested if each.problem}),
        "stall_steps": spread([steps for how, steps in stalls if how == mode]),
        "held_ms": spread([each.held_ms for each in done]),
        "duration_ms": spread([each.duration_ms for each in done]),
        "tokens": spread([each.tokens for each in done]),
        "rounds": spread([each.rounds for each in done]),
    }


def _other_steps(answers: Sequence[Answer]) -> list[float]:
    found = []
    for answer in answers:
        moved = {change.token for change in answer.changes}
        found += [steps for at, steps in answer.steps() if at not in moved]
    return found


def _drain_facts(measured: LayoutMeasured, drained: Drained) -> Facts:
    stalls = [steps for answer in drained.answers for _, steps in answer.stalls()]
    return {
        "sessions": drained.sessions,
        "seconds": drained.seconds,
        "drained": drained.is_drained,
        **_outcomes(measured, drained.answers),
        "stall_steps": spread(stalls),
    }


def targets(scenario: LiveMoves, layouts: Sequence[Facts]) -> list[Facts]:
    """Returns the targets, each with the measured figure."""
    found: list[Facts] = []

    def add(what: str, layout: Facts, measured: float | None, wanted: str, *, met: bool) -> None:
        found.append(
            {
                "what": what,
                "layout": layout["layout"],
                "measured": measured,
                "wanted": wanted,
                "met": met,
            }
        )

    for spec, layout in zip(scenario.layouts, layouts, strict=True):
        for mode in MODES:
            moved = layout["moves"][mode]["moved"]
            least = spec.moves // 2
            add(f"moves by {mode}", layout, moved, f">= {least}", met=moved >= least)
        changed = layout["answers"] - layout["equal"]
        add("answers that differ or are lost", layout, changed, "0", met=changed == 0)
        stall = layout["moves"]["kv"]["stall_steps"]
        steps, most = stall["p99"] if stall else None, scenario.most_stall_steps
        add(
            "stall by kv, decode steps, p99",
            layout,
            steps,
            f"<= {most:g}",
            met=steps is not None and steps <= most,
        )
        if (drain := layout["drain"]) is not None:
            add(
                f"drain of {drain['sessions']} sessions, s",
                layout,
                drain["seconds"],
                f"< {scenario.most_drain_s:g}",
                met=drain["drained"]
                and drain["sessions"] >= spec.drained
                and drain["seconds"] < scenario.most_drain_s,
            )
            changed = drain["answers"] - drain["equal"]
            add("drained answers that differ or are lost", layout, changed, "0", met=changed == 0)
    return found


def _moves_table(layouts: Sequence[Facts]) -> Table:
    header = (
        "layout",
        "by",
        "moved",
        "failed",
        "not begun",
        "stall p50 / p99 / max, steps",
        "held p50 / p99, ms",
        "move p50 / p99, ms",
        "tokens p50",
        "rounds p50",
    )
    rows: list[tuple[Cell, ...]] = []
    for layout in layouts:
        for mode, each in layout["moves"].items():
            rows.append(
                (
                    layout["layout"],
                    mode,
                    str(each["moved"]),
                    str(each["failed"]),
                    str(each["not_begun"]),
                    _row(each["stall_steps"], ("p50", "p99", "max"), 2),
                    _row(each["held_ms"], ("p50", "p99"), 1),
                    _row(each["duration_ms"], ("p50", "p99"), 0),
                    _row(each["tokens"], ("p50",), 0),
                    _row(each["rounds"], ("p50",), 0),
                )
            )
        for label, key in (
            ("no move, undisturbed", "undisturbed_steps"),
            ("no move, between moves", "steps_between_moves"),
        ):
            steps = _row(layout[key], ("p50", "p99", "max"), 2)
            rows.append((layout["layout"], label, None, None, None, steps, *[None] * 4))
    return Table("Moves of running sessions", header, tuple(rows))


def _targets_table(found: Sequence[Facts]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            each["layout"],
            each["what"],
            None if each["measured"] is None else f"{each['measured']:.4g}",
            each["wanted"],
            "yes" if each["met"] else "NO",
        )
        for each in found
    ]
    return Table("Targets", ("layout", "", "measured", "wanted", "met"), tuple(rows))


def _row(values: dict[str, float] | None, names: Sequence[str], digits: int) -> str | None:
    return None if values is None else " / ".join(f"{values[name]:.{digits}f}" for name in names)
