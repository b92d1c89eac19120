from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from vllm_async_spec.cli import app
from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.audit_agent import agent as audit_agent
from vllm_async_spec.vllm_plugin.ledger import (
    Implementation,
    Ledger,
    Match,
    PatchError,
    PatchSpec,
    State,
    Target,
    cli,
    ledger_directory,
    load_ledger,
    release_runs,
    verify,
)
from vllm_async_spec.vllm_plugin.ledger.entries import missing
from vllm_async_spec.vllm_plugin.ledger.fingerprint import fingerprints
from vllm_async_spec.vllm_plugin.ledger.readme import readme
from vllm_async_spec.vllm_plugin.patches.implementations import PATCHES
from vllm_async_spec.vllm_plugin.plugin import IMPLEMENTATIONS, _is_vllms_command_line
from vllm_async_spec.vllm_plugin.settings import Mode, SettingError, Settings

SOURCE = '''
import dataclasses
import functools

class Runner:
    """Runs."""

    def step(self, tokens: int = 1) -> int:
        """Documented."""
        # commented
        return tokens + 1

    @property
    def name(self):
        return f"runner {1}"
'''


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """A module `upstream_N` that a patch targets; a new name each time."""
    name = f"upstream_{abs(hash(tmp_path))}"
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def spec(module: str, qualname: str = "Runner.step", source: str = SOURCE, name: str = "double") -> PatchSpec:
    known = fingerprints(source, [qualname])
    target = Target(module, qualname, {"1.0": known.get(qualname, "gone")})
    return PatchSpec(name, "doubles", "why", "upstream", "never", (target,))


def double(transaction: Transaction, module) -> None:
    original = module.Runner.step

    @functools.wraps(original)
    def step(self, tokens=1):
        return 2 * original(self, tokens)

    transaction.set(module.Runner, "step", step)


def installed(spec: PatchSpec, apply=double, unneeded=lambda target: None) -> Ledger:
    ledger = Ledger({spec.name: Implementation(unneeded, apply)}, (spec,))
    ledger.install()
    return ledger


def test_a_patch_waits_for_its_module_and_is_applied_as_it_is_imported(upstream):
    ledger = installed(spec(upstream))
    assert ledger.outcomes["double"].state is State.WAITING
    module = importlib.import_module(upstream)
    outcome = ledger.outcomes["double"]
    assert (outcome.state, outcome.release) == (State.APPLIED, "1.0")
    assert module.Runner().step(1) == 4
    assert type(module.__spec__.loader).__module__ == "_frozen_importlib_external"


def test_installing_twice_is_the_same_as_once(upstream):
    ledger = installed(spec(upstream))
    ledger.install()
    module = importlib.import_module(upstream)
    ledger.install()
    assert module.Runner().step(1) == 4


def test_a_changed_upstream_function_is_refused_and_left_alone(upstream, tmp_path):
    path = tmp_path / f"{upstream}.py"
    path.write_text(SOURCE.replace("tokens + 1", "tokens + 2"))
    refused = []
    ledger = Ledger({"double": Implementation(lambda target: None, double)}, (spec(upstream),), refused.append)
    ledger.install()
    module = importlib.import_module(upstream)
    outcome = ledger.outcomes["double"]
    assert outcome.state is State.REFUSED
    assert f"{upstream}:Runner.step matches no release that this patch supports" in outcome.detail
    assert refused == [outcome]
    assert module.Runner().step(1) == 3


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (('"""Documented."""', '"""Otherwise."""'), True),
        (("# commented", "# differently"), True),
        (("tokens: int = 1", "tokens:int=1"), True),
        (("tokens + 1", "tokens + 2"), False),
        (("int = 1", "int = 2"), False),
        (("def step(self, tokens", "def step(self, *, tokens"), False),
    ],
)
def test_fingerprints_see_code_and_not_layout(change, same):
    changed = SOURCE.replace(*change)
    assert changed != SOURCE
    assert (fingerprints(changed, ["Runner.step"]) == fingerprints(SOURCE, ["Runner.step"])) is same


