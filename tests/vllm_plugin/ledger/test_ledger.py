"""The ledger on a module of its own."""

import dataclasses
import functools
import importlib
import sys
from pathlib import Path

import pytest
from ledger_source import SOURCE, spec
from packaging.specifiers import SpecifierSet

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation, Ledger, Outcome, PatchSpec, State, Target, targets
from vllm_async_spec.vllm_plugin.ledger.fingerprint import fingerprints


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """A module `upstream_N` that a patch targets; a new name each time."""
    name = f"upstream_{abs(hash(tmp_path))}"
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def double(transaction: Transaction, module) -> None:
    original = module.Runner.step

    @functools.wraps(original)
    def step(self, tokens=1):
        return 2 * original(self, tokens)

    transaction.set(module.Runner, "step", step)


def installed(spec: PatchSpec, apply=double, unneeded=lambda: None, **given) -> Outcome:
    ledger = Ledger({spec.name: Implementation(apply, unneeded)}, (spec,), **given)
    ledger.install()
    return ledger.outcomes[spec.name]


def test_a_patch_waits_for_its_module_and_is_applied_as_it_is_imported(upstream):
    outcome = installed(spec(upstream))
    assert outcome.state is State.WAITING
    module = importlib.import_module(upstream)
    assert (outcome.state, outcome.release) == (State.APPLIED, "1.0")
    assert module.Runner().step(1) == 4
    assert type(module.__spec__.loader).__module__ == "_frozen_importlib_external"


def test_installing_twice_is_the_same_as_once(upstream):
    ledger = Ledger({"double": Implementation(double)}, (spec(upstream),))
    ledger.install()
    ledger.install()
    module = importlib.import_module(upstream)
    ledger.install()
    assert module.Runner().step(1) == 4


def test_a_changed_upstream_function_is_refused_and_left_alone(upstream, tmp_path):
    path = tmp_path / f"{upstream}.py"
    path.write_text(SOURCE.replace("tokens + 1", "tokens + 2"))
    refused = []
    outcome = installed(spec(upstream), on_settled=refused.append)
    module = importlib.import_module(upstream)
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
    assert found == {"Runner.step": "f069f5e2", "Runner": "06baa0e8"}


def test_what_no_process_here_needs_is_settled_before_its_module_exists(upstream):
    settled = []
    implementation = Implementation(double, unneeded_here=lambda: "there is no such card")
    ledger = Ledger({"double": implementation}, (spec(upstream),), settled.append)
    ledger.install()
    ledger.install()
    (outcome,) = settled
    assert (outcome.state, outcome.detail) == (State.NOT_NEEDED, "there is no such card")
    assert importlib.import_module(upstream).Runner().step() == 2


def test_what_is_not_needed_is_left_alone_even_where_it_has_changed(upstream, tmp_path):
    (tmp_path / f"{upstream}.py").write_text(SOURCE.replace("tokens + 1", "2 * tokens + 2"))
    outcome = installed(spec(upstream), unneeded=lambda: "it doubles by itself")
    module = importlib.import_module(upstream)
    assert (outcome.state, outcome.detail) == (State.NOT_NEEDED, "it doubles by itself")
    assert module.Runner().step(1) == 4


def test_a_patch_that_fails_half_way_leaves_the_original(upstream):
    def half(transaction, module):
        double(transaction, module)
        transaction.set(module.Runner, "fresh", 1)
        transaction.set(module.Runner, "name", "replaced")
        raise RuntimeError("upstream moved")

    outcome = installed(spec(upstream), half)
    module = importlib.import_module(upstream)
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
    outcome = installed(spec(upstream))
    assert outcome.state is State.REFUSED
    assert "replaced by another plugin (/elsewhere/other_plugin.py:1)" in outcome.detail
    assert module.Runner().step(1) == 7


def test_names_that_newer_pythons_add_to_a_class_do_not_matter(upstream):
    """Python 3.13 puts __firstlineno__ and __static_attributes__ into a class's own namespace."""
    module = importlib.import_module(upstream)
    module.Runner.__firstlineno__, module.Runner.__static_attributes__ = 4, ()
    assert installed(spec(upstream, "Runner")).state is State.APPLIED
    assert module.Runner().step(1) == 4
    assert module.Runner.__firstlineno__ == 4


