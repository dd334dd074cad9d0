"""The dashboard's page in a real Chromium, before a real gateway: size, speed, keys, reach.

The scheduler behind the gateway is scripted and tells of thirty agents and five models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import figures
from catenary_protos.catenary.v1 import admin_pb2
from catenary_services.security.keys import add_key
from deployed.browser import DESKTOP, PHONE, ROOT, Tab, open_tab, require
from gateway_harness import Stage, stage
from scheduling_cases import large_cluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ONE_ROW = {"inputs": [{"name": "in_0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
MOST_PAGE_BYTES = 150_000
FIRST_PAINT_MS = 1000
MOST_BUSY_RATIO = 0.3
"""Of one core, for the page alone, with everything on it moving."""
STORY = "document.querySelectorAll('#details-body tbody tr').length === 8"
LOADED = "document.querySelectorAll('.agent').length > 0"


@asynccontextmanager
async def large_place(tmp_path: Path, **settings: Any) -> AsyncIterator[Stage]:
    async with stage(tmp_path, **settings) as place:
        place.scheduler.answers = large_cluster.answers()
        yield place


async def some_requests(place: Stage, **how: Any) -> None:
    async with aiohttp.ClientSession(f"http://{place.http}", **how) as session:
        for number in range(30):
            body = {**ONE_ROW, "id": f"request-{number}"}
            async with session.post("/v2/models/toy/infer", json=body) as response:
                assert response.status == 200


async def each_section(tab: Tab) -> list[str]:
    names: list[str] = await tab.page.eval_on_selector_all(
        "section[id]", "all => all.map(section => section.id)"
    )
    return names


async def test_thirty_agents_and_five_models_are_shown_fast(tmp_path: Path) -> None:
    async with large_place(tmp_path) as place, open_tab(f"http://{place.http}/") as tab:
        await some_requests(place)
        await tab.until(LOADED, "the first answer")
        sizes = await tab.page.evaluate(
            "performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))"
            ".filter(e => !e.name.includes('/dashboard/v1/')).map(e => e.transferSize)"
        )
        paint_ms = await tab.page.evaluate(
            "performance.getEntriesByType('paint').find(e => e.name === 'first-contentful-paint').startTime"
        )
        assert await tab.page.locator(".agent").count() == large_cluster.AGENTS
        assert await tab.page.locator("#models-table tbody tr").count() == 5
        assert await tab.page.locator("#legend .chip").count() == 3 + 14
        await tab.page.locator("#timelines").scroll_into_view_if_needed()
        await tab.until(
            "document.querySelectorAll('#timeline-models .chip').length === 4", "timelines"
        )
        busy = await _busy_ratio(tab, 4.0)
        await tab.page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
        await tab.shot("large-desktop")
        assert tab.complaints == []
    figures.report("dashboard", "bytes of the page", sum(sizes), "B", f"< {MOST_PAGE_BYTES}")
    figures.report("dashboard", "first paint", round(paint_ms), "ms", f"< {FIRST_PAINT_MS}")
    figures.report(
        "dashboard", "page's share of a core, 30 agents", busy, "", f"< {MOST_BUSY_RATIO}"
    )
    assert 0 < sum(sizes) < MOST_PAGE_BYTES
    assert paint_ms < FIRST_PAINT_MS
    assert busy < MOST_BUSY_RATIO


async def _busy_ratio(tab: Tab, seconds: float) -> float:
    """Returns which share of a core the page's thread takes, by its own CPU time."""
    session = await tab.page.context.new_cdp_session(tab.page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})

    async def working_s() -> float:
        found = (await session.send("Performance.getMetrics"))["metrics"]
        return next(float(each["value"]) for each in found if each["name"] == "TaskDuration")

    before_s, begun_s = await working_s(), time.monotonic()
    await tab.page.wait_for_timeout(seconds * 1e3)
    return (await working_s() - before_s) / (time.monotonic() - begun_s)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_a_phone_shows_all_without_scrolling_sideways(tmp_path: Path, dark: bool) -> None:
    async with (
        large_place(tmp_path) as place,
        open_tab(f"http://{place.http}/", size=PHONE, dark=dark) as tab,
    ):
        await some_requests(place)
        await tab.until(LOADED, "the first answer")
        for section in await each_section(tab):
            await tab.page.evaluate(f"document.getElementById('{section}').scrollIntoView()")
            await tab.page.wait_for_timeout(150)
            assert await tab.scroll_width() <= PHONE["width"], section
            if section in ("cluster", "timelines", "models"):
                await tab.page.wait_for_timeout(1200)
                await tab.shot(f"large-phone-{section}-{'dark' if dark else 'light'}")
        assert tab.complaints == []


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (DESKTOP, True), (PHONE, False)])
async def test_axe_finds_nothing_to_object_to(
    tmp_path: Path, size: dict[str, int], dark: bool
) -> None:
    async with (
        large_place(tmp_path) as place,
        open_tab(f"http://{place.http}/", size=size, dark=dark, motion=False) as tab,
    ):
        await some_requests(place)
        await tab.until(LOADED, "the first answer")
        await tab.until(
            "document.querySelectorAll('#sessions-table tbody tr').length > 9", "sessions"
        )
        assert await tab.inaccessible() == []
        await tab.page.locator("#requests-table button.link").first.click()
        await tab.until("document.querySelectorAll('.waterfall li').length > 3", "the waterfall")
        assert await tab.inaccessible() == []
        await tab.page.keyboard.press("Escape")
        await tab.page.locator("#sessions-table button.link").first.click()
        await tab.until(STORY, "the story")
        assert await tab.scroll_width() <= size["width"]
        assert await tab.inaccessible() == []