def test_fingerprints_are_those_of_every_python():
    """Literals: a Python whose syntax trees differ computes others, and then every patch would be refused."""
    found = fingerprints(SOURCE, ["Runner.step", "Runner", "Runner.missing"])
    assert found == {"Runner.step": "f069f5e21afe9073", "Runner": "06baa0e80033624f"}


def test_what_no_process_here_needs_is_settled_before_its_module_exists(upstream):
    patch = spec(upstream)
    settled = []
    implementation = Implementation(lambda target: None, double, lambda: "there is no such card")
    ledger = Ledger({patch.name: implementation}, (patch,), settled.append)
    ledger.install()
    ledger.install()
    (outcome,) = settled
    assert (outcome.state, outcome.detail) == (State.NOT_NEEDED, "there is no such card")
    assert importlib.import_module(upstream).Runner().step() == 2


def test_what_is_not_needed_is_left_alone_even_where_it_has_changed(upstream, tmp_path):
    (tmp_path / f"{upstream}.py").write_text(SOURCE.replace("tokens + 1", "2 * tokens + 2"))
    ledger = installed(spec(upstream), unneeded=lambda step: "it doubles by itself")
    module = importlib.import_module(upstream)
    assert (ledger.outcomes["double"].state, ledger.outcomes["double"].detail) == (
        State.NOT_NEEDED,
        "it doubles by itself",
    )
    assert module.Runner().step(1) == 4


def test_a_patch_that_fails_half_way_leaves_the_original(upstream):
    def half(transaction, module):
        double(transaction, module)
        transaction.set(module.Runner, "fresh", 1)
        transaction.set(module.Runner, "name", "replaced")
        raise RuntimeError("upstream moved")

    ledger = installed(spec(upstream), half)
    module = importlib.import_module(upstream)
    outcome = ledger.outcomes["double"]
    assert outcome.state is State.REFUSED
    assert outcome.detail == "applying it failed and was undone: RuntimeError: upstream moved"
    assert module.Runner().step(1) == 2
    assert module.Runner().name == "runner 1"
    assert not hasattr(module.Runner, "fresh")


def test_a_target_that_another_plugin_replaced_is_refused(upstream):
    module = importlib.import_module(upstream)
    foreign = {}
    exec(compile("def step(self, tokens=1):\n    return 7\n", "/elsewhere/other_plugin.py", "exec"), foreign)
    module.Runner.step = foreign["step"]
    ledger = installed(spec(upstream))
    assert ledger.outcomes["double"].state is State.REFUSED
    assert "replaced by another plugin (/elsewhere/other_plugin.py:1)" in ledger.outcomes["double"].detail
    assert module.Runner().step(1) == 7


def test_names_that_newer_pythons_add_to_a_class_do_not_matter(upstream):
    """Python 3.13 puts __firstlineno__ and __static_attributes__ into a class's own namespace."""
    module = importlib.import_module(upstream)
    module.Runner.__firstlineno__, module.Runner.__static_attributes__ = 4, ()
    ledger = installed(spec(upstream, "Runner"))
    assert ledger.outcomes["double"].state is State.APPLIED
    assert module.Runner().step(1) == 4
    assert module.Runner.__firstlineno__ == 4


def test_a_target_that_is_gone_is_refused(upstream):
    ledger = installed(spec(upstream, "Runner.gone", SOURCE + "\n"))
    importlib.import_module(upstream)
    assert ledger.outcomes["double"].detail == f"this vLLM has no {upstream}:Runner.gone"


def test_the_ledger_and_the_code_name_the_same_patches():
    assert {spec.name for spec in load_ledger()} == set(IMPLEMENTATIONS) | set(audit_agent.IMPLEMENTATIONS)


def test_a_broken_ledger_entry_is_named(tmp_path):
    (tmp_path / "odd.toml").write_text("summary = 1\n")
    with pytest.raises(PatchError, match=r"fingerprints.lock is not a lock file of fingerprints: \[Errno 2\]"):
        load_ledger(tmp_path)
    (tmp_path / "fingerprints.lock").write_text("{}")
    with pytest.raises(PatchError, match=r"odd.toml is not a ledger entry: summary is 1; it must be a string"):
        load_ledger(tmp_path)
    with pytest.raises(PatchError, match="there is no patch ledger in"):
        load_ledger(tmp_path / "nowhere")


