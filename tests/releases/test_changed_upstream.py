"""Whatever upstream makes of a target, a patch is settled: nothing raises, and what is refused changes nothing."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_flashinfer
import pytest
from undone import ALL, undone

from vllm_async_spec.vllm_plugin.ledger import Ledger, Outcome, PatchSpec, State, Target, applying, load_ledger
from vllm_async_spec.vllm_plugin.ledger.fingerprint import fingerprints, module_file
from vllm_async_spec.vllm_plugin.ledger.targets import defines, resolve

SPECS = load_ledger()
TARGETS = [pytest.param(spec, target, id=f"{spec.name}-{target}") for spec in SPECS for target in spec.targets]
NEEDS = [pytest.param(spec, need, id=f"{spec.name}-{need}") for spec in SPECS for need in spec.needs]


@pytest.fixture(scope="module", autouse=True)
def _flashinfer() -> None:
    fake_flashinfer.install()


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    with undone():
        yield


def owner_of(module: Any, qualname: str) -> tuple[Any, str]:
    path, _, name = qualname.rpartition(".")
    return (resolve(module, path) if path else module), name


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("vllm.platforms").current_platform, "is_cpu", lambda: True)


def ledger_with(spec: PatchSpec) -> Ledger:
    names, found = [spec.name], {}
    while names:
        name = names.pop()
        if name not in found:
            found[name] = next(each for each in SPECS if each.name == name)
            names += found[name].needs
    return Ledger({name: ALL[name] for name in found}, found.values(), release=sys.modules["vllm"].__version__)


def imported(spec: PatchSpec) -> list[Any]:
    modules = []
    for name in spec.modules:
        with contextlib.suppress(ModuleNotFoundError):
            modules.append(importlib.import_module(name))
    return modules


def imported_with(spec: PatchSpec, target: Target) -> tuple[list[Any], Any]:
    """The modules of a patch, and that of one target, or the test is skipped."""
    modules = imported(spec)
    module = next((each for each in modules if each.__name__ == target.module), None)
    if module is None or not defines(module, target.qualname):
        pytest.skip("this release has no such target")
    return modules, module


def settled(spec: PatchSpec, modules: list[Any]) -> Outcome:
    ledger = ledger_with(spec)
    for module in modules:
        ledger.settle(ledger.outcomes[spec.name], module)
    return ledger.outcomes[spec.name]


class Callable_:
    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


def foreign(function: Any) -> Any:
    names: dict[str, Any] = {"functools": functools, "function": function}
    code = "@functools.wraps(function)\ndef wrapped(*args, **kwargs):\n    return function(*args, **kwargs)\n"
    exec(compile(code, "/elsewhere/other_plugin.py", "exec"), names)
    return names["wrapped"]


REPLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "partialmethod": (lambda value: functools.partialmethod(value), "has been replaced by a partialmethod"),
    "property": (lambda value: property(value), "has been replaced by a property"),
    "callable object": (lambda value: Callable_(), "has been replaced by a Callable_"),
    "wrapped by another plugin": (foreign, r"replaced by another plugin \(/elsewhere/other_plugin.py:1\)"),
    "None": (lambda value: None, "has been replaced by a NoneType"),
}


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize(("spec", "target"), TARGETS)
def test_what_is_put_in_a_targets_place_is_refused(
    spec: PatchSpec, target: Target, how: str, monkeypatch: pytest.MonkeyPatch
):
    modules, module = imported_with(spec, target)
    owner, name = owner_of(module, target.qualname)
    make, message = REPLACED[how]
    monkeypatch.setattr(owner, name, make(resolve(module, target.qualname)))
    before = dict(vars(owner))
    outcome = settled(spec, modules)
    assert outcome.state in (State.REFUSED, State.NOT_NEEDED, State.WAITING), outcome
    assert dict(vars(owner)) == before
    if outcome.state is State.REFUSED and "has been replaced" in outcome.detail:
        assert re.search(message, outcome.detail), outcome.detail


def edited(source: str, qualname: str, how: str) -> str:
    tree = ast.parse(source)
    body, node = tree.body, None
    for name in qualname.split("."):
        node = next(each for each in body if getattr(each, "name", None) == name)
        siblings, body = body, getattr(node, "body", [])
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    if how == "renamed":
        node.name += "_renamed"
    elif how == "deleted":
        siblings.remove(node)
    elif how == "another line":
        node.body.insert(0, ast.parse("another = 'line'").body[0])
    elif not isinstance(node, ast.ClassDef):
        node.args.kwonlyargs.append(ast.arg("another_parameter"))
        node.args.kw_defaults.append(ast.Constant(None))
    else:
        node.keywords.append(ast.keyword("metaclass", ast.Name("type", ast.Load())))
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.parametrize("how", ["renamed", "deleted", "another line", "another signature"])
@pytest.mark.parametrize(("spec", "target"), TARGETS)
def test_a_target_that_upstream_changed_is_refused(
    spec: PatchSpec, target: Target, how: str, monkeypatch: pytest.MonkeyPatch
):
    modules, module = imported_with(spec, target)
    if not fingerprints(inspect.getsource(module), [target.qualname]):
        pytest.skip("its source is not in the module")
    source = edited(inspect.getsource(module), target.qualname, how)
    getsource = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda each: source if each is module else getsource(each))
    owner, name = owner_of(module, target.qualname)
    if how in ("renamed", "deleted"):
        monkeypatch.delattr(owner, name)
    before = dict(vars(owner))
    outcome = settled(spec, modules)
    assert outcome.state is not State.APPLIED or target.module not in _applied_in(outcome, spec)
    assert dict(vars(owner)) == before or outcome.state is State.APPLIED


def _applied_in(outcome: Outcome, spec: PatchSpec) -> set[str]:
    """The modules whose targets this outcome vouches for; where one of several alternatives is gone, not that one."""
    return {target.module for target in spec.targets if str(target) in outcome.detail}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_module_that_upstream_moved_is_refused_at_once(spec: PatchSpec, release: str):
    moved = tuple(
        Target(f"vllm.no_such_package.deep.{t.module.rpartition('.')[2]}", t.qualname, t.fingerprints)
        for t in spec.targets
    )
    there = dataclasses.replace(spec, targets=moved)
    ledger = Ledger({spec.name: ALL[spec.name]}, [there], release=release)
    ledger.install()
    outcome = ledger.outcomes[spec.name]
    assert outcome.state in (State.REFUSED, State.NOT_NEEDED)
    if outcome.state is State.REFUSED:
        assert outcome.detail.startswith("this vLLM has no vllm.no_such_package.deep.")


@pytest.fixture
def change(vllm_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[PatchSpec], None]:
    getsource = inspect.getsource

    def changed(spec: PatchSpec) -> None:
        copies = {}
        for target in spec.targets:
            path = module_file(vllm_source, target.module)
            if path is None:
                continue
            copy = tmp_path / path.relative_to(vllm_source)
            copies[target.module] = copy
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():
                shutil.copy(path, copy)
            with contextlib.suppress(StopIteration):  # the target of another release
                copy.write_text(edited(copy.read_text(), target.qualname, "another line"))
        monkeypatch.setattr(applying, "package_root", lambda module: tmp_path)
        monkeypatch.setattr(
            inspect,
            "getsource",
            lambda module: copies[module.__name__].read_text() if module.__name__ in copies else getsource(module),
        )

    return changed


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(("spec", "need"), NEEDS)
def test_what_needs_a_refused_patch_is_refused(
    spec: PatchSpec, need: str, release: str, change: Callable[[PatchSpec], None], monkeypatch: pytest.MonkeyPatch
):
    needed = next(each for each in SPECS if each.name == need)
    if release not in spec.releases or release not in needed.releases:
        pytest.skip("one of the two is not for this release")
    modules = imported(spec)
    with undone():
        assert settled(spec, modules).state is State.APPLIED, "the control"
    change(needed)
    with monkeypatch.context() as unimported:
        for module in imported(needed):
            unimported.delitem(sys.modules, module.__name__)
        foreseen = settled(spec, modules)
    assert foreseen.state is State.REFUSED
    assert foreseen.detail.startswith(f"it needs {need}, which is refused: "), foreseen.detail


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(("spec", "need"), NEEDS)
def test_a_need_that_is_refused_late_takes_back_what_needs_it(spec: PatchSpec, need: str, release: str):
    if release not in spec.releases or need not in ledger_with(spec).outcomes:
        pytest.skip("it is not for this release")
    modules = imported(spec)
    owners = [owner for module in modules for owner in _owners(spec, module)]
    before = [dict(vars(owner)) for owner in owners]
    ledger = ledger_with(spec)
    outcome = ledger.outcomes[spec.name]
    for module in modules:
        ledger.settle(outcome, module)
    assert outcome.state is State.APPLIED
    assert [dict(vars(owner)) for owner in owners] != before
    for name, other in ledger.outcomes.items():
        if name != spec.name and other.changes is not None:
            other.changes.roll_back()
    ledger._refuse(ledger.outcomes[need], "its worker refused it")
    assert outcome.state is State.REFUSED
    assert outcome.detail == f"it needs {need}, which is refused: its worker refused it"
    assert [dict(vars(owner)) for owner in owners] == before


def _owners(spec: PatchSpec, module: Any) -> list[Any]:
    targets = [target for target in spec.targets if target.module == module.__name__]
    return [owner_of(module, target.qualname)[0] for target in targets if defines(module, target.qualname)]
