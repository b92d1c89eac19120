"""The plugin's metrics."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm_async_spec import __version__
from vllm_async_spec.sync_policy import CallSite, ReadKind, SiteReport, SyncPolicy, SyncReport
from vllm_async_spec.vllm_plugin.ledger import Outcome, PatchSpec, State, count_states
from vllm_async_spec.vllm_plugin.log import logger
from vllm_async_spec.vllm_plugin.metrics.collector import MAX_CAUSES, Collector
from vllm_async_spec.vllm_plugin.metrics.publisher import Publisher, SnapshotFile
from vllm_async_spec.vllm_plugin.metrics.snapshot import Engine, Snapshot
from vllm_async_spec.vllm_plugin.settings import Settings

SERVER = """
import dataclasses, json, multiprocessing, os, signal, subprocess, sys, threading, time
from pathlib import Path

from vllm_async_spec.sync_policy import host_read, record_fallback
from vllm_async_spec.vllm_plugin.metrics import publisher as publishing
from vllm_async_spec.vllm_plugin.metrics.run_directory import VARIABLE
from vllm_async_spec.vllm_plugin.plugin import load
from vllm_async_spec.vllm_plugin.patches.prometheus_registry import publisher

from vllm_async_spec.vllm_plugin.metrics.snapshot import Engine

publishing.INTERVAL = 0.05

def be_a_worker():
    load()
    publisher.report(engine=Engine(True, "user", "V1", "TORCH_SDPA"))

def count(times):
    load()
    for _ in range(times):
        record_fallback("test")
        with host_read("thing", 4):
            pass

def count_for_ever(times):
    count(times)
    time.sleep(100)

def seen():
    snapshot = publisher.snapshot()
    return [sum(snapshot.waits.values()), snapshot.fallbacks["test"]]

def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.02)

def written():
    return [json.loads(path.read_text())["fallbacks"] for path in directory().glob("*.json")]

def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "async-spec-metrics"]

def directory():
    return Path(os.environ[VARIABLE])
