"""What people read of a run: one line a fault, then whatever is wrong."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from faults.base import REGISTRY
from faults.campaign import Result
from faults.judge import Spell, Verdict

_MOST = 15


def lines(result: Result) -> Iterator[str]:
    """Yields the report of a run."""
    if result.spells:
        yield from _table(result)
    yield from _slopes(result)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(result.counts.items()))
    yield f"requests: {len(result.outcomes)}: {counts}"
    yield from _requests(result)
    for finding in result.findings:
        yield f"FINDING  {finding}"
    for spell in result.spells:
        for finding, count in Counter(spell.findings).items():
            times = f"{count} times " if count > 1 else ""
            yield f"FINDING  step {spell.what}: {times}{finding}"
    for name, why in result.skipped.items():
        yield f"skipped  {name}: {why}"
    yield f"seed {result.seed}: {'good' if result.is_good else 'NOT GOOD'}"


def _table(result: Result) -> Iterator[str]:
    head = f"{'fault':22} {'alone':>5} {'paired':>6} {'refused':>7} {'recovery p50':>12} {'max':>7} {'promise':>8}  verdict"
    yield head
    yield "-" * len(head)
    for name in sorted(REGISTRY):
        spells = [each for each in result.spells if name in each.faults]
        if not spells:
            continue
        alone = [each for each in spells if len(each.faults) == 1]
        times = [each.recovered_s for each in alone if each.recovered_s is not None]
        middle = f"{statistics.median(times):.1f} s" if times else "-"
        most = f"{max(times):.1f} s" if times else "-"
        promise = f"{REGISTRY[name].promise.recovered_s:.0f} s"
        refused = sum(
            each.verdict is Verdict.REFUSED and any(spell.overlaps(each) for spell in spells)
            for each in result.outcomes
        )
        trouble = _trouble(result, spells)
        yield (
            f"{name:22} {len(alone):5} {len(spells) - len(alone):6} {refused:7} {middle:>12} {most:>7} "
            f"{promise:>8}  {trouble or 'kept'}"
        )


def _trouble(result: Result, spells: list[Spell]) -> str:
    late = sum(spell.is_late for spell in spells)
    refused = sum(len(spell.refused_against_promise(result.outcomes)) for spell in spells)
    bad = sum(any(spell.overlaps(each) for spell in spells) for each in result.bad)
    found = sum(len(spell.findings) for spell in spells)
    parts = [
        (late, "late"),
        (refused, "refused against the promise"),
        (bad, "bad answers"),
        (found, "findings"),
    ]
    return ", ".join(f"{count} {what}" for count, what in parts if count)


def _requests(result: Result) -> Iterator[str]:
    shown = result.bad
    for each in shown[:_MOST]:
        during = [spell.what for spell in result.spells if spell.overlaps(each)]
        yield (
            f"{each.verdict.upper()}  {each.kind} sent at {each.sent_s:.1f} s to {each.gateway}, after "
            f"{each.took_s:.1f} s: {each.reason} {each.message[:160]} | during {during or 'calm'}"
        )
    for each in result.lost_in_calm[:_MOST]:
        yield f"LOST IN CALM  {each.kind} sent at {each.sent_s:.1f} s: {each.reason} {each.message[:160]}"
    for spell in result.spells:
        for each in spell.refused_against_promise(result.outcomes)[:3]:
            yield (
                f"REFUSED AGAINST THE PROMISE  {each.kind} sent {each.sent_s - spell.began_s:.1f} s into "
                f"{spell.what}: {each.reason} {each.message[:160]}"
            )


def _slopes(result: Result) -> Iterator[str]:
    for each in result.slopes:
        unit = 1024 * 1024 if each.figure == "rss" else 1
        name = "MiB" if each.figure == "rss" else each.figure
        verdict = "TOO STEEP" if each.is_too_steep else "ok"
        yield (
            f"{each.process:14} {each.figure:8} {each.first / unit:9.1f} -> {each.last / unit:9.1f} {name:8}"
            f"{each.per_minute / unit:+8.3f} per minute (limit {each.limit.per_minute / unit:.2f})  {verdict}"
        )
