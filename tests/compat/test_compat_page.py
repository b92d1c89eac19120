"""The page of published runs in a real browser."""

from pathlib import Path

import pytest
from browsing import Browser, assert_readable, browser, chromium, every, look, needs_chromium, one
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from vllm_async_spec.compat.archive import read_archive
from vllm_async_spec.compat.publish import WANTED, documents
from vllm_async_spec.compat.render import render_html
from vllm_async_spec.compat.report import Row, Run

__all__ = ["browser", "chromium"]  # fixtures

pytestmark = needs_chromium

SITE = "vllm/v1/attention/backends/flashinfer.py:1518"
FAULT = f"told upper bound, it waits: copy to host (cpu) at {SITE}"


def row(backend: str, verdict: str, *limits: str) -> Row:
    passed = verdict in ("none", "prefill rows", "upper bound")
    faults = {} if passed else {FAULT: ["decode", "mixed"]}
    return Row(backend, f"vllm:{backend}", verdict, passed, 18, 18, list(limits), faults)


def run(release: str, *rows: Row, plugin: bool = False, **absent: str) -> Run:
    applied = ["flashinfer-builder"] if plugin else None
    return Run("0.1.0", release, "2.13.0", "cpu", applied, "2026-11-21", "compat", "so many", list(rows), absent)


RUNS = [
    run(
        "0.26.0",
        row("FLASH_ATTN", "none", "kernels not validated"),
        row("FLASHINFER", "exact", "wrong with slack"),
        row("MAMBA2", "blocks"),
        TREE_ATTN="this release has none",
    ),
    run("0.26.0", row("FLASH_ATTN", "none"), row("FLASHINFER", "none"), row("MAMBA2", "blocks"), plugin=True),
    run("0.32.0", row("FLASH_ATTN", "none"), row("FLASHINFER", "blocks"), row("MAMBA2", "prefill rows")),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "compat.html"
    path.write_text(render_html(RUNS, WANTED), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> str:
    runs = read_archive(Path(__file__).parents[2] / "docs" / "compat")
    path = tmp_path_factory.mktemp("page") / "compatibility.html"
    path.write_text(documents(runs)["assets/compatibility.html"], encoding="utf-8")
    return path.as_uri()


def choose(browser: Browser, value: str) -> None:
    one(browser, f"input[value='{value}'] + span").click()


def shown(browser: Browser) -> list[str]:
    return [each.text for each in every(browser, "tbody th") if each.is_displayed()]


def link(browser: Browser, anchor: str) -> object:
    return one(browser, f"a[href='#{anchor}']")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("which", ["small", "published"])
def test_the_page_fits_and_can_be_read(
    browser: Browser, page: str, published: str, which: str, width: int, scheme: str
):
    look(browser, width, scheme)
    browser.get(page if which == "small" else published)
    assert_readable(browser, width)


def test_no_text_of_a_cell_is_cut_off(browser: Browser, published: str):
    browser.get(published)
    cut = "return [...document.querySelectorAll('td .chip')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert browser.execute_script(cut) == 0


def test_a_cell_has_the_colour_of_its_class(browser: Browser, page: str):
    browser.get(page)
    anchors = ["flash-attn-0-26-0-stock-cpu", "flashinfer-0-26-0-stock-cpu", "mamba2-0-26-0-stock-cpu"]
    colours = [link(browser, anchor).value_of_css_property("background-color") for anchor in anchors]
    assert len(set(colours)) == 3
    assert link(browser, "mamba2-0-32-0-stock-cpu").value_of_css_property("background-color") not in colours


def test_what_was_not_run_says_so_and_leads_nowhere(browser: Browser, page: str):
    browser.get(page)
    cells = every(browser, "td[data-machine=h200]")
    assert len(cells) == 6 * 4
    assert {cell.text for cell in cells} == {"not run"}
    assert not every(browser, "td[data-machine=h200] a")
    assert "this release has none" in one(browser, "tr[data-backend=tree_attn]").text


def test_filters_leave_what_they_say(browser: Browser, page: str):
    browser.get(page)
    assert shown(browser) == ["FLASH_ATTN", "TREE_ATTN", "FLASHINFER", "MAMBA2"]
    choose(browser, "blocks")  # the first click on one of all means it alone
    assert shown(browser) == ["FLASHINFER", "MAMBA2"]
    choose(browser, "0-26-0")
    assert shown(browser) == ["MAMBA2"]
    choose(browser, "plugin")
    choose(browser, "h200")
    assert shown(browser) == []
    assert one(browser, ".nothing").is_displayed()
    choose(browser, "h200")  # nothing is left on, so all are
    assert shown(browser) == ["MAMBA2"]
    heads = [each.text.split() for each in every(browser, "thead th") if each.is_displayed()]
    assert heads == [["backend"], ["0.26.0", "plugin", "cpu"], ["0.26.0", "plugin", "h200"]]


def test_a_backend_is_found_by_its_name(browser: Browser, page: str):
    browser.get(page)
    one(browser, "input[type=search]").send_keys("Flash")
    assert shown(browser) == ["FLASH_ATTN", "FLASHINFER"]
    assert one(browser, ".count").text == "2 of 4 backends"


def test_pointing_at_a_cell_shows_the_call_site_and_the_reason(browser: Browser, page: str):
    browser.get(page)
    card = one(browser, ".card")
    assert not card.is_displayed()
    ActionChains(browser).move_to_element(link(browser, "flashinfer-0-32-0-stock-cpu")).perform()
    assert card.is_displayed()
    assert SITE in card.text
    assert FAULT in card.text
    assert "2 batches" in card.text


def test_a_tap_shows_all_evidence(browser: Browser, page: str):
    look(browser, 400)
    browser.get(page)
    link(browser, "flashinfer-0-32-0-stock-cpu").click()
    dialog = one(browser, "dialog")
    assert SITE in dialog.text
    assert "2 batches: decode, mixed" in dialog.text
    one(browser, ".close").click()
    assert not dialog.is_displayed()


def test_the_keyboard_reaches_a_cell(browser: Browser, page: str):
    browser.get(page)
    one(browser, "input[type=search]").send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("href").endswith("#flash-attn-0-26-0-stock-cpu")
    assert one(browser, ".card").is_displayed()
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert one(browser, "dialog").is_displayed()
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not one(browser, "dialog").is_displayed()


def test_without_its_script_a_cell_leads_to_its_evidence(browser: Browser, page: str):
    look(browser, script=False)
    browser.get(page)
    assert not one(browser, ".filters").is_displayed()
    anchor = "flashinfer-0-32-0-stock-cpu"
    assert FAULT in one(browser, f"#{anchor}").text
    link(browser, anchor).click()
    assert browser.current_url.endswith(f"#{anchor}")
