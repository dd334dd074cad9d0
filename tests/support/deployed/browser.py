"""A real Chromium for tests of the dashboard.

The tool that drives it (Playwright) and axe, which knows what accessible pages are, come from
`.venv-tools` (requirements/test-tools.txt); the browser itself is the system's. Tests skip with a
reason where either is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ARTIFACTS = Path(os.environ.get("CATENARY_ARTIFACTS", ROOT / "build" / "screenshots"))
_BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
)
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1366, "height": 900}
_INSIDE = "sessionStorage.setItem('catenary-depth', 'inside')"
_REFUSED = "Failed to load resource"
"""What Chromium logs of an answer with an error status, and of none."""


def require(*modules: str) -> None:
    """Makes what is in `.venv-tools` importable, behind all of our own, or skips the test."""
    for folder in (ROOT / ".venv-tools" / "lib").glob("python*/site-packages"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: `make test-browser` installs it into .venv-tools")


def binary() -> str:
    """Returns the browser; skips the test if there is none, or nothing to drive it with."""
    require("playwright", "axe_playwright_python")
    named = os.environ.get("CATENARY_CHROMIUM")
    found = named or next((path for name in _BINARIES if (path := shutil.which(name))), None)
    if not found:
        pytest.skip("needs Chromium (a package of most systems, or CATENARY_CHROMIUM=path)")
    return found


@dataclass
class Tab:
    """One open page, and what it complained about."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Requests that got no answer, or one with an error status."""

    async def text(self, selector: str) -> str:
        return str(await self.page.locator(selector).first.inner_text())

    async def facts(self, selector: str) -> dict[str, str]:
        """The terms and values of a <dl>."""
        pairs = await self.page.eval_on_selector_all(
            f"{selector} > div", "all => all.map(e => [...e.children].map(c => c.textContent))"
        )
        return dict(pairs)

    async def rows(self, selector: str) -> list[list[str]]:
        """The cells of a table."""
        found: list[list[str]] = await self.page.eval_on_selector_all(
            f"{selector} tbody tr",
            "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))",
        )
        return found

    async def until(self, expression: str, what: str, timeout_s: float = 20.0) -> None:
        """Waits until a JavaScript expression holds.

        Asked again and again from here: a page with our policy lets nobody wait inside it.
        """
        end_s = time.monotonic() + timeout_s
        while not await self.page.evaluate(expression):
            if time.monotonic() > end_s:
                banner = await self.page.locator("#banner").text_content()
                raise AssertionError(f"{what} did not come; {banner} {self.complaints}")
            await self.page.wait_for_timeout(50)

    async def scroll_width(self) -> int:
        return int(await self.page.evaluate("document.documentElement.scrollWidth"))

    async def shot(self, name: str, *, whole: bool = False) -> None:
        """Keeps a picture of the page among the artefacts of the run."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=whole)

    async def inaccessible(self) -> list[str]:
        """What axe finds wrong."""
        from axe_playwright_python.async_playwright import Axe

        found = await Axe().run(self.page)
        return [
            f"{each['id']}: {node['target']} {node['failureSummary']}"
            for each in found.response["violations"]
            for node in each["nodes"]
        ]


@asynccontextmanager
async def open_tab(
    url: str,
    *,
    size: dict[str, int] = DESKTOP,
    dark: bool = False,
    motion: bool = True,
    inside: bool = True,
) -> AsyncIterator[Tab]:
    """Opens a page in a browser of its own, with a profile of its own.

    `inside`: with the inside of the cluster, as operators look at it, not as visitors do.
    """
    path = binary()
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        try:
            context = await chromium.new_context(
                viewport=size,
                color_scheme="dark" if dark else "light",
                reduced_motion="no-preference" if motion else "reduce",
                has_touch=size is PHONE,
            )
            tab = Tab(await context.new_page())
            tab.page.on("console", lambda message: _heard(tab, message))
            tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
            if inside:
                await tab.page.add_init_script(_INSIDE)
            await tab.page.goto(url)
            yield tab
        finally:
            await chromium.close()


def _heard(tab: Tab, message: Any) -> None:
    if message.type in ("error", "warning"):
        kept = tab.refused if message.text.startswith(_REFUSED) else tab.complaints
        kept.append(message.text)
