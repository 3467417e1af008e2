"""The site in a real browser: headless Chromium, the system's own."""

import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if not CHROMIUM and not os.environ.get("CI"):
    pytest.skip(
        "no Chromium; install your system's package to run the browser test",
        allow_module_level=True,
    )

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

DESKTOP = {"width": 1280, "height": 900}
CODE = ("03_train.html", "index.html")  # Python and shell


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: object) -> Iterator[Page]:
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    page = context.new_page()
    page.complaints = []
    page.on(
        "console",
        lambda m: page.complaints.append(m.text) if m.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda e: page.complaints.append(str(e)))
    page.on(
        "request",
        lambda r: None if r.url.startswith(("http://127.0.0.1", "data:")) else page.complaints.append(f"asks for {r.url}"),
    )
    yield page
    context.close()


def visit(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_load_state("networkidle")


def names(site: Path) -> list[str]:
    return sorted(p.name for p in site.glob("*.html"))


def axe_faults(page: Page, code: bool = False) -> list[str]:
    """The serious ones; the words of code, which are many and look the same on all pages, only if asked for."""
    found = Axe().run(page, context=None if code else {"exclude": [["pre span"]]}, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{v['id']} ({v['impact']}): {v['nodes'][0]['html'][:160]}" for v in found if v["impact"] in ("serious", "critical")]


def test_pages_load_quietly_are_accessible_and_fit_a_phone(page: Page, address: str, site: Path) -> None:
    faults = []
    for name in names(site):
        page.set_viewport_size(DESKTOP)
        visit(page, f"{address}/{name}")
        assert page.locator("h1").first.is_visible(), name
        faults += [f"{name}: {fault}" for fault in [*page.complaints, *axe_faults(page, code=name in CODE)]]
        page.complaints.clear()
        page.set_viewport_size({"width": 390, "height": 844})
        if (width := page.evaluate("document.documentElement.scrollWidth")) > 391:
            faults.append(f"{name} is {width} px wide on a screen of 390")
    assert faults == []


def test_the_dark_theme_is_accessible(browser: object, address: str, site: Path) -> None:
    context = browser.new_context(viewport=DESKTOP, color_scheme="dark")
    page, faults = context.new_page(), []
    for name in {*names(site)[::4], *CODE}:  # it differs in its colours only
        visit(page, f"{address}/{name}")
        faults += [f"{name}: {fault}" for fault in axe_faults(page, code=name in CODE)]
    context.close()
    assert faults == []


def test_search_finds_a_word_and_leads_there(page: Page, address: str) -> None:
    visit(page, f"{address}/index.html")
    page.locator("input[type=search], .smalldocs-search input").first.fill("sinusoids")
    hit = page.locator("a.search-result").first
    hit.wait_for()
    hit.click()
    page.wait_for_url("**/*.html*")
    assert "sinusoids" in page.locator("main").inner_text().lower()


def background(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_mode_switch_works_and_is_remembered(page: Page, address: str) -> None:
    visit(page, f"{address}/index.html")
    light = background(page)
    page.locator(".quarto-color-scheme-toggle").first.click()
    page.wait_for_function(f"getComputedStyle(document.body).backgroundColor != '{light}'")
    visit(page, f"{address}/18_ucr.html")
    assert background(page) != light


def test_maths_is_rendered(page: Page, address: str) -> None:
    visit(page, f"{address}/02_positions.html")
    page.wait_for_selector("#eq-sinusoids svg, #eq-sinusoids mjx-container", state="attached")
    shown = page.locator("main").inner_text()
    assert "\\sin" not in shown and "\\(" not in shown
    assert page.locator("#eq-sinusoids").bounding_box()["height"] > 20


def test_a_name_leads_to_its_documentation(page: Page, address: str) -> None:
    visit(page, f"{address}/index.html")
    page.locator("main a code", has_text="transfer").first.click()
    page.wait_for_url("**/03_spt.html#api-transfer")
    assert "spt_nbdev.spt" in page.locator("#api-transfer").inner_text()


def test_a_folded_box_opens_by_keyboard(page: Page, address: str) -> None:
    visit(page, f"{address}/03_spt.html")
    head = page.locator("#api-transfer .callout-header")
    body = page.locator("#api-transfer .callout-body")
    assert not body.is_visible()
    head.focus()
    page.keyboard.press("Space")
    body.wait_for(state="visible")
    assert "groups" in body.inner_text()
