"""A served plan whose servers and client are made up: small processes without vLLM, which fail where they are told."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arms import Arm, Plugin
from benchmarks.serving import servers
from benchmarks.serving.plan import ServeLoad, ServePlan
from benchmarks.serving.results import ServeFile
from benchmarks.serving.run import ServeRunner
from benchmarks.serving.table import serve_grid

FAKES = Path(__file__).with_name("served_fakes")
PLAN = ServePlan(
    name="made-up",
    about="Latencies that nobody measured",
    arms=tuple(Arm(plugin.value, "tiny", plugin=plugin) for plugin in Plugin),
    loads=(ServeLoad("rate-2", rate=2.0), ServeLoad("rate-4", rate=4.0), ServeLoad("closed-4", concurrency=4)),
    turns=2,
    seconds=1.0,
    goodput={"ttft": 200.0, "tpot": 20.0},
    sampled=8,
)


def rows_of(result: ServeFile) -> list[dict[str, str]]:
    """The table of a result, each row by its columns' names."""
    found = serve_grid(result.document)
    return [dict(zip(found.head, row, strict=True)) for row in found.rows]


class Fakes:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "events").touch()
        self.fail({})
        monkeypatch.setenv("SERVED_FAKES", str(folder))
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder / "compiled"))
        monkeypatch.setattr(servers, "_DYING_S", 0.5)
        monkeypatch.setattr(servers, "SERVER", [str(FAKES / "server.py")])
        monkeypatch.setattr(servers, "CLIENT", [str(FAKES / "client.py")])
        here = Path(__file__).parent
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (here, here.parents[1]))))
        monkeypatch.setattr("benchmarks.serving.run.installed_vllm", lambda: "0.32.0")

    def fail(self, faults: dict[str, str]) -> None:
        """What goes wrong, by "LOAD-PASS ARM", "seeded ARM" or "start ARM"."""
        (self.folder / "faults.json").write_text(json.dumps(faults))

    @property
    def events(self) -> list[str]:
        return (self.folder / "events").read_text().splitlines()

    @property
    def loads(self) -> list[str]:
        return [event for event in self.events if event.startswith(("rate", "closed"))]

    def run(self, plan: ServePlan = PLAN, **options: Any) -> tuple[bool, ServeFile, list[str]]:
        result, lines = ServeFile(self.folder / "result.json", plan), list[str]()
        runner = ServeRunner(plan, result, command="a command", envs={}, cache=self.folder, report=lines.append)
        return runner.run(**options), result, lines
