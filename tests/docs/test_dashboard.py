"""The Grafana dashboard asks only for metrics that the plugin or vLLM exports, and is laid out as Grafana reads it."""

import importlib.util
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_async_spec.vllm_plugin.ledger import State
from vllm_async_spec.vllm_plugin.metrics.collector import Collector
from vllm_async_spec.vllm_plugin.metrics.snapshot import Engine, Snapshot
from vllm_async_spec.vllm_plugin.settings import Settings

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "vllm-async-spec.json").read_text(encoding="utf-8"))
METRIC = re.compile(r"vllm:\w+")
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")
OWN = "vllm:async_spec_"
PANELS: dict[str, dict[str, Any]] = {panel["title"]: panel for panel in DASHBOARD["panels"]}
KINDS = {"stat", "table", "bargauge", "timeseries"}


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["definition"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query")


def plugins_metrics() -> dict[str, set[str]]:
    found = Snapshot(engines=[Engine(True, "vLLM", "V2", "FLASH_ATTN")], refused={"patch": "why"})
    found.patches["patch"] = State.REFUSED
    found.fallbacks["min_tokens"] = 1
    found.add_wait("cause", "copy", 1, 0.5)
    families = Collector(lambda: found, Settings.read({})).collect()
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def sources_of_vllm() -> list[Path]:
    installed = importlib.util.find_spec("vllm")
    found = [Path(installed.origin).parent] if installed is not None and installed.origin else []
    return found + sorted((ROOT / ".cache" / "releases").glob("*/vllm"))


def test_each_metric_of_the_plugin_exists_and_is_shown():
    asked = {name for text in expressions() for name in METRIC.findall(text) if name.startswith(OWN)}
    assert asked == plugins_metrics().keys()


def test_each_metric_of_vllm_exists_in_every_release_here():
    asked = {SUFFIX.sub("", name) for text in expressions() for name in METRIC.findall(text)}
    asked = {name for name in asked if not name.startswith(OWN)}
    if not (sources := sources_of_vllm()):
        pytest.skip("vLLM is not installed, and no release was fetched")
    for source in sources:
        text = "".join(path.read_text(encoding="utf-8") for path in (source / "v1").rglob("*.py") if _has_metrics(path))
        assert asked - {name for name in asked if f'"{name}"' in text} == set(), source


def _has_metrics(path: Path) -> bool:
    return "metrics" in path.parts or path.name == "metrics.py"


def test_each_label_that_a_query_groups_by_is_a_label_of_the_metric():
    known = plugins_metrics()
    for text in expressions():
        names = METRIC.findall(text)
        if not names or not all(name in known for name in names):
            continue
        for labels in re.findall(r"by \(([\w, ]+)\)", text):
            assert set(labels.split(", ")) <= known[names[0]] | {"instance"}, text


@pytest.mark.parametrize("expression", list(expressions()))
def test_each_query_is_balanced(expression: str):
    depth: list[str] = []
    for letter in re.sub(r'"[^"]*"', "", expression):
        if letter in "([{":
            depth.append({"(": ")", "[": "]", "{": "}"}[letter])
        elif letter in ")]}":
            assert depth.pop() == letter
    assert depth == []


@pytest.mark.parametrize("title", PANELS)
def test_each_panel_has_what_grafana_needs(title: str):
    panel = PANELS[title]
    assert panel["type"] in KINDS
    assert panel["description"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    references = [target["refId"] for target in panel["targets"]]
    assert references == list("ABCDEF"[: len(references)])
    place = panel["gridPos"]
    assert 0 <= place["x"] < place["x"] + place["w"] <= 24


def test_panels_have_their_own_ids_and_places():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(PANELS) == len(DASHBOARD["panels"])
    for one, other in itertools.combinations((panel["gridPos"] for panel in DASHBOARD["panels"]), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"] == DASHBOARD["title"] == "vllm-async-spec"
