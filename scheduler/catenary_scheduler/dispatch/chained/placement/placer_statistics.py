"""Gauges of placement under objectives, over all models."""

from __future__ import annotations

from collections.abc import Iterable

from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer

_MILLIONTHS = 1_000_000


def placement_statistics(placers: Iterable[SloPlacer | None]) -> dict[str, int]:
    """Returns the present gauges by name; ratios are in millionths, the lowest of all models.

    Args:
        placers: One per model that is placed under objectives; None for others.
    """
    known = [placer for placer in placers if placer is not None]
    if not known:
        return {}
    adapted = [placer.adaptation for placer in known]
    return {
        "packing_models": sum(placer.is_packing for placer in known),
        "theta_millionths": round(_MILLIONTHS * min(each.theta for each in adapted)),
        "attainment_millionths": round(_MILLIONTHS * min(each.attainment for each in adapted)),
        "attainment_samples": sum(each.samples for each in adapted),
    }