async def test_a_session_tells_what_happened_to_it(tmp_path: Path) -> None:
    async with large_place(tmp_path) as place, open_tab(f"http://{place.http}/") as tab:
        await tab.until(
            "document.querySelectorAll('#sessions-table tbody tr').length > 9", "sessions"
        )
        opener = tab.page.locator("#sessions-table button.link").first
        session = await opener.inner_text()
        await opener.click()
        await tab.until(STORY, "the story")
        assert await tab.text("#details-title") == f"Session {session}"
        rows = await tab.rows("#details-body")
        told = large_cluster.story(admin_pb2.GetStoryRequest(session_id=int(session))).changes
        assert [row[1:] for row in rows] == [
            [
                str(each.session_id or "request"),
                each.after,
                each.name,
                each.why or "\N{EN DASH}",
                f"{each.event_kind} {each.event}" + (f" on {each.answers}" if each.answers else ""),
            ]
            for each in told
        ]
        assert (rows[0][0], rows[-1][0]) == ("800 ms", "100 ms")
        await tab.shot("story")
        assert tab.complaints == []


async def test_everything_can_be_reached_by_keyboard(tmp_path: Path) -> None:
    async with large_place(tmp_path) as place, open_tab(f"http://{place.http}/") as tab:
        await some_requests(place)
        await tab.until(LOADED, "the first answer")
        keyboard = tab.page.keyboard
        await keyboard.press("Tab")
        assert await tab.page.evaluate("document.activeElement.className") == "skip"
        await tab.page.locator(".agent").nth(3).focus()
        await keyboard.press("Enter")
        assert await tab.page.locator(".agent[aria-pressed=true]").count() == 1
        chosen = await tab.page.locator(".agent[aria-pressed=true] strong").inner_text()
        assert await tab.page.locator("#timeline-agent").input_value() == chosen
        await keyboard.press("Enter")
        await tab.page.locator("#timeline-canvas").focus()
        await tab.until(
            "document.querySelectorAll('#timeline-models .chip').length === 4", "timelines"
        )
        await keyboard.press("ArrowRight")
        first = await tab.text("#booking")
        assert "batch" in first
        assert "booked for" in first
        await keyboard.press("ArrowLeft")
        assert await tab.text("#booking") != first
        await tab.page.locator("#timeline-agent").select_option(large_cluster.SESSIONS_ONLY)
        await keyboard.press("Tab")
        await tab.page.locator("#timeline-canvas").focus()
        await keyboard.press("ArrowUp")
        await keyboard.press("ArrowUp")
        assert "sessions took" in await tab.text("#booking")
        opener = tab.page.locator("#requests-table button.link").first
        await opener.focus()
        await keyboard.press("Enter")
        await tab.until("document.getElementById('details').open", "the waterfall")
        await keyboard.press("Escape")
        await tab.until("!document.getElementById('details').open", "its end")
        # News arrive every second; who reads the list must not be thrown out of it.
        await opener.focus()
        held = await tab.page.evaluate("document.activeElement.textContent")
        await some_requests(place)
        await tab.page.wait_for_timeout(2500)
        assert await tab.page.evaluate("document.activeElement.textContent") == held


