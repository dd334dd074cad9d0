"""The dashboard of a real cluster under load, seen in a real Chromium.

Three agents on the CPU serve a vision model over one pipeline and a language model over one chain.
What the page says is compared with what the Admin service answers; then an agent and the scheduler
are killed while somebody looks.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import catenary
import figures
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.demo_models import sample_photographs
from catenaryd.demo.plans import demo_placement
from cluster_harness import MODEL, RunningCluster, running_cluster
from deployed.browser import PHONE, Tab, binary, open_tab
from fault_cluster import install_images
from language_model import MODEL as LANGUAGE_MODEL
from language_model import install

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

AGENTS = ("agent-0", "agent-1", "agent-2")
BLOCKS = 30
LABEL, LANGUAGE_LABEL = f"{MODEL}:1", f"{LANGUAGE_MODEL}:1"
BACK_S = 45.0
"""Until whoever was killed serves again, on two busy cores."""
LAPTOP, POCKET = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
LOADED = "document.querySelectorAll('.agent').length === 3"


class Load:
    """A few requests a second of both kinds, which can be halted."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._goes = threading.Event()
        self._ends = threading.Event()
        self._idle = threading.Semaphore(0)
        self.answered = 0
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), daemon=True)
            for work in (self._infer, self._infer, self._generate)
        ]
        self._goes.set()
        for thread in self._threads:
            thread.start()

    def halt(self) -> None:
        """Returns when everything is answered."""
        self._goes.clear()
        for _ in self._threads:
            assert self._idle.acquire(timeout=60)

    def go(self) -> None:
        while self._idle.acquire(blocking=False):
            pass
        self._goes.set()

    def end(self) -> None:
        self._ends.set()
        self._goes.set()
        for thread in self._threads:
            thread.join(60)

    def _repeat(self, work: Any) -> None:
        with catenary.Client(self._cluster.grpc, timeout_s=30) as client:
            while not self._ends.is_set():
                if not self._goes.is_set():
                    self._idle.release()
                    self._goes.wait()
                try:
                    work(client)
                    self.answered += 1
                except catenary.CatenaryError:
                    time.sleep(0.2)  # somebody was killed, which is what this is about

    @staticmethod
    def _infer(client: catenary.Client) -> None:
        tensor = client.model_metadata(MODEL).inputs[0].name
        client.infer(MODEL, {tensor: np.zeros((1, 3, 224, 224), np.float32)}, slo_ms=3000)
        time.sleep(0.15)

    @staticmethod
    def _generate(client: catenary.Client) -> None:
        client.generate(LANGUAGE_MODEL, "Once upon a time", max_tokens=24)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    binary()  # skips before anything is started
    folder = tmp_path_factory.mktemp("dashboard")
    install(folder / "models")
    key = install_images(folder / "models")
    placement = demo_placement(ModelRepository(folder / "models").block_table(key).blocks)
    cuts = (0, 10, 20, BLOCKS)
    hops = [{"agent": agent, "blocks": [cuts[at], cuts[at + 1]]} for at, agent in enumerate(AGENTS)]
    placement["models"] += [{"name": LANGUAGE_MODEL, "chains": [{"capacity": 4, "hops": hops}]}]  # type: ignore[operator]
    with running_cluster(
        folder,
        models=(MODEL, LANGUAGE_MODEL),
        placement=placement,
        config={"agent": {"threads": 1}},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def load(cluster: RunningCluster) -> Iterator[Load]:
    running = Load(cluster)
    yield running
    running.end()


async def in_thread(work: Any, *given: Any) -> Any:
    """Runs blocking work without holding up what drives the browser."""
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *given)


def client_of(cluster: RunningCluster) -> catenary.Client:
    return catenary.Client(cluster.grpc, admin_target=cluster.admin)


async def settled(
    tab: Tab, kinds: tuple[str, ...] = ("status", "requests", "sessions", "plan")
) -> None:
    """Waits until each feed brought news twice: what is shown then was asked for after now."""
    news = dict.fromkeys(kinds, 0)

    def heard(response: Any) -> None:
        kind = response.url.rpartition("/")[2]
        if kind in news:
            news[kind] += 1

    tab.page.on("response", heard)
    end_s = time.monotonic() + 20
    while min(news.values()) < 2:
        assert time.monotonic() < end_s, news
        await tab.page.wait_for_timeout(100)
    tab.page.remove_listener("response", heard)