def test_a_target_that_is_gone_is_refused(upstream):
    outcome = installed(spec(upstream, "Runner.gone", SOURCE + "\n"))
    importlib.import_module(upstream)
    assert outcome.detail == f"this vLLM has no {upstream}:Runner.gone"


@pytest.mark.parametrize(
    ("release", "state"),
    {
        "0.18.1": State.WAITING,
        "0.19.0": State.NOT_NEEDED,
        "0.18.0rc1": State.WAITING,
        "0.19.0rc2.dev5": State.NOT_NEEDED,
        "0.13.0": State.NOT_NEEDED,
        "0.1.dev1": State.WAITING,
        "dev": State.WAITING,
        None: State.WAITING,
    }.items(),
)
def test_a_patch_is_not_needed_outside_its_releases_and_waits_where_none_is_known(upstream, release, state):
    patch = dataclasses.replace(spec(upstream), ranges=(SpecifierSet(">=0.14,<0.19"),))
    outcome = installed(patch, release=release)
    assert outcome.state is state
    module = importlib.import_module(upstream)
    assert module.Runner().step(1) == (4 if state is State.WAITING else 2)
    if state is State.NOT_NEEDED:
        assert outcome.detail == f"vLLM {release} is not among its releases"


@pytest.mark.parametrize("changed", [False, True], ids=["as known", "changed"])
def test_a_guard_in_another_module_must_be_as_known(upstream, tmp_path, changed):
    known = "def helper():\n    return 1\n"
    (tmp_path / f"{upstream}_guard.py").write_text(known.replace("1", "2") if changed else known)
    guard = Target(f"{upstream}_guard", "helper", {"1.0": fingerprints(known, ["helper"])["helper"]})
    outcome = installed(dataclasses.replace(spec(upstream), guards=(guard,)))
    module = importlib.import_module(upstream)
    assert module.Runner().step(1) == (2 if changed else 4)
    assert outcome.state is (State.REFUSED if changed else State.APPLIED)
    if changed:
        assert outcome.detail.startswith(f"{upstream}_guard:helper matches no release that this patch supports")


@pytest.mark.parametrize(
    ("change", "unneeded", "foreseen"),
    [
        ("tokens + 1", None, (State.APPLIED, "it is applied when vLLM imports its module")),
        ("tokens + 2", None, (State.REFUSED, "matches no release that this patch supports")),
        ("tokens + 2", "there is no such card", (State.NOT_NEEDED, "there is no such card")),
    ],
)
def test_what_becomes_of_a_waiting_patch_is_foreseen_without_importing_its_module(
    upstream, tmp_path, change, unneeded, foreseen
):
    (tmp_path / f"{upstream}.py").write_text(SOURCE.replace("tokens + 1", change))
    ledger = Ledger({"double": Implementation(double, lambda: unneeded)}, (spec(upstream),))
    ledger.install()
    ((name, (state, why)),) = ledger.foresee(ledger.outcomes).items()
    assert upstream not in sys.modules
    assert (name, state) == ("double", foreseen[0])
    assert why.endswith(foreseen[1])
    importlib.import_module(upstream)
    assert ledger.outcomes["double"].state is state
    assert ledger.foresee(ledger.outcomes) == {}


def test_two_patches_of_one_function_are_both_undone(upstream, monkeypatch):
    monkeypatch.setattr(targets, "_OURS", str(Path(__file__).parent))
    first = spec(upstream)
    second = dataclasses.replace(first, name="double-again")
    ledger = Ledger({each.name: Implementation(double) for each in (first, second)}, (first, second))
    ledger.install()
    module = importlib.import_module(upstream)
    original = module.Runner.step.__wrapped__.__wrapped__
    assert module.Runner().step(1) == 8
    ledger.refuse_all("the plugin failed")
    assert module.Runner.step is original
