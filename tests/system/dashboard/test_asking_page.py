"""The dashboard for visitors and operators, in a real Chromium: try-it box, last hour, orders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from catenary_services.security.keys import add_key
from deployed.asked_place import COLOURS, SEES, asked_place, picture, remember_an_hour
from deployed.browser import DESKTOP, PHONE, Tab, open_tab

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

HOSTILE = '<img src=x onerror="document.title=1"> & <b>bold</b>\nnext line'
ANSWERED = "/First word after .* tokens/.test(document.querySelector('#chat-log').textContent)"
SIZES = [(DESKTOP, False), (DESKTOP, True), (PHONE, False), (PHONE, True)]


async def ask(tab: Tab, words: str) -> None:
    await tab.until("!document.getElementById('chat').hidden", "a model that chats")
    await tab.page.locator("#chat-text").fill(words)
    await tab.page.keyboard.press("Enter")


async def look_at(tab: Tab, **colours: int) -> None:
    """Chooses the model that sees, and gives it a picture of one colour."""
    await tab.until("document.querySelectorAll('#try-model option').length === 2", "the models")
    await tab.page.locator("#try-model").select_option(f"{SEES}:1")
    file: Any = {"name": "one.png", "mimeType": "image/png", "buffer": picture(**colours)}
    await tab.page.locator("#picture-file").set_input_files(file)
    await tab.until("document.querySelectorAll('#picture-classes li').length === 3", "classes")


async def test_a_visitor_sees_plain_words_and_the_inside_on_demand(tmp_path: Path) -> None:
    async with asked_place(tmp_path, says="Hello!") as place:
        async with open_tab(place.page, inside=False) as tab:
            await tab.until("document.querySelectorAll('.agent').length > 0", "the cluster")
            await tab.until("/devices work/.test(document.body.textContent)", "the summary")
            visible = "[...document.querySelectorAll('section[id]')].filter(e => e.offsetParent).map(e => e.id)"
            assert await tab.page.evaluate(visible) == ["try", "hour", "cluster", "models"]
            assert "28 of 30 devices work, and 5 models can be asked." in await tab.text("#summary")
            await tab.page.get_by_role("switch", name="Show the inside").click()
            assert {"timelines", "plan", "orders"} <= set(await tab.page.evaluate(visible))
            assert "epoch 4" in await tab.text("#leader")
            await tab.page.reload()
            await tab.until(f"({visible}).includes('plan')", "the inside, as it was left")
            assert tab.complaints == []
        async with open_tab(f"{place.page}#sessions", inside=False) as tab:
            await tab.until(f"({visible}).includes('sessions')", "what the address names")


async def test_a_model_answers_in_the_page_and_its_words_stay_words(tmp_path: Path) -> None:
    async with (
        asked_place(tmp_path, says=HOSTILE) as place,
        open_tab(place.page, inside=False) as tab,
    ):
        await ask(tab, "What <i>is</i> a chain?")
        await tab.until(ANSWERED, "the answer")
        said = await tab.page.locator("#chat-log .words").all_inner_texts()
        assert said == ["What <i>is</i> a chain?", HOSTILE]
        assert await tab.page.locator("#chat-log").locator("img, b, i").count() == 0
        assert await tab.page.title() == "Catenary"
        assert re.search(rf"\({len(HOSTILE) + 1} tokens\)", await tab.text("#chat-log"))
        await ask(tab, "And a rope?")
        await tab.until(
            "document.querySelectorAll('#chat-log .answer button').length === 2", "more"
        )
        # The model is told what was said before.
        assert [HOSTILE in prompt for prompt in place.asked] == [False, True]
        assert "What <i>is</i> a chain?" in place.asked[1]
        await tab.page.locator("#chat-log .answer button").last.click()
        await tab.until("document.querySelectorAll('.waterfall li').length > 2", "the waterfall")
        assert "until the first token" in await tab.text(".waterfall")
        await tab.page.keyboard.press("Escape")
        await tab.page.locator("#chat-new").click()
        assert await tab.text("#chat-log") == ""
        assert tab.complaints == []


async def test_an_answer_that_is_stopped_ends_at_the_gateway_too(tmp_path: Path) -> None:
    async with asked_place(tmp_path, says="") as place, open_tab(place.page, inside=False) as tab:

        async def begin(session: Any) -> None:
            await session.say("and so on ")  # and never ends

        place.writer.script = begin
        await ask(tab, "Go on")
        await tab.until(
            "/and so on/.test(document.getElementById('chat-log').textContent)", "words"
        )
        await tab.page.locator("#chat-stop").click()
        await tab.until("/Stopped/.test(document.getElementById('chat-log').textContent)", "an end")
        for _ in range(200):
            if not place.gateway._sessions.unanswered:
                break
            await tab.page.wait_for_timeout(50)
        assert not place.gateway._sessions.unanswered
        assert tab.complaints == []


@pytest.mark.parametrize("wanted", range(len(COLOURS)), ids=COLOURS)
async def test_a_picture_is_scaled_sent_and_called_by_its_class(
    tmp_path: Path, wanted: int
) -> None:
    async with asked_place(tmp_path, says="") as place, open_tab(place.page, inside=False) as tab:
        planes = {name: 255 if at == wanted else 0 for at, name in enumerate(COLOURS)}
        await look_at(tab, **planes)
        rows = await tab.page.locator("#picture-classes li").all_inner_texts()
        # 255 and 0 become 1 and -127/128; the softmax of (1, -0.992, -0.992) begins with 0.786.
        assert rows[0].split("\n") == [COLOURS[wanted], "78.6 %"]
        await tab.page.locator("#picture-figures button").click()
        await tab.until("document.querySelectorAll('.waterfall li').length > 3", "the waterfall")
        assert tab.complaints == []


async def test_what_is_no_picture_is_said_so(tmp_path: Path) -> None:
    async with asked_place(tmp_path, says="") as place, open_tab(place.page, inside=False) as tab:
        await look_at(tab, red=9, green=200, blue=9)
        file: Any = {"name": "one.png", "mimeType": "image/png", "buffer": b"<svg onload=alert(1)>"}
        await tab.page.locator("#picture-file").set_input_files(file)
        await tab.until(
            "/no picture/.test(document.getElementById('picture-figures').textContent)",
            "the reason",
        )
        assert tab.complaints == []


async def test_where_keys_are_needed_one_that_infers_can_be_given(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    view, infer = add_key(file, "eyes", ["view"]), add_key(file, "hands", ["infer"])
    async with (
        asked_place(tmp_path, says="Hello!", api_keys_file=file) as place,
        open_tab(place.page, inside=False) as tab,
    ):
        await tab.until("document.getElementById('key').open", "the question for a key")
        await tab.page.locator("#key-input").fill(view)
        await tab.page.keyboard.press("Enter")
        await ask(tab, "Hi")
        await tab.until("document.querySelector('#chat-log .problem')", "the refusal")
        assert "does not have the scope 'infer" in await tab.text("#chat-log .problem")
        assert await tab.page.evaluate("document.activeElement.id") == "try-key"
        await tab.page.keyboard.type(infer)
        await ask(tab, "Hi")
        await tab.until(ANSWERED, "the answer")
        assert len(place.asked) == 1
        kept = await tab.page.evaluate("JSON.stringify({...sessionStorage, ...localStorage})")
        assert (view in kept, infer in kept) == (True, False)
        assert tab.page.url == place.page
        await tab.page.reload()
        await tab.until("!document.getElementById('chat').hidden", "a model that chats")
        assert await tab.page.locator("#try-key").input_value() == ""
        assert tab.complaints == []


async def test_the_last_hour_survives_the_page(tmp_path: Path) -> None:
    async with asked_place(tmp_path, says="") as place, open_tab(place.page, inside=False) as tab:
        remember_an_hour(place)
        await tab.page.reload()
        drawn = "document.querySelectorAll('#hour-charts .line').length === 12"
        await tab.until(drawn, "three models in four charts")
        assert await tab.page.locator("#hour-window").input_value() == "3600"
        for chart, unit in (("rate", "/s"), ("p99", "ms|s"), ("refused", "/min"), ("tokens", "/s")):
            words = await tab.text(f"#chart-{chart} strong")
            assert re.fullmatch(rf"up to [\d.]+ ?({unit})", words), (chart, words)
        await tab.page.locator("#hour-charts").focus()
        await tab.page.keyboard.press("End")
        await tab.page.keyboard.press("ArrowLeft")
        reading = await tab.text("#hour-reading")
        assert re.match(r"30 s ago: efficientnet-lite0:1 [\d.]+/s, p99 \d+ ms; resnet", reading)
        assert "tokens/s" in reading
        await tab.page.locator("#hour summary").click()
        rows = {row[0]: row for row in await tab.rows("#hour-table")}
        assert set(rows) == {"efficientnet-lite0:1", "resnet-50:1", "smollm2-135m:1"}
        assert int(rows["efficientnet-lite0:1"][4].replace(",", "")) > 100, "refused in the rush"
        assert rows["smollm2-135m:1"][4] == "0"
        await tab.page.locator("#hour-window").select_option("600")
        await tab.until(
            "/10 min ago/.test(document.getElementById('chart-rate').textContent)", "it"
        )
        assert tab.complaints == []


async def test_a_gateway_that_is_young_says_so(tmp_path: Path) -> None:
    async with asked_place(tmp_path, says="") as place, open_tab(place.page, inside=False) as tab:
        await tab.until(
            "/before that nothing is known/.test(document.getElementById('hour').textContent)", "it"
        )
        assert await tab.page.locator("#hour-window").input_value() == "600"


async def operator_of(tab: Tab, key: str) -> None:
    await tab.page.locator("#orders-key").fill(key)
    await tab.page.keyboard.press("Enter")


async def test_an_order_is_asked_twice_before_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = {scope: add_key(file, scope, [scope]) for scope in ("view", "admin")}
    async with (
        asked_place(tmp_path, says="", api_keys_file=file) as place,
        open_tab(place.page) as tab,
    ):
        page, presented = tab.page, place.scheduler.presented
        await tab.until("document.getElementById('key').open", "the question for a key")
        await page.locator("#key-input").fill(keys["view"])
        await page.keyboard.press("Enter")
        await tab.until("document.querySelectorAll('.agent').length > 0", "the cluster")
        await operator_of(tab, keys["view"])
        await tab.until("document.getElementById('orders-problem').textContent", "the refusal")
        assert "scope 'admin'" in await tab.text("#orders-problem")
        await operator_of(tab, keys["admin"])
        await tab.until("document.querySelectorAll('#orders-list form').length > 2", "the orders")
        await (
            page.locator("#orders-list form", has_text=re.compile("^Drain"))
            .locator("select")
            .select_option("agent-3")
        )
        await page.get_by_role("button", name="Drain …", exact=True).click()
        assert await tab.text("#order-title") == "Drain agent-3?"
        assert await page.evaluate("document.activeElement.id") == "order-back"
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Drain …", exact=True).click()
        await page.locator("#order-on").click()
        assert await tab.text("#order-on") == "Yes, drain agent-3"
        await page.locator("#order-back").click()
        assert presented == [], "it was not meant"
        # The same from the map, at the agent itself.
        await page.locator(".agent", has_text="agent-5").first.click()
        await page.locator("#device-orders button").first.click()
        await page.locator("#order-on").click()
        await page.locator("#order-on").click()
        await tab.until(
            "/agent-5: done/.test(document.getElementById('orders-log').textContent)", "it"
        )
        assert presented == [f"Bearer {keys['admin']}"]
        kept = await page.evaluate("JSON.stringify({...sessionStorage, ...localStorage})")
        assert keys["admin"] not in kept
        await page.locator("#orders-lock").click()
        assert await page.locator("#device-orders button").count() == 0
        assert await page.locator("#orders-list form").count() == 0
        assert tab.complaints == []


async def test_without_keys_the_page_gives_no_orders(tmp_path: Path) -> None:
    async with asked_place(tmp_path, says="") as place, open_tab(place.page) as tab:
        await operator_of(tab, "ctn_any")
        await tab.until("document.getElementById('orders-problem').textContent", "the refusal")
        assert "api_keys_file" in await tab.text("#orders-problem")
        assert place.scheduler.presented == []


@pytest.mark.parametrize(("size", "dark"), SIZES, ids=["desktop", "dark", "phone", "phone-dark"])
async def test_it_reads_well_at_all_sizes(tmp_path: Path, size: dict[str, int], dark: bool) -> None:
    file = tmp_path / "keys.json"
    keys = {scope: add_key(file, scope, [scope]) for scope in ("*", "admin")}
    says = "A chain holds what no link of it could: each carries its part, and passes the rest on."
    name = f"{'phone' if size is PHONE else 'desktop'}-{'dark' if dark else 'light'}"
    async with (
        asked_place(tmp_path, says=says, api_keys_file=file) as place,
        open_tab(place.page, size=size, dark=dark, motion=False) as tab,
    ):
        remember_an_hour(place)
        await tab.until("document.getElementById('key').open", "the question for a key")
        await tab.page.locator("#key-input").fill(keys["*"])
        await tab.page.keyboard.press("Enter")
        await ask(tab, "Why does a chain hold?")
        await tab.until(ANSWERED, "the answer")
        await tab.until("document.querySelectorAll('.line').length > 8", "the hour")
        await tab.page.locator("#hour-charts").focus()
        await tab.page.keyboard.press("ArrowLeft")
        await operator_of(tab, keys["admin"])
        await tab.until("document.querySelectorAll('#orders-list form').length > 2", "the orders")
        await tab.page.locator(".agent").first.click()
        assert await tab.inaccessible() == []
        for section in ("try", "hour", "orders", "device"):
            await tab.page.evaluate(f"document.getElementById('{section}').scrollIntoView()")
            assert await tab.scroll_width() <= size["width"], section
            await tab.shot(f"asking-{section}-{name}")
        await tab.page.locator("#device-orders button").first.click()
        assert await tab.inaccessible() == []
        await tab.page.keyboard.press("Escape")
        await look_at(tab, red=250, green=90, blue=20)
        assert await tab.scroll_width() <= size["width"]
        assert await tab.inaccessible() == []
        await tab.shot(f"asking-picture-{name}")
        assert tab.complaints == []
