"""A page in a real browser, for tests: opened at a width and in a colour scheme, and readable there."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed; it is in the extra `test`")

Browser = webdriver.Chrome

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="chromium or chromedriver is not on PATH; Debian's packages are chromium and chromium-driver",
)

RIGHTMOST = """
const elements = [...document.querySelectorAll("main :not(svg *)")];
return Math.max(...elements.map((element) => element.getBoundingClientRect().right));
"""

# Of each text on the page with what is below it.
CONTRASTS = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const luminance = (colour) => {
  const linear = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = channels(colour).map((value) => linear(value / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if ((channels(colour)[3] ?? 1) === 1) return colour;
  }
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode;
  const parent = text.parentElement;
  if (!text.data.trim() || parent.closest("script, noscript, .unseen")) continue;
  const style = getComputedStyle(parent);
  const drawn = parent.matches("svg text");
  // On a pattern, text has an edge of the colour that is below it.
  const fill = parent.matches(".item text") && getComputedStyle(parent.previousElementSibling).fill;
  const below = !fill ? ground(parent) : fill.startsWith("rgb(") ? fill : style.stroke;
  const [a, b] = [luminance(drawn ? style.fill : style.color), luminance(below)];
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.data.trim()]);
}
return found;
"""


def one(within: Any, selector: str) -> Any:
    return within.find_element("css selector", selector)


def every(within: Any, selector: str) -> list[Any]:
    return within.find_elements("css selector", selector)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # A sandbox of its own and /dev/shm are what containers lack, and root may not have the first.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    look(chromium)
    yield chromium
    assert chromium.get_log("browser") == []


def look(browser: Browser, width: int = 1280, scheme: str = "light", script: bool = True) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})


def assert_readable(browser: Browser, width: int) -> None:
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(RIGHTMOST) <= width
    contrasts = browser.execute_script(CONTRASTS)
    assert len(contrasts) > 50
    assert min(contrasts)[0] >= 4.5, min(contrasts)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
