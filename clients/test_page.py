"""The page in Debian's Chromium: axe-core's rules at three widths, in light and dark colours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.client("playwright"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 820, 1440])
def test_the_page_passes_axe_core(url: str, browser: Browser, width: int, scheme: str):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url.removesuffix("/v1"))
    page.select_option("#model", "spoken_sums")
    page.wait_for_selector(".stage >> nth=2")
    check(page)
    page.click("#set")
    check(page)
    page.keyboard.press("Escape")
    page.check("#speak", force=True)
    page.fill("#text", "twelve plus thirty")
    page.keyboard.press("Enter")
    page.wait_for_selector("#log .bubble:has-text('12 + 30')")
    check(page)  # while the answer is spoken, unless it is fast
    page.wait_for_selector("#log audio")
    page.click("#requests summary")
    check(page)
    assert errors == []
    page.close()


def check(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