async def test_a_hidden_page_asks_nothing(tmp_path: Path) -> None:
    async with large_place(tmp_path) as place, open_tab(f"http://{place.http}/") as tab:
        await tab.until(LOADED, "the first answer")
        asked: list[str] = []
        tab.page.on("request", lambda request: asked.append(request.url))
        await _hide(tab, True)
        await tab.page.wait_for_timeout(300)
        asked.clear()
        await tab.page.wait_for_timeout(3000)
        assert asked == []
        await _hide(tab, False)
        await tab.page.wait_for_timeout(1000)
        assert any("/status" in url for url in asked)


async def _hide(tab: Tab, hidden: bool) -> None:
    await tab.page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', {get: () => hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )


async def test_a_key_is_asked_for_checked_and_kept_in_the_tab(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    view, infer = add_key(file, "eyes", ["view"]), add_key(file, "hands", ["infer"])
    async with (
        large_place(tmp_path, api_keys_file=file) as place,
        open_tab(f"http://{place.http}/", inside=False) as tab,
    ):
        page = tab.page
        await tab.until("document.getElementById('key').open", "the question for a key")
        await tab.shot("key")
        await page.locator("#key-input").fill("ctn_wrong")
        await page.keyboard.press("Enter")
        await tab.until(
            "/unknown API key/.test(document.getElementById('key-why').textContent)", "no"
        )
        await page.locator("#key-input").fill(infer)
        await page.keyboard.press("Enter")
        await tab.until("/scope 'view'/.test(document.getElementById('banner').textContent)", "403")
        assert await page.locator(".agent").count() == 0
        await page.locator("#key-button").click()
        await page.locator("#key-input").fill(view)
        await page.keyboard.press("Enter")
        await tab.until(LOADED, "the first answer")
        await tab.until("document.getElementById('banner').hidden", "the end of the complaint")
        kept = await page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]")
        assert kept == [1, 0, ""]
        assert view not in page.url
        await page.reload()
        await tab.until(LOADED, "the first answer with the key that was kept")
        await page.locator("#key-button").click()
        await page.locator("#key-forget").click()
        await tab.until("document.getElementById('key').open", "the question for a key")
        assert await page.evaluate("sessionStorage.length") == 0
        assert tab.complaints == []


async def test_old_facts_stay_and_are_called_old(tmp_path: Path) -> None:
    async with large_place(tmp_path) as place, open_tab(f"http://{place.http}/") as tab:
        await some_requests(place)
        await tab.until(LOADED, "the first answer")
        await place.scheduler.stop()
        await tab.until("!document.getElementById('banner').hidden", "the warning")
        await tab.until(
            "document.getElementById('cluster').classList.contains('stale')", "grey", 30
        )
        assert "scheduler is away" in await tab.text("#banner")
        assert "ago" in await tab.text("#cluster .as-of")
        assert await tab.page.locator(".agent").count() == large_cluster.AGENTS
        assert await tab.page.locator("#requests-table tbody tr").count() == 30
        await tab.shot("scheduler-away")
        await place.gateway.stop()
        await tab.until(
            "/gateway does not answer/.test(document.getElementById('banner').textContent)",
            "it",
            30,
        )
        assert await tab.page.locator(".agent").count() == large_cluster.AGENTS
        await tab.until(
            "document.getElementById('requests').classList.contains('stale')", "grey", 30
        )
        await tab.shot("gateway-away")
        assert tab.complaints == []


def test_a_wheel_holds_every_asset() -> None:
    require("hatchling")
    from hatchling.builders.wheel import WheelBuilder

    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    root = ROOT / "gateway"
    folder = root / "catenary_gateway" / "dashboard" / "assets"
    assets = {str(file.relative_to(root)) for file in folder.iterdir()}
    assert len(assets) > 10
    assert assets <= packed


async def test_a_page_opened_while_no_scheduler_leads_says_so(tmp_path: Path) -> None:
    async with stage(tmp_path) as place:
        await place.scheduler.stop()
        await asyncio.sleep(0)
        async with open_tab(f"http://{place.http}/") as tab:
            await tab.until("!document.getElementById('banner').hidden", "the warning")
            assert "scheduler is away" in await tab.text("#banner")
            facts = await tab.facts("#gateway-facts")
            assert facts["Name"] == place.gateway.name
            assert tab.complaints == []