async def test_every_panel_shows_what_admin_answers(cluster: RunningCluster, load: Load) -> None:
    load.go()
    await in_thread(time.sleep, 4)
    async with open_tab(cluster.http) as tab:
        await tab.until(LOADED, "the first answer")
        await tab.page.locator("#timelines").scroll_into_view_if_needed()
        await tab.until(
            f"document.querySelector('#timeline-models').textContent.includes('{LABEL}')", "a batch"
        )
        await tab.page.locator("#timeline-canvas").focus()
        shape = rf"agent-\d device: {re.escape(LABEL)}, batch \d+, \d+ rows; booked for"
        await _key_until(tab, shape)
        await tab.shot("cluster-timelines")
        await in_thread(load.halt)
        await settled(tab)
        with client_of(cluster) as client:
            status, requests, plan = await in_thread(
                lambda: (client.status(), client.requests(100), client.plan())
            )
        await _same_cluster(tab, status)
        await _same_models(tab, status, len(await in_thread(_all_requests, cluster)))
        shown = await tab.rows("#requests-table")
        assert [(row[0], row[1], row[2]) for row in shown] == [
            (each.request_id, each.model, each.outcome) for each in requests
        ]
        assert (await tab.facts("#plan-facts"))["Plan"] == plan.plan_id
        assert await tab.page.locator("#explanation").text_content() == plan.explanation
        assert (
            await tab.text("#sessions-table .empty") == "No session generates text at the moment."
        )
        await tab.page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
        await tab.shot("cluster-desktop", whole=True)
        assert tab.complaints == []
        assert tab.refused == []


async def _key_until(tab: Tab, shape: str) -> None:
    """Goes from batch to batch until the words about one have this shape."""
    said: list[str] = []
    for _ in range(60):
        await tab.page.keyboard.press("ArrowLeft")
        said.append(await tab.text("#booking"))
        if re.search(shape, said[-1]):
            return
    raise AssertionError(f"no batch is {shape}: {said}")


def _all_requests(cluster: RunningCluster) -> list[catenary.RecentRequest]:
    with client_of(cluster) as client:
        return client.requests(500)


async def _same_cluster(tab: Tab, status: catenary.ClusterStatus) -> None:
    tiles = await tab.facts("#tiles")
    assert tiles["Agents ready"] == f"{len(AGENTS)} of {len(AGENTS)}"
    assert tiles["Requests in flight"] == "0"
    assert tiles["Requests queued"] == str(status.queued_requests) == "0"
    assert tiles["Reservations"] == str(status.live_reservations)
    assert tiles["Sessions"] == str(status.sessions_in_flight) == "0"
    assert tiles["Redis"] == "up"
    control = await tab.facts("#control-facts")
    assert control["Leader"] == status.scheduler_id
    assert control["Epoch"] == str(status.epoch)
    assert control["Gateways"] == ", ".join(status.gateways)
    cards = await tab.page.eval_on_selector_all(
        ".agent",
        "all => all.map(card => [card.querySelector('strong').textContent,"
        " card.dataset.state, [...card.querySelectorAll('.part')].map(part => part.title)])",
    )
    assert sorted((name, state, sorted(parts)) for name, state, parts in cards) == sorted(
        (agent.agent_id, agent.state, sorted(agent.partitions)) for agent in status.agents
    )
    assert await tab.page.locator("#ropes path.rope").count() >= 2, "the chain hangs"


