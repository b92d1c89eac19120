"""The page of an audit in a real browser."""

from pathlib import Path

import audit_reports
import pytest
from browsing import Browser, assert_readable, browser, chromium, every, look, needs_chromium, one
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from vllm_async_spec.audit.html import render_html

__all__ = ["browser", "chromium"]  # fixtures

pytestmark = needs_chromium

PAGES = {
    "single": (audit_reports.waiting(), None),
    "compared": (audit_reports.flowing(), audit_reports.waiting()),
    "simulated": (audit_reports.simulated(), None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    for name, (report, before) in PAGES.items():
        (made / f"{name}.html").write_text(render_html(report, before), encoding="utf-8")
    return made


def visit(browser: Browser, folder: Path, name: str) -> None:
    browser.get((folder / f"{name}.html").as_uri())


def critical_blocks(browser: Browser) -> list[WebElement]:
    return every(browser, ".item.critical")


def column(browser: Browser, number: int) -> list[str]:
    return [row.text for row in every(browser, f".causes tbody td:nth-child({number})")]


def visible_range(browser: Browser) -> str:
    return one(browser, ".range").text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_fits_and_can_be_read(browser: Browser, folder: Path, name: str, width: int, scheme: str):
    look(browser, width, scheme)
    visit(browser, folder, name)
    for details in every(browser, "summary"):
        details.click()
    assert browser.execute_script("return innerWidth") == width
    assert_readable(browser, width)


def test_the_colour_scheme_is_the_readers(browser: Browser, folder: Path):
    grounds = []
    for scheme in ("light", "dark"):
        look(browser, scheme=scheme)
        visit(browser, folder, "single")
        grounds.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] == "rgb(255, 255, 255)" != grounds[1]


@pytest.mark.parametrize("width", [1280, 400])
def test_a_click_on_a_cause_shows_its_stack(browser: Browser, folder: Path, width: int):
    look(browser, width)
    visit(browser, folder, "single")
    stack = one(browser, ".stack")
    assert not stack.is_displayed()
    one(browser, ".causes summary").click()
    assert stack.is_displayed()
    assert str(audit_reports.STEP) in stack.text.replace("\n", " ")
    one(browser, ".causes summary").click()
    assert not stack.is_displayed()


@pytest.mark.parametrize("width", [1280, 400])
def test_a_click_on_a_head_sorts(browser: Browser, folder: Path, width: int):
    look(browser, width)
    visit(browser, folder, "single")
    head = one(browser, ".causes th:nth-child(4)")
    as_reported = column(browser, 4)
    one(head, "button").click()
    assert head.get_attribute("aria-sort") == "descending"
    falling = column(browser, 4)
    assert [text.split()[-1] for text in falling] == ["8.77", "3.10", "0.92", "0.06", "<0.01"] != as_reported
    one(head, "button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(browser, 4) == falling[::-1]
    one(browser, ".causes th:nth-child(2) button").click()
    assert head.get_attribute("aria-sort") is None
    assert column(browser, 2) == sorted(column(browser, 2))


@pytest.mark.parametrize("width", [1280, 400])
def test_pointing_at_a_wait_says_where_it_is(browser: Browser, folder: Path, width: int):
    look(browser, width)
    visit(browser, folder, "single")
    readout = one(browser, ".readout")
    assert str(audit_reports.PLAN) not in readout.text
    browser.execute_script("arguments[0].scrollIntoView({block: 'end'})", readout)
    ActionChains(browser).move_to_element(critical_blocks(browser)[1]).perform()
    assert readout.text.startswith("critical wait: copy to host, 3.1 ms")
    assert str(audit_reports.PLAN) in readout.text
    assert one(browser, ".extent").is_displayed()


def test_a_tap_on_a_wait_says_where_it_is(browser: Browser, folder: Path):
    look(browser, 400)
    visit(browser, folder, "single")
    critical_blocks(browser)[1].click()
    assert str(audit_reports.PLAN) in one(browser, ".readout").text


def test_the_keyboard_goes_from_block_to_block(browser: Browser, folder: Path):
    visit(browser, folder, "single")
    assert len(every(browser, ".item[tabindex='0']")) == 1
    one(browser, "[data-do=all]").send_keys(Keys.TAB)
    said = []
    for key in ("", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.END, Keys.HOME):
        if key:
            browser.switch_to.active_element.send_keys(key)
        block = browser.switch_to.active_element
        said.append(block.accessible_name)
        what = said[-1].partition(" at ")[0]
        assert one(browser, ".readout").text.startswith(what)
    assert said[0].startswith("scheduling: schedule, ")
    assert said[1].startswith("input preparation: _prepare_inputs, ")
    assert said[2] == f"critical wait: event, 920 µs at {audit_reports.ACCEPTED}"
    assert [text.partition(",")[0] for text in said[3:]] == ["output: get_output", "wait: event", "output: get_output"]


def test_zooming_and_panning_change_what_is_seen(browser: Browser, folder: Path):
    visit(browser, folder, "single")
    whole = visible_range(browser)
    width = critical_blocks(browser)[4].rect["width"]
    press = {what: one(browser, f"[data-do={what}]").click for what in ("in", "out", "right", "all")}
    press["in"]()
    near = visible_range(browser)
    assert near != whole
    assert critical_blocks(browser)[4].rect["width"] == pytest.approx(2 * width, rel=0.1)
    press["right"]()
    assert visible_range(browser) not in (near, whole)
    press["out"]()
    press["out"]()
    assert visible_range(browser) == whole
    press["in"]()
    press["all"]()
    assert visible_range(browser) == whole
    browser.switch_to.active_element.send_keys(Keys.TAB, "+")
    assert visible_range(browser) == near


def test_the_wheel_zooms_with_control_only_and_dragging_pans(browser: Browser, folder: Path):
    visit(browser, folder, "single")
    plot = one(browser, ".plot svg")
    whole = visible_range(browser)
    turn = "arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: -400, clientX: 640, ...arguments[1]}))"
    browser.execute_script(turn, plot, {})
    assert visible_range(browser) == whole
    browser.execute_script(turn, plot, {"ctrlKey": True})
    near = visible_range(browser)
    assert near != whole
    ActionChains(browser).move_to_element(plot).click_and_hold().move_by_offset(-60, 0).move_by_offset(
        -60, 0
    ).release().perform()
    assert visible_range(browser) not in (near, whole)


def test_before_and_after_can_be_seen_alone(browser: Browser, folder: Path):
    visit(browser, folder, "compared")
    plots = every(browser, ".plot")
    seen = {}
    for name in ("both", "before", "after"):
        one(browser, f"[value={name}] + span").click()
        seen[name] = [plot.is_displayed() for plot in plots]
    assert seen == {"both": [True, True], "before": [True, False], "after": [False, True]}
    assert len(every(plots[0], ".item.critical")) == 8
    assert len(every(plots[1], ".item.critical")) == 0


def test_without_its_script_the_page_still_tells(browser: Browser, folder: Path):
    look(browser, script=False)
    visit(browser, folder, "compared")
    body = one(browser, "body").text
    assert audit_reports.flowing().headline in body.replace("\n", " ")
    assert audit_reports.waiting().command in body.replace("\n", " ")
    assert "The timeline needs JavaScript" in body
    assert every(browser, "th button") == []
    assert not one(browser, "#timeline").is_displayed()
    one(browser, ".causes summary").click()
    assert one(browser, ".stack").is_displayed()
