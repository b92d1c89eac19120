"""FlashInfer's choice of an older GPU's kernels."""

import sys
from types import ModuleType

import pytest

from benchmarks import older_gpu
from benchmarks.child import environment
from benchmarks.soak.soaks import SOAKS


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    found = []
    for name in ("flashinfer", "flashinfer.prefill", "flashinfer.decode"):
        module = ModuleType(name)
        module.__dict__["determine_attention_backend"] = lambda *_: "fa3"
        monkeypatch.setitem(sys.modules, name, module)
        found.append(module)
    monkeypatch.setattr(older_gpu, "_asked", [])
    return found[1:]


def test_wrappers_choose_by_themselves_unless_asked(modules: list[ModuleType], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(*older_gpu.ENVIRONMENT, raising=False)
    older_gpu.choose()
    assert [module.determine_attention_backend("cuda", 0) for module in modules] == ["fa3", "fa3"]
    assert older_gpu.chosen() is None


def test_wrappers_are_told_and_it_is_known_that_one_asked(modules: list[ModuleType], monkeypatch: pytest.MonkeyPatch):
    for name, value in older_gpu.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    older_gpu.choose()
    assert older_gpu.chosen() is None  # nothing has planned yet
    assert [module.determine_attention_backend("cuda", 0, use_custom_mask=False) for module in modules] == ["fa2"] * 2
    assert older_gpu.chosen() == "fa2"


def test_a_flashinfer_that_chooses_in_another_way_is_refused(
    modules: list[ModuleType], monkeypatch: pytest.MonkeyPatch
):
    for name, value in older_gpu.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    del modules[1].__dict__["determine_attention_backend"]
    with pytest.raises(RuntimeError, match=r"flashinfer\.decode has no determine_attention_backend"):
        older_gpu.choose()


def test_the_soak_that_asks_is_given_it_and_no_other():
    (name,) = older_gpu.ENVIRONMENT
    asking = [soak for soak in SOAKS.values() if name in environment(soak.subject, {name: "fa2"})]
    assert [soak.name for soak in asking] == ["0.32.0-V2-FLASHINFER-fa2"]
    assert environment(asking[0].subject, {})[name] == "fa2"