async def _same_models(tab: Tab, status: catenary.ClusterStatus, ended: int) -> None:
    rows = {row[0]: row for row in await tab.rows("#models-table")}
    assert set(rows) == {LABEL, LANGUAGE_LABEL}
    chain = next(model.chains[0] for model in status.models if model.chains)
    assert rows[LANGUAGE_LABEL][4] == f"{chain.sessions} of {chain.capacity}"
    finished = 0
    for row in rows.values():
        share = re.fullmatch(r"([\d.]+) % of ([\d,]+)((?:, [\d.]+ % (?:late|refused))*)", row[8])
        assert share, row
        # What was not good is told as well.
        assert share[3] or float(share[1]) == 100, row
        finished += int(share[2].replace(",", ""))
        assert float(row[5].removesuffix("/s")) > 0
    assert finished == ended
    caches = {row[0]: row for row in await tab.rows("#agent-caches")}
    assert set(caches) == set(AGENTS)
    chains = await tab.rows("#chain-caches")
    assert [row[1] for row in chains] == [f"{chain.sessions} of {chain.capacity}"]


async def test_caches_and_sessions_are_shown_while_text_is_generated(
    cluster: RunningCluster, load: Load
) -> None:
    load.go()
    async with open_tab(cluster.http) as tab:
        await tab.until(
            "document.querySelectorAll('#sessions-table tbody tr').length > 0", "a session"
        )
        row = (await tab.rows("#sessions-table"))[0]
        assert row[2] == LANGUAGE_LABEL
        assert row[4] == "agent-0 [0,10) → agent-1 [10,20) → agent-2 [20,30)"
        await tab.until(
            "[...document.querySelectorAll('#agent-caches tbody td:nth-child(2)')]"
            ".some(cell => parseInt(cell.textContent) > 0)",
            "slots in use",
        )
        assert tab.complaints == []


async def test_a_requests_waterfall_is_what_admin_traces(
    cluster: RunningCluster, load: Load
) -> None:
    load.go()
    async with open_tab(cluster.http) as tab:
        for label, stage in ((LABEL, "compute"), (LANGUAGE_LABEL, "until the first token")):
            await tab.until(
                f"[...document.querySelectorAll('#request-model option')].some(o => o.value === '{label}')",
                label,
            )
            await tab.page.locator("#request-model").select_option(label)
            wanted = await tab.text("#requests-table button.link")
            # By its name: others end meanwhile and stand above it.
            await tab.page.locator("#requests-table button.link", has_text=wanted).click()
            await tab.until(
                "document.querySelectorAll('.waterfall li').length > 3", "the waterfall"
            )
            with client_of(cluster) as client:
                trace = await in_thread(client.trace, wanted)
            title = await tab.text("#details-title")
            assert title == f"Request {trace.request_id}"
            bars = await tab.page.locator(".waterfall .track").count()
            assert bars == len(trace.spans)
            assert stage in await tab.text(".waterfall")
            facts = await tab.facts("#details-body .facts")
            assert (facts["Model"], facts["Outcome"], facts["Trace"]) == (
                label,
                "OK",
                trace.trace_id,
            )
            await tab.shot(f"waterfall-{label.split('-')[0]}")
            await tab.page.locator("#details-close").click()
        assert tab.complaints == []


@pytest.mark.parametrize("size", [LAPTOP, POCKET], ids=["laptop", "pocket"])
async def test_a_visitor_asks_both_models(
    cluster: RunningCluster, load: Load, size: dict[str, int]
) -> None:
    load.go()
    name = f"visitor-{size['width']}"
    photograph = sample_photographs()["chelsea"]
    async with open_tab(cluster.http, size=size, motion=False, inside=False) as tab:
        await tab.until(LOADED, "the first answer")
        await tab.until("!document.getElementById('chat').hidden", "the language model")
        await tab.until("document.querySelectorAll('#hour-charts .line').length === 8", "the hour")
        await tab.shot(name)
        await tab.page.locator("#chat-text").fill("What is gravity?")
        await tab.page.keyboard.press("Enter")
        figures_of = "document.querySelector('#chat-log .note').textContent"
        await tab.until(f"/First word after .* tokens/.test({figures_of})", "the answer", 60)
        assert len(await tab.page.locator("#chat-log .answer .words").inner_text()) > 20
        await tab.page.evaluate("document.getElementById('try').scrollIntoView()")
        await tab.shot(f"{name}-chat")
        await tab.page.locator("#try-model").select_option(LABEL)
        await tab.page.locator("#picture-file").set_input_files(str(photograph))
        await tab.until(
            "document.querySelectorAll('#picture-classes li').length === 5", "classes", 60
        )
        assert "cat" in (await tab.page.locator(".class-name").all_inner_texts())[0].lower()
        await tab.shot(f"{name}-picture")
        await tab.page.evaluate("document.getElementById('hour').scrollIntoView()")
        await tab.shot(f"{name}-hour")
        await tab.page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
        await tab.shot(f"{name}-whole", whole=True)
        assert await tab.scroll_width() <= size["width"]
        assert tab.complaints == []


