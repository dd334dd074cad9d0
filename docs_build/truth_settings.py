"""Settings of a scenario that differ from those of a deployment without settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from catenary_lab.live.scenario import SAFETY_MARGIN_MS
from catenary_lab.scenarios.pools.schema import Sensitivity
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND
from catenary_services.settings import RENAMED
from catenary_simulator.options import SIMULATED
from catenary_simulator.pools import OWN_MARGIN


def named_today(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a scenario's settings with those of the scheduler as they are called today.

    A record is as old as its run, and keeps the names of that day.
    """
    named = dict(settings)
    if "scheduler" in named:
        named["scheduler"] = {RENAMED.get(k, k): v for k, v in named["scheduler"].items()}
    return named


def unlike_deployment(scenario: str, settings: Mapping[str, Any]) -> list[str]:
    """Returns a scenario's settings that are not a scheduler's defaults, in words."""
    used: dict[str, list[Any]] = {}
    family, kind = Path(scenario).parent.name, settings["kind"]
    chosen = [*settings.get("systems", []), *settings.get("policies", [])]
    ours = [e for e in chosen if isinstance(e, str) or e.get("planner", "catenary") == "catenary"]
    if family == "scenarios" and kind not in ("planner_scaling", "live_plans"):
        used["plan_margin"] = [each.get("margin", OWN_MARGIN) for each in ours] or [OWN_MARGIN]
        if kind == "sensitivity":
            margin = Sensitivity.model_fields["margin"].default
            varied = settings["vary"] == "margin"
            used["plan_margin"] = settings["values"] if varied else [settings.get("margin", margin)]
        used["plan_shared_routes"] = [each.get("shared", False) for each in ours] or [False]
        used["max_linger_ms"] = [float("inf")]
        simulated_ms = SIMULATED.safety_margin_ns / NANOSECONDS_PER_MILLISECOND
        used["safety_margin_ms"] = [SAFETY_MARGIN_MS if kind == "live" else simulated_ms]
    elif family == "chains" and kind not in ("placement", "allocation"):
        policies = [e if isinstance(e, str) else e.get("policy", "jffc") for e in ours]
        used["chain_policy"] = policies or ["jffc"]
    elif family == "placement":
        used["chain_policy"] = ["slo"]
    elif family == "packing":
        used["packing"] = ["off" if kind == "live" else "pack"]
    for name, value in named_today(settings).get("scheduler", {}).items():
        used[name] = [value]
    return list(_unlike(used))


def _unlike(used: Mapping[str, list[Any]]) -> Iterator[str]:
    for name, values in used.items():
        default = SchedulerSettings.model_fields[name].default
        other = [f"{each:g}" if isinstance(each, float) else str(each) for each in values]
        if any(each != default for each in values):
            yield f"`{name}` {' / '.join(dict.fromkeys(other))} (default {default})"
