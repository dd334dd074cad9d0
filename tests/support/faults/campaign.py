"""One run: faults by the schedule over a load, then the reckoning; or no faults at all, a soak."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from faults import leftovers
from faults.base import REGISTRY, Fault
from faults.judge import (
    BAD,
    KINDS,
    Outcome,
    Spell,
    Verdict,
    lost_in_calm,
    recovery_s,
)
from faults.leftovers import Usage
from faults.mixed_load import MixedLoad
from faults.schedule import Step, schedule
from faults.slopes import LIMITS, Slope, slope
from faults.world import World

BASELINE_S = 10.0
_LONGEST_RECOVERY_S = 45.0
_APPLY_S = 45.0
_NORMAL_FACTOR, _NORMAL_S = 5.0, 2.5
"""An answer is as usual if it takes at most so many times the usual, or so long."""
_SAMPLE_S = 2.0


@dataclass
class Result:
    """Everything a run found.

    Attributes:
        seed: Of the schedule.
        skipped: Faults this machine or this software cannot have, and why.
        spells: The steps as they went.
        outcomes: Every request.
        findings: What is wrong beside single requests.
        slopes: Of a soak.
        events: What happened, with moments, for the file.
        usual_s: The usual time of an answer by kind, undisturbed.
    """

    seed: int
    skipped: dict[str, str] = field(default_factory=dict)
    spells: list[Spell] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    slopes: list[Slope] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    usual_s: dict[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[str]:
        return Counter(str(outcome.verdict) for outcome in self.outcomes)

    @property
    def bad(self) -> list[Outcome]:
        return [
            outcome
            for outcome in self.outcomes
            if outcome.verdict in BAD
            and (
                outcome.verdict is Verdict.WRONG
                or not any(spell.was_ended_by_us(outcome) for spell in self.spells)
            )
        ]

    @property
    def lost_in_calm(self) -> list[Outcome]:
        return lost_in_calm(self.outcomes, self.spells)

    @property
    def is_good(self) -> bool:
        return not (
            self.bad
            or self.findings
            or self.lost_in_calm
            or any(spell.is_late or spell.findings for spell in self.spells)
            or any(spell.refused_against_promise(self.outcomes) for spell in self.spells)
            or any(each.is_too_steep for each in self.slopes)
        )


class Campaign:
    """Runs a schedule over a world and a load."""

    def __init__(self, folder: Path, seed: int, *, network: bool = True) -> None:
        self._folder = folder
        self._network = network
        self.result = Result(seed)
        self._began_s = time.monotonic()

    async def chaos(self, seconds: float, names: tuple[str, ...] = (), steps: int = 0) -> Result:
        """Lets faults come for so long, or so many `steps`; then everything has to be as before."""
        async with self._world() as (world, load):
            before = leftovers.usage(world)
            async with load.running():
                await self._baseline(load)
                until_s = load.now_s + seconds
                for step in self._steps(world, names):
                    if load.now_s >= until_s or (steps and step.number > steps):
                        break
                    await self._step(world, load, step)
            await self._reckon(world, load, before)
        return self.result

    async def soak(self, seconds: float) -> Result:
        """Asks for so long without any fault; what processes use has to stay where it is."""
        async with self._world() as (world, load):
            before = leftovers.usage(world)
            samples: list[tuple[float, dict[str, Usage]]] = []
            async with load.running():
                await self._baseline(load)
                until_s = load.now_s + seconds
                while load.now_s < until_s:
                    samples.append((load.now_s, leftovers.usage(world)))
                    await asyncio.sleep(_SAMPLE_S)
            self.result.slopes = list(_slopes(samples))
            await self._reckon(world, load, before)
        return self.result

    def _steps(self, world: World, names: tuple[str, ...]) -> Iterator[Step]:
        possible = []
        for name in names or sorted(REGISTRY):
            lacking = [
                world.missing[need] for need in REGISTRY[name].needs if need in world.missing
            ]
            if lacking:
                self.result.skipped[name] = lacking[0]
                print(f"skipped {name}: {lacking[0]}", flush=True)
            else:
                possible.append(name)
        # Drawn from all of them, so that a seed means the same everywhere.
        drawn = schedule(self.result.seed, names)
        return (
            (step for step in drawn if all(each.name in possible for each in step.faults))
            if possible
            else iter(())
        )

    # ---- one step ----

    async def _step(self, world: World, load: MixedLoad, step: Step) -> None:
        await asyncio.sleep(step.calm_s)
        names = tuple(fault.name for fault in step.faults)
        promises = [fault.promise for fault in step.faults]
        spell = Spell(
            step.number,
            names,
            str(step),
            sum(each.recovered_s for each in promises),
            promises[0].served_s if step.second is None else None,
            began_s=load.now_s,
        )
        self.result.spells.append(spell)
        self.note("step", str(step))
        try:
            await self._in_force(world, step, spell)
        finally:
            spell.undone_s = load.now_s
        await self._recover(world, load, spell)
        world.mortal.clear()
        spell.findings += world.ends_unbidden
        world.ends_unbidden = []
        self.note(
            "recovered",
            recovered_s=spell.recovered_s,
            whole_s=spell.whole_s,
            findings=spell.findings,
        )

    async def _in_force(self, world: World, step: Step, spell: Spell) -> None:
        if step.second is None:
            if await self._do(step.fault, "apply", world, spell):
                await asyncio.sleep(step.hold_s)
            await self._do(step.fault, "undo", world, spell)
            return
        await self._do(step.fault, "apply", world, spell)
        await asyncio.sleep(step.offset_s)
        await self._do(step.second, "apply", world, spell)
        await asyncio.sleep(max(0.0, step.hold_s - step.offset_s))
        await self._do(step.fault, "undo", world, spell)
        await asyncio.sleep(step.offset_s)
        await self._do(step.second, "undo", world, spell)

    async def _do(self, fault: Fault, what: str, world: World, spell: Spell) -> bool:
        self.note(what, fault.name)
        if fault.ends:
            world.mortal.update(fault.victims)
        try:
            async with asyncio.timeout(_APPLY_S):
                await getattr(fault, what)(world)
        except Exception as error:
            spell.findings.append(
                f"harness: {what} of {fault.name}: {type(error).__name__}: {error}"
            )
            return False
        return True

    async def _recover(self, world: World, load: MixedLoad, spell: Spell) -> None:
        whole = asyncio.create_task(self._whole(world, load, spell))
        while load.now_s < spell.undone_s + _LONGEST_RECOVERY_S:
            ended = [each for each in load.outcomes if each.ended_s]
            spell.recovered_s = recovery_s(ended, spell.undone_s, load.normal_s)
            if spell.recovered_s is not None:
                break
            await asyncio.sleep(0.1)
        await whole
        if spell.whole_s is None or spell.recovered_s is None:
            missing = await world.what_is_missing()
            spell.findings.append(
                f"not as before within {_LONGEST_RECOVERY_S:g} s: {missing or 'slow'}"
            )
            self.note("reset", why=missing)
            spell.reset_s = load.now_s
            try:
                await world.reset()
                await asyncio.sleep(3.0)
            finally:
                spell.whole_s = spell.whole_s or math.inf
                # What is refused until everything was started anew is this fault's.
                self._close(spell, load.now_s)

    def _close(self, spell: Spell, now_s: float) -> None:
        if spell.whole_s == math.inf:
            spell.whole_s = now_s - spell.undone_s

    async def _whole(self, world: World, load: MixedLoad, spell: Spell) -> None:
        if await world.whole(_LONGEST_RECOVERY_S):
            spell.whole_s = load.now_s - spell.undone_s

    # ---- before and after ----

    def _world(self) -> _Started:
        return _Started(self, self._folder, self._network)

    async def _baseline(self, load: MixedLoad) -> None:
        await asyncio.sleep(BASELINE_S)
        for kind in KINDS:
            took = [
                o.took_s for o in load.outcomes if o.kind == kind and o.verdict is Verdict.RIGHT
            ]
            if not took:
                self.result.findings.append(f"no {kind} was answered before any fault")
            usual_s = float(np.percentile(took, 90)) if took else _NORMAL_S
            self.result.usual_s[kind] = usual_s
            load.normal_s[kind] = max(_NORMAL_FACTOR * usual_s, _NORMAL_S)
        self.note("baseline", usual_s=dict(self.result.usual_s))

    async def _reckon(self, world: World, load: MixedLoad, before: dict[str, Usage]) -> None:
        """Everything is asked for and nothing is asked any more: what is left?"""
        result = self.result
        result.outcomes = load.outcomes
        result.findings += [f"left: {each}" for each in await leftovers.what_is_held(world)]
        result.findings += leftovers.what_grew(before, leftovers.usage(world))
        status = await world.admin.status()
        self.note("audits", audits=status.audits, leaks_mended=status.leaks_mended)
        if status.leaks_mended and not result.spells:
            result.findings.append(f"audits mended {status.leaks_mended} leaks without any fault")
        for name, code in (await world.end()).items():
            if code != 0:
                how = "had to be killed" if code is None else f"ended with {code}"
                result.findings.append(f"{name} {how} after SIGTERM at the end")
        result.findings += leftovers.orphans(world)
        result.findings += [f"left: {each}" for each in sorted(leftovers.files_left(world))]
        excuses = {
            text
            for spell in result.spells
            for name in spell.faults
            for text in REGISTRY[name].excuses
        }
        for member in world.members.values():
            for text, count in leftovers.tracebacks(member).items():
                if not any(excuse in text for excuse in excuses):
                    result.findings.append(f"log of {member.name}: {count} x {text}")

    def note(self, what: str, who: str = "", **facts: Any) -> None:
        """Keeps an event for the file, and shows it."""
        at_s = time.monotonic() - self._began_s
        self.result.events.append({"at_s": round(at_s, 3), "what": what, "who": who, **facts})
        shown = " ".join(
            f"{name}={value}" for name, value in facts.items() if value not in (None, [])
        )
        print(f"{at_s:7.1f} s  {what:12} {who} {shown}".rstrip(), flush=True)


class _Started:
    """A world that serves, and a load that knows the right answers."""

    def __init__(self, campaign: Campaign, folder: Path, network: bool) -> None:
        self._campaign = campaign
        self._world = World(folder, network=network)
        self._load: MixedLoad | None = None

    async def __aenter__(self) -> tuple[World, MixedLoad]:
        world, campaign = self._world, self._campaign
        world.note = campaign.note
        await world.__aenter__()
        try:
            load = self._load = MixedLoad(world, campaign.result.seed)
            world.load = load
            await load.prepare()
        except BaseException:
            await self.__aexit__()
            raise
        campaign._began_s = load.begin()
        return world, load

    async def __aexit__(self, *_: object) -> None:
        if self._load is not None:
            await self._load.close()
        await self._world.close()


def _slopes(samples: list[tuple[float, dict[str, Usage]]]) -> Iterator[Slope]:
    for process in sorted(samples[0][1]) if samples else ():
        for figure in LIMITS:
            line = [
                (at, float(getattr(each[process], figure)))
                for at, each in samples
                if process in each
            ]
            yield slope(process, figure, line)


def as_json(result: Result) -> str:
    """Returns everything, for other programs."""
    return json.dumps(
        {
            "seed": result.seed,
            "good": result.is_good,
            "skipped": result.skipped,
            "usual_s": result.usual_s,
            "counts": dict(result.counts),
            "findings": result.findings,
            "spells": [{**asdict(each), "late": each.is_late} for each in result.spells],
            "slopes": [{**asdict(each), "too_steep": each.is_too_steep} for each in result.slopes],
            "not_right": [
                {**asdict(o), "verdict": o.verdict}
                for o in result.outcomes
                if o.verdict not in (Verdict.RIGHT, Verdict.CANCELLED)
            ],
            "events": result.events,
        },
        indent=1,
        default=str,
    )