async def test_it_reads_well_on_a_phone_in_the_dark(cluster: RunningCluster, load: Load) -> None:
    load.go()
    async with open_tab(cluster.http, size=PHONE, dark=True) as tab:
        await tab.until(LOADED, "the first answer")
        await settled(tab)
        sections = await tab.page.eval_on_selector_all(
            "section[id]", "all => all.map(section => section.id)"
        )
        for section in sections:
            await tab.page.evaluate(
                f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})"
            )
            await tab.page.wait_for_timeout(1200 if section == "timelines" else 150)
            assert await tab.scroll_width() <= PHONE["width"], section
            await tab.shot(f"phone-{section}")
        await tab.page.locator("#requests-table button.link").first.click()
        await tab.until("document.querySelectorAll('.waterfall li').length > 3", "the waterfall")
        assert await tab.scroll_width() <= PHONE["width"]
        await tab.shot("phone-waterfall")
        background = await tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in re.findall(r"\d+", background)) < 60
        assert tab.complaints == []


async def test_a_lost_agent_is_seen_as_lost_and_comes_back(
    cluster: RunningCluster, load: Load
) -> None:
    load.go()
    state = (
        "[...document.querySelectorAll('.agent')].find(c => c.agentId === 'agent-1').dataset.state"
    )
    async with open_tab(cluster.http) as tab:
        await tab.until(LOADED, "the first answer")
        # Stopped first: a killed one is started again at once, maybe between two looks.
        pid = int(cluster.facts["pids"]["agent-1"])
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        await tab.until(f"{state} === 'lost'", "the loss", 15)
        figures.report(
            "dashboard",
            "a silent agent is shown as lost",
            time.monotonic() - stopped_s,
            "s",
            "<= 15",
        )
        assert (await tab.facts("#tiles"))["Agents ready"] == "2 of 3"
        await tab.shot("agent-lost")
        os.kill(pid, signal.SIGKILL)
        await tab.until(f"{state} === 'ready'", "the return", BACK_S)
        assert tab.complaints == []


async def test_without_a_scheduler_old_facts_stay_until_another_leads(
    cluster: RunningCluster, load: Load
) -> None:
    load.go()
    banner = "document.getElementById('banner')"
    async with open_tab(cluster.http) as tab:
        await tab.until(LOADED, "the first answer")
        epoch = int((await tab.facts("#control-facts"))["Epoch"])
        pid = int(cluster.facts["pids"]["scheduler"])
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        await tab.until(f"!{banner}.hidden", "the warning", 15)
        figures.report(
            "dashboard",
            "a silent scheduler is called away",
            time.monotonic() - stopped_s,
            "s",
            "<= 15",
        )
        await tab.until(
            "document.getElementById('cluster').classList.contains('stale')", "grey", 15
        )
        assert "scheduler is away" in await tab.text("#banner")
        assert await tab.page.locator(".agent").count() == len(AGENTS)
        assert "ago" in await tab.text("#cluster .as-of")
        assert await tab.page.locator("#requests.stale").count() == 0, "the gateway knows these"
        await tab.shot("scheduler-killed")
        os.kill(pid, signal.SIGKILL)
        await tab.until(f"{banner}.hidden", "the end of the warning", BACK_S)
        await tab.until(
            f"Number([...document.querySelectorAll('#control-facts div')].find("
            f"row => row.firstChild.textContent === 'Epoch').lastChild.textContent) > {epoch}",
            "the next leader",
            BACK_S,
        )
        await tab.until(
            "!document.getElementById('cluster').classList.contains('stale')", "colour", 10
        )
        assert tab.complaints == []
