"""A release that needs what neither the environment nor the stubs have is told so in one sentence, with the name."""

import json
import subprocess
import sys

import pytest

from vllm_async_spec.compat.builders import is_absent
from vllm_async_spec.compat.lacking import lacking

TRIED = """
import importlib, json, sys
from pathlib import Path
from vllm_async_spec.compat.check import failure_sentence
from vllm_async_spec.compat.lacking import lacking
from vllm_async_spec.compat.vllm_source import load_vllm

load_vllm(Path(sys.argv[1]))
found = {}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        found[name] = lacking(error), failure_sentence(error)
print(json.dumps(found))
"""
MODULES = {
    "dependency": "import a_package_of_tomorrow",
    "compiled": "from vllm import _C_of_tomorrow",
    "submodule": "import vllm._C_of_tomorrow",
    "newer": "from json import of_tomorrow",
    "operator": "import torch\ntorch.ops._C.of_tomorrow",
    "mistake": "{}['a key']",
    "optional": "try:\n    import a_package_of_tomorrow\nexcept ImportError:\n    pass",
    "platforms.__init__": "",
    "model_executor.models.registry": "",
}
REPLACED = ("platforms", "model_executor.models.registry")
STUBS = "add it to STUBS in vllm_async_spec/compat/stubs.py"
SENTENCES = {
    "dependency": (
        "vLLM 9.9.0 imports a_package_of_tomorrow, which is neither installed nor a stub; "
        "install the package, or add a_package_of_tomorrow to STUBS in vllm_async_spec/compat/stubs.py"
    ),
    "submodule": f"vLLM 9.9.0 imports vllm._C_of_tomorrow, which is compiled and has no stub; {STUBS}",
    "compiled": (
        "vLLM 9.9.0 imports what is compiled and has no stub: cannot import name '_C_of_tomorrow' from 'vllm'"
    ),
    "newer": "vLLM 9.9.0 needs a newer package than is installed: cannot import name 'of_tomorrow' from 'json'",
    "operator": f"vLLM 9.9.0 calls torch.ops._C:of_tomorrow, which is compiled and has no stub; {STUBS}",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str | None, str]]:
    source = tmp_path_factory.mktemp("source")
    (source / "vllm-9.9.0.dist-info").mkdir()
    (source / "vllm-9.9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0\n")
    for name, text in ({"__init__": ""} | MODULES).items():
        path = source / "vllm" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    names = [f"vllm.{name}" for name in (*SENTENCES, "mistake", "optional", *REPLACED, "absent")]
    done = subprocess.run([sys.executable, "-c", TRIED, source, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str | None, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", SENTENCES)
def test_what_is_missing_is_named(told: dict[str, tuple[str | None, str]], name: str):
    sentence, failure = told[f"vllm.{name}"]
    assert sentence is not None
    assert sentence.startswith(SENTENCES[name])
    assert failure == sentence, "the suite says the same"


def test_other_errors_are_no_want_of_a_stub(told: dict[str, tuple[str | None, str]]):
    assert told["vllm.mistake"][0] is None
    assert "KeyError" in told["vllm.mistake"][1]
    assert "vllm.optional" not in told
    assert told["vllm.absent"][0] is None, "it is this test that asked for the module"


@pytest.mark.parametrize("name", REPLACED)
def test_a_stub_of_what_the_release_no_longer_has_is_refused(told: dict[str, tuple[str | None, str]], name: str):
    assert f"VllmSourceError: vLLM 9.9.0 no longer has what the stub of vllm.{name}:" in told[f"vllm.{name}"][1]


def test_without_a_loaded_release_nothing_is_said():
    assert lacking(ModuleNotFoundError("No module named 'x'", name="x")) is None


@pytest.mark.parametrize(
    ("missing", "absent"),
    [("a", True), ("a.b", True), ("a.b.c", True), ("a.b.c.d", False), ("a.bc", False), (None, False)],
)
def test_a_module_is_absent_if_it_or_what_is_around_it_is_missing(missing: str | None, absent: bool):
    assert is_absent(ModuleNotFoundError("gone", name=missing), "a.b.c") is absent