def test_verify_compares_source_without_importing_it(tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    (package / "a.py").write_text(SOURCE)
    (package / "b.py").write_text(SOURCE.replace("tokens + 1", "tokens + 2"))
    specs = [spec("vllm.a"), spec("vllm.b"), spec("vllm.c")]
    assert [v.match for v in verify(specs, tmp_path)] == [Match.SAME, Match.CHANGED, Match.CHANGED]
    with pytest.raises(PatchError, match="contains no vllm/"):
        verify(specs, package)


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ([">=1.0"], [Match.SAME, Match.CHANGED, Match.CHANGED]),
        ([">=1.0,<2.0"], [Match.NOT_NEEDED] * 3),
        ([">=0.1,<0.2", ">=2.0,<2.1"], [Match.SAME, Match.CHANGED, Match.CHANGED]),
    ],
)
def test_on_an_unknown_release_not_needed_is_told_from_changed(tmp_path, ranges, found):
    write_vllm(tmp_path, "2.0+cu129")
    specs = [
        dataclasses.replace(spec(module), ranges=tuple(map(SpecifierSet, ranges)))
        for module in ("vllm.a", "vllm.b", "vllm.c")
    ]
    assert [v.match for v in verify(specs, tmp_path)] == found


def write_vllm(path: Path, release: str) -> None:
    (path / "vllm").mkdir()
    (path / "vllm" / "__init__.py").write_text("raise ImportError('never imported')")
    (path / "vllm" / "a.py").write_text(SOURCE)
    (path / "vllm" / "b.py").write_text(SOURCE.replace("tokens + 1", "tokens + 2"))
    (path / f"vllm-{release}.dist-info").mkdir()


ENTRY = """
summary = "Doubles"
why = "why"
upstream = "none"
remove_when = "never"
releases = [">=1.0"]
targets = ["vllm.a:Runner.step", "vllm.c:Runner.step"]
"""


def test_update_writes_the_fingerprints_of_one_release_and_the_readme(tmp_path, monkeypatch):
    ledger, source = tmp_path / "patches", tmp_path / "source"
    ledger.mkdir(), source.mkdir()
    (ledger / "double.toml").write_text(ENTRY)
    (ledger / "older.toml").write_text(ENTRY.replace(">=1.0", ">=0.8,<1.0"))  # of the same targets
    (ledger / "fingerprints.lock").write_text(
        '{"vllm.a:Runner.step": {"0.7": "00", "0.9": "00", "1.0": "01", "2.0": "02"}, "vllm.old:f": {"1.0": "03"}}'
    )
    write_vllm(source, "2.0")
    monkeypatch.setattr(cli, "ledger_directory", lambda: ledger)
    monkeypatch.setattr(cli, "load_ledger", lambda directory=ledger: load_ledger(directory))
    done = CliRunner().invoke(app, ["patches", "verify", "--vllm-source", str(source), "--update"])
    assert done.exit_code == 0, done.output
    assert "read what vLLM changed in the targets of double" in done.output
    lock = json.loads((ledger / "fingerprints.lock").read_text())
    # 0.7 is outside the entries' ranges, 2.0 is new, and no entry names vllm.old any more.
    assert lock == {
        "vllm.a:Runner.step": {"0.9": "00", "1.0": "01", "2.0": "f069f5e21afe9073"},
        "vllm.c:Runner.step": {},
    }
    assert "| [`double`](double.toml) | Doubles | 1.0 to 2.0 | never |" in (ledger / "README.md").read_text()
    assert sorted(path.name for path in ledger.iterdir()) == [
        "README.md",
        "double.toml",
        "fingerprints.lock",
        "older.toml",
    ]
    again = CliRunner().invoke(app, ["patches", "verify", "--vllm-source", str(source), "--update"])
    assert json.loads((ledger / "fingerprints.lock").read_text()) == lock
    assert "Before you commit" not in again.output


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda source, ledger: (source / "vllm-2.0.dist-info").rmdir(),
            "has no vllm-*.dist-info that names",
        ),
        (lambda source, ledger: (source / "vllm" / "a.py").write_text(""), "vLLM 2.0 has no target of double"),
        (lambda source, ledger: (ledger / "fingerprints.lock").write_text("[]"), "is not a lock file of fingerprints"),
        (lambda source, ledger: (ledger / "fingerprints.lock").unlink(), "No such file or directory"),
    ],
)
def test_an_update_that_cannot_be_made_says_why_and_changes_nothing(tmp_path, monkeypatch, spoil, message):
    ledger, source = tmp_path / "patches", tmp_path / "source"
    ledger.mkdir(), source.mkdir()
    (ledger / "double.toml").write_text(ENTRY)
    (ledger / "fingerprints.lock").write_text("{}")
    write_vllm(source, "2.0")
    spoil(source, ledger)
    before = {path.name: path.read_text() for path in ledger.iterdir()}
    monkeypatch.setattr(cli, "ledger_directory", lambda: ledger)
    monkeypatch.setattr(cli, "load_ledger", lambda directory=ledger: load_ledger(directory))
    done = CliRunner().invoke(app, ["patches", "verify", "--vllm-source", str(source), "--update"])
    assert done.exit_code == 1
    assert message in done.output
    assert "Traceback" not in done.output
    assert {path.name: path.read_text() for path in ledger.iterdir()} == before


