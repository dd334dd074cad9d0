"""A minute of chaos: three faults, perhaps two at once, over photographs and streams; then nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.all_faults import REGISTRY
from faults.campaign import Campaign
from faults.report import lines

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

FAULTS = ("flushall", "kill-agent", "kill-leader")
SEED = 5


async def test_a_minute_of_chaos_leaves_nothing_wrong_and_nothing_behind(tmp_path: Path) -> None:
    assert set(FAULTS) <= set(REGISTRY)
    result = await Campaign(tmp_path, SEED).chaos(120.0, FAULTS, steps=len(FAULTS))
    print(*lines(result), sep="\n")
    assert sorted({name for spell in result.spells for name in spell.faults}) == sorted(FAULTS)
    assert not result.bad
    assert not result.lost_in_calm
    assert not result.findings
    assert not [finding for spell in result.spells for finding in spell.findings]
    assert not [spell.what for spell in result.spells if spell.is_late]