"""


Serve = Callable[..., list[object]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    (tmp_path / "temporary").mkdir()

    def run(lines: str, **variables: str) -> list[object]:
        script = tmp_path / "server.py"
        script.write_text(SERVER + "\nif __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(lines), "    "))
        environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")} | variables
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_counts_of_forked_and_spawned_processes_add_up_and_outlive_them(serve: Serve):
    lines = """
        load()
        count(1)  # a child that is forked must not count this again
        for method, times, total in (("fork", 2, 3), ("spawn", 3, 6), ("fork", 4, 10)):
            child = multiprocessing.get_context(method).Process(target=count_for_ever, args=(times,), daemon=True)
            child.start()
            until(lambda: seen() == [total, total])
            child.kill()
            child.join()
            print(json.dumps(seen()))
        (cause, kind), = publisher.snapshot().waits
        print(json.dumps([cause, kind, len(written())]))
    """
    *totals, (cause, kind, files) = serve(lines)
    assert totals == [[3, 3], [6, 6], [10, 10]]
    assert kind == "copy"
    assert files == 4
    assert cause.startswith("thing at server.py:")
    assert cause.endswith(" count")


def test_a_process_publishes_by_itself_once_it_counts_and_its_server_cleans_up(serve: Serve, tmp_path: Path):
    lines = """
        load()
        print(json.dumps(threads()))
        count(1)
        until(lambda: written() == [{"test": 1}])
        count(1)
        until(lambda: written() == [{"test": 2}])
        print(json.dumps(threads()))
        time.sleep(0.3)
        (file,) = directory().glob("*.json")
        last = file.stat().st_mtime_ns
        time.sleep(0.3)
        print(json.dumps(file.stat().st_mtime_ns == last))
        if os.fork() == 0:
            print(json.dumps(threads()))
            count(1)
            print(json.dumps(threads()), flush=True)
            until(lambda: len(written()) == 2)
            sys.exit()
        os.wait()
        print(json.dumps([oct(directory().stat().st_mode & 0o777), len(written())]))
    """
    thread = ["async-spec-metrics"]
    before, after, untouched, forked_before, forked_after, left = serve(lines)
    assert (before, after) == ([], thread), "nothing runs where nothing is counted"
    assert untouched is True, "nothing is written where nothing has changed"
    assert (forked_before, forked_after) == ([], thread)
    assert left == ["0o700", 2], "a child that ends by itself ends nothing of the server's"
    assert list(tmp_path.glob("temporary/*/run-*")) == []


def test_servers_keep_apart_and_what_a_killed_one_left_is_removed_by_the_next(serve: Serve, tmp_path: Path):
    lines = """
        load()
        count(1)
        until(written)
        if sys.argv[1:] == ["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if not sys.argv[1:]:
            for name in ("killed", "next"):
                subprocess.run([sys.executable, __file__, name])
        print(json.dumps([seen(), len(list(directory().parent.glob('run-*')))]), flush=True)
    """
    assert serve(lines) == [[[1, 1], 2], [[1, 1], 1]], "each has its own counts, and the first is left alone"
    assert list(tmp_path.glob("temporary/*/run-*")) == []


def test_without_a_directory_this_process_is_all_there_is(serve: Serve):
    lines = """
        import tempfile
        tempfile.tempdir = "/proc/nowhere"
        load()
        count(2)
        child = multiprocessing.get_context("fork").Process(target=count, args=(5,))
        child.start()
        child.join()
        print(json.dumps(seen()))
        print(json.dumps([VARIABLE in os.environ, "/proc/nowhere" in str(publisher.failure), threads()]))
    """
    assert serve(lines, ASYNC_SPEC_RUN_DIRECTORY="/elsewhere") == [[2, 2], [False, True, []]]


def test_a_process_with_the_number_of_one_that_has_ended_has_another_file(tmp_path: Path):
    SnapshotFile(tmp_path).replace("first")
    second = SnapshotFile(tmp_path)
    second.replace("second")
    assert second.others() == ["first"]


def test_a_file_that_cannot_be_written_is_warned_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda message, *arguments: warnings.append(message % arguments))
    file = SnapshotFile(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        file.replace("one")
        file.replace("two")
    assert warnings == [
        f"vllm-async-spec: /metrics lacks new counts of process {os.getpid()}: [Errno 28] No space left on device"
    ]
    file.replace("two")
    assert SnapshotFile(tmp_path).others() == ["two"]


def test_counts_that_are_gone_with_their_directory_are_warned_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda message, *arguments: warnings.append(message % arguments))
    publisher = Publisher()
    publisher.snapshot()  # without a shared directory nothing is lost
    publisher._file = SnapshotFile(tmp_path / "run")
    publisher._file.directory.mkdir()
    publisher.snapshot()
    assert warnings == []
    shutil.rmtree(publisher._file.directory)
    for _ in range(2):
        publisher.snapshot()
    (said,) = warnings
    assert f"/metrics lacks the counts of other processes, because {tmp_path / 'run'} was removed; restart" in said


def site(line: int, *, count: int = 1, seconds: float = 0.5, file: str = "/x/model.py") -> SiteReport:
    return SiteReport(CallSite(file, line, "run"), "seq_lens", ReadKind.COPY, count, 4, seconds)


def snapshot(*sites: SiteReport, fallbacks: dict[str, int] | None = None, **states: State) -> Snapshot:
    outcomes = {name: Outcome(PatchSpec(name, "", "", "", "", ()), state) for name, state in states.items()}
    return Snapshot.of(SyncReport(SyncPolicy.ALLOW, sites, fallbacks or {}), outcomes)


def scraped(collector: Collector) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    assert len({name for name, _, _ in samples}) == len(samples)
    return {name: float(value) for name, _, value in samples}


def test_names_and_labels_are_those_of_the_documentation():
    found = snapshot(
        site(3, count=2),
        fallbacks={"min_tokens": 7},
        one=State.APPLIED,
        two=State.APPLIED,
        three=State.REFUSED,
        **{"audit-worker": State.APPLIED},  # serves the audit alone, and is not counted
    )
    found.engines = [Engine(True, "vLLM", "V2", "FLASH_ATTN")]
    assert scraped(Collector(lambda: found, Settings.read({"VLLM_ASYNC_SPEC": "strict"}))) == {
        'vllm:async_spec_host_waits_total{cause="seq_lens at model.py:3 run",kind="copy"}': 2,
        'vllm:async_spec_host_wait_seconds_total{cause="seq_lens at model.py:3 run",kind="copy"}': 0.5,
        'vllm:async_spec_exact_fallbacks_total{reason="min_tokens"}': 7,
        'vllm:async_spec_patches{state="applied"}': 2,
        'vllm:async_spec_patches{state="not needed"}': 0,
        'vllm:async_spec_patches{state="refused"}': 1,
        'vllm:async_spec_patches{state="waiting"}': 0,
        'vllm:async_spec_async_scheduling{backend="FLASH_ATTN",decided_by="vLLM",runner="V2"}': 1,
        'vllm:async_spec_refused_patch{patch="three",reason="its module has not been imported"}': 1,
        f'vllm:async_spec_info{{mode="strict",sync="allow",version="{__version__}"}}': 1,
    }
    documented = re.findall(
        r"^\| `(vllm:\w+)` \|", (Path(__file__).parents[3] / "docs/metrics.md").read_text(), re.MULTILINE
    )
    families = Collector(lambda: found, Settings.read({})).collect()
    assert documented == [family.name + "_total" * (family.type == "counter") for family in families]


def test_causes_beyond_the_cap_are_other_and_no_counter_goes_backwards():
    sites = [site(line) for line in range(100, 100 + MAX_CAUSES + 20)]
    now: list[SiteReport] = []
    collector = Collector(lambda: snapshot(*now), Settings.read({}))
    before: dict[str, float] = {}
    # The later ones sort first, and would take the labels of the earlier if the choice were made anew.
    for newest in reversed(sites):
        now.append(newest)
        after = {name: value for name, value in scraped(collector).items() if "host_wait" in name}
        assert all(after[name] >= value for name, value in before.items())
        before = after
    waits = {name: value for name, value in before.items() if "waits_total" in name}
    assert len(waits) == MAX_CAUSES + 1
    assert waits['vllm:async_spec_host_waits_total{cause="other",kind="copy"}'] == 20
    assert sum(waits.values()) == len(sites)


def test_a_snapshot_survives_its_way_through_a_file():
    one = snapshot(site(1), site(2, count=3), fallbacks={"min_tokens": 7}, patch=State.NOT_NEEDED)
    assert Snapshot.from_json(one.to_json()) == one


def test_together_adds_counts_and_shows_the_state_that_tells_most():
    processes = [
        snapshot(site(1), fallbacks={"min_tokens": 1}, a=State.WAITING, b=State.APPLIED, c=State.WAITING),
        snapshot(
            site(1, count=2), site(2), fallbacks={"min_tokens": 2}, a=State.APPLIED, b=State.REFUSED, c=State.WAITING
        ),
    ]
    for order in (processes, processes[::-1]):
        total = Snapshot.together(order)
        assert total.waits == {("seq_lens at model.py:1 run", "copy"): 3, ("seq_lens at model.py:2 run", "copy"): 1}
        assert total.seconds["seq_lens at model.py:1 run", "copy"] == 1.0
        assert total.fallbacks == {"min_tokens": 3}
        assert total.patches == {"a": State.APPLIED, "b": State.REFUSED, "c": State.WAITING}


def test_together_settles_what_an_engine_foresees_unless_a_process_knows_better():
    front = snapshot(a=State.WAITING, b=State.WAITING, c=State.REFUSED, d=State.WAITING)
    worker = snapshot(a=State.WAITING, b=State.WAITING, c=State.WAITING, d=State.WAITING)
    worker.foreseen = {"a": (State.APPLIED, ""), "b": (State.REFUSED, "changed"), "c": (State.APPLIED, "")}
    for order in ([front, worker], [worker, front]):
        total = Snapshot.together(Snapshot.from_json(each.to_json()) for each in order)
        assert total.patches == {"a": State.APPLIED, "b": State.REFUSED, "c": State.REFUSED, "d": State.WAITING}
        assert total.refused["b"] == "changed"
    assert count_states(total.patches) == {"applied": 1, "not needed": 0, "refused": 2, "waiting": 1}


def test_together_takes_the_workers_word_on_the_engine_before_the_front_ends():
    front, first, second = snapshot(), snapshot(), snapshot()
    front.engines = [Engine(False, "vLLM")]
    assert Snapshot.together([front, front]).engines == front.engines
    first.engines = second.engines = [Engine(False, "vLLM", "V1", "FLASHINFER")]
    for order in ([front, first, second], [first, second, front]):
        total = Snapshot.together(Snapshot.from_json(each.to_json()) for each in order)
        assert total.engines == first.engines


def test_engines_with_the_same_labels_are_one_sample():
    found = snapshot()
    found.engines = [Engine(on, "vLLM", "V1", "FLASHINFER") for on in (True, False, True)]
    samples = scraped(Collector(lambda: found, Settings.read({})))
    assert samples['vllm:async_spec_async_scheduling{backend="FLASHINFER",decided_by="vLLM",runner="V1"}'] == 0


def test_a_worker_tells_the_serving_process_what_its_engine_runs_with(serve: Serve):
    lines = """
        load()
        publisher.report(engine=Engine(True, "user"))
        child = multiprocessing.get_context("spawn").Process(target=be_a_worker)
        child.start()
        child.join()
        print(json.dumps([dataclasses.astuple(engine) for engine in publisher.snapshot().engines]))
    """
    assert serve(lines) == [[[True, "user", "V1", "TORCH_SDPA"]]]


def test_a_cause_names_its_file_as_python_imports_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", ["", "/venv", "/venv/site-packages", "/venv/site-packages/vl"])
    (cause, _), *_ = snapshot(site(7, file="/venv/site-packages/vllm/v1/attention/backend.py")).waits
    assert cause == "seq_lens at vllm/v1/attention/backend.py:7 run"