def test_the_readme_beside_the_entries_is_theirs():
    assert (ledger_directory() / "README.md").read_text() == readme(load_ledger()), (
        "run `vllm-async-spec patches verify --update` with any release of the ledger"
    )


@pytest.mark.parametrize("spec", load_ledger(), ids=lambda spec: spec.name)
def test_an_entry_is_short_names_its_module_and_knows_a_release_of_each_range(spec):
    assert len((ledger_directory() / f"{spec.name}.toml").read_text().splitlines()) <= 30
    for each in spec.ranges:
        assert any(release in each for release in spec.releases), f"no fingerprint is known for {each}"
    code = PATCHES | {"audit": audit_agent}
    stem = max((stem for stem in code if spec.name.replace("-", "_").startswith(stem)), key=len)
    assert spec.name in code[stem].IMPLEMENTATIONS


def test_settings_name_bad_values():
    assert Settings.read({}).mode is Mode.AUTO
    strict = Settings.read({"VLLM_ASYNC_SPEC": "strict", "VLLM_ASYNC_SPEC_SYNC": "warn"})
    assert (strict.mode, strict.mode_from, strict.sync.value) == (Mode.STRICT, "environment", "warn")
    with pytest.raises(SettingError, match="VLLM_ASYNC_SPEC is 'on'; it must be one of auto, strict, off"):
        Settings.read({"VLLM_ASYNC_SPEC": "on"})
    with pytest.raises(SettingError, match="VLLM_ASYNC_SPEC_SYNC is ''; it must be one of allow, warn, error"):
        Settings.read({"VLLM_ASYNC_SPEC_SYNC": ""})


LOAD = "from vllm_async_spec.vllm_plugin.plugin import load; import json; p = load(); "


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=os.environ | environment
    )


def test_off_touches_nothing():
    code = """
        import os, sys, vllm_async_spec
        bare = list(sys.meta_path), dict(os.environ)
        from vllm_async_spec.vllm_plugin.plugin import load
        assert load().ledger is None
        assert (sys.meta_path, os.environ) == bare
    """
    done = in_a_process(code, VLLM_ASYNC_SPEC="off")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_without_an_audit_nothing_of_it_is_there(mode):
    code = (
        LOAD
        + """
import sys, torch
print(json.dumps([
    [name for name in sys.modules if name.startswith(("vllm_async_spec.audit", "vllm_async_spec.vllm_plugin.audit"))],
    [name for name in (p.ledger.outcomes if p.ledger else ()) if name.startswith("audit-")],
    torch.Event.__module__,
]))"""
    )
    assert json.loads(in_a_process(code, VLLM_ASYNC_SPEC=mode).stdout) == [[], [], "torch"]
    there = json.loads(in_a_process(code, VLLM_ASYNC_SPEC=mode, VLLM_ASYNC_SPEC_AUDIT="1").stdout)
    assert "vllm_async_spec.vllm_plugin.audit_agent.agent" in there[0]
    assert there[1] == ["audit-engine-core", "audit-route", "audit-worker"]
    assert there[2] == "vllm_async_spec.audit." + ("cpu_waits" if torch.version.cuda is None else "cuda_waits")


def test_off_with_an_audit_patches_nothing_but_the_audit():
    code = LOAD + "print(json.dumps(list(p.ledger.outcomes)))"
    found = json.loads(in_a_process(code, VLLM_ASYNC_SPEC="off", VLLM_ASYNC_SPEC_AUDIT="1").stdout)
    assert found == ["audit-engine-core", "audit-route", "audit-worker"]


def test_loading_twice_is_the_same_as_once_and_a_forked_child_is_loaded():
    code = """
        import os
        from vllm_async_spec.vllm_plugin import register
        from vllm_async_spec.vllm_plugin.plugin import active_plugin
        register(); first = active_plugin(); register()
        assert active_plugin() is first is not None
        if os.fork() == 0:
            register()
            os._exit(0 if active_plugin() is first else 1)
        assert os.wait()[1] == 0
    """
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr


def test_a_bad_setting_stops_vllms_command_line_with_one_sentence():
    code = """
        import sys
        sys.argv = ['/usr/bin/vllm', 'serve']
        from vllm_async_spec.vllm_plugin import register
        register()
    """
    done = in_a_process(code, VLLM_ASYNC_SPEC="maybe")
    assert done.returncode == 1
    assert done.stderr == "vllm-async-spec: VLLM_ASYNC_SPEC is 'maybe'; it must be one of auto, strict, off\n"


def test_a_foreign_target_that_cannot_be_asked_is_named_too(upstream):
    module = importlib.import_module(upstream)
    foreign = {}
    exec(compile("def step(self, tokens=1):\n    return 7\n", "/elsewhere/other_plugin.py", "exec"), foreign)
    module.Runner.step = foreign["step"]
    ledger = installed(spec(upstream), unneeded=lambda step: step.__globals__["Runner"] and None)
    assert "replaced by another plugin (/elsewhere/other_plugin.py:1)" in ledger.outcomes["double"].detail


def test_releases_are_shown_as_runs_without_gaps():
    def entry(*releases: str) -> PatchSpec:
        return PatchSpec("p", "", "", "", "", (Target("m", "q", dict.fromkeys(releases, "0")),))

    every, some = entry("0.9.0", "0.10.0", "0.10.1", "0.11.0"), entry("0.9.0", "0.10.1", "0.11.0")
    assert release_runs([every, some], every) == ["0.9.0 to 0.11.0"]
    assert release_runs([every, some], some) == ["0.9.0", "0.10.1 to 0.11.0"]


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("/usr/bin/vllm", True),
        ("/x/site-packages/vllm/entrypoints/openai/api_server.py", True),
        ("/home/me/serve.py", False),
    ],
)
def test_only_vllms_own_command_lines_end_without_a_traceback(program, ends):
    assert _is_vllms_command_line(Path(program)) is ends


@pytest.mark.parametrize(
    ("found", "gone"),
    [
        ({"m:f": "1", "m:g": "5"}, []),
        ({"m:f": "2", "m:h": "7"}, []),  # the second release has h, which the first has not, in place of g
        ({"m:f": "1"}, ["m:g"]),
        ({"m:f": "2"}, ["m:h"]),
        ({"m:h": "7"}, ["m:f"]),
        ({"m:f": "1", "m:h": "7"}, []),  # each as some release has it, and all that the second has
        ({"m:f": "9"}, []),  # as in no release, which is said of f
    ],
)
def test_a_target_is_gone_where_every_release_alike_has_it(found: dict[str, str], gone: list[str]) -> None:
    targets = [
        Target("m", "f", {"1.0": "1", "2.0": "2"}),
        Target("m", "g", {"1.0": "5"}),
        Target("m", "h", {"2.0": "7"}),
    ]
    assert list(map(str, missing(targets, found))) == gone
