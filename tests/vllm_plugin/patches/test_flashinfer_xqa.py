"""Whether FlashInfer decodes with XQA is asked of the machine; and its kernels are compiled before any request."""

import logging
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.metrics.publisher import SnapshotFile
from vllm_async_spec.vllm_plugin.patches import flashinfer_xqa


class Platform:
    def __init__(self, capability: int) -> None:
        self.capability = capability

    def is_device_capability(self, capability: int) -> bool:
        return capability == self.capability

    def is_device_capability_family(self, family: int) -> bool:
        return family // 10 == self.capability // 10


SUPPORTS = """
import functools

@functools.cache
def supports_trtllm_attention(is_prefill: bool = False) -> bool:
    if batch_invariant or not has_nvidia_artifactory():
        return False
    if current_platform.is_device_capability(90) or current_platform.is_device_capability_family(120):
        return not is_prefill
    return bool(current_platform.is_device_capability_family(100))
"""


def patched(capability: int, *, server: bool, batch_invariant: bool = False) -> Any:
    """Something like vLLM's module, as far as it decides this; `asked` counts the requests to the server."""
    module: Any = ModuleType("something_like_vllm_utils_flashinfer")
    module.asked = 0
    module.current_platform = Platform(capability)

    def has_nvidia_artifactory() -> bool:
        module.asked += 1
        return server

    module.batch_invariant = batch_invariant
    exec(SUPPORTS, vars(module))  # by the names of its module, as vLLM's is
    module.has_nvidia_artifactory = has_nvidia_artifactory
    with pytest.MonkeyPatch.context() as patch, Transaction() as transaction:
        patch.setitem(sys.modules, module.__name__, module)  # a function is replaced wherever a module has it by name
        flashinfer_xqa._apply(transaction, module)
    return module


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm")  # the compatibility suite sets another where it runs in this process


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    answer: list[str | None] = ["/usr/local/cuda/bin/nvcc"]
    monkeypatch.setattr(flashinfer_xqa, "xqa_source", lambda: answer[0])
    return answer


@pytest.mark.parametrize("capability", [90, 120, 121])
def test_a_machine_with_xqa_asks_no_server(capability: int, source: list[str | None]):
    module = patched(capability, server=False)
    assert module.supports_trtllm_attention() is True
    assert module.supports_trtllm_attention(is_prefill=False) is True
    assert module.supports_trtllm_attention(is_prefill=True) is False
    assert module.asked == 0


@pytest.mark.parametrize(("capability", "server"), [(90, True), (90, False), (100, True), (100, False), (80, True)])
def test_otherwise_upstreams_answer_stands(capability: int, server: bool, source: list[str | None]):
    module = patched(capability, server=server)
    assert module.supports_trtllm_attention(is_prefill=True) is (server and capability == 100)
    if capability != 90:
        assert module.supports_trtllm_attention() is (server and capability == 100)


@pytest.mark.parametrize("server", [True, False])
def test_a_machine_that_can_have_no_xqa_is_told_how(
    server: bool, source: list[str | None], caplog: pytest.LogCaptureFixture
):
    source[0] = None
    module = patched(90, server=server)
    assert module.supports_trtllm_attention() is server
    assert "this machine has neither nvcc nor flashinfer-jit-cache" in caplog.text
    assert module.has_nvidia_artifactory() is server, "what stood in for the server is still there"


@pytest.mark.parametrize(
    ("capability", "server", "told"), [(100, False, 1), (103, False, 1), (100, True, 0), (80, False, 0)]
)
def test_a_machine_that_lacks_cubins_alone_is_told_once_how_to_get_them(
    capability: int, server: bool, told: int, caplog: pytest.LogCaptureFixture
):
    module = patched(capability, server=server)
    for is_prefill in (True, False, True, False):
        assert module.supports_trtllm_attention(is_prefill=is_prefill) is (server and capability != 80)
    assert caplog.text.count("install the package in FlashInfer's version") == told
    patched(capability, server=server, batch_invariant=True).supports_trtllm_attention()
    assert caplog.text.count("install the package in FlashInfer's version") == told, "cubins would not help"
    assert module.has_nvidia_artifactory() is server, "what stood in for the server is still there"


def test_where_xqa_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    installed = {"flashinfer"}
    monkeypatch.setattr(flashinfer_xqa, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert flashinfer_xqa.xqa_source() is None
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    assert flashinfer_xqa.xqa_source() == str(nvcc)
    installed.add("flashinfer_jit_cache")
    assert flashinfer_xqa.xqa_source() == "the package flashinfer-jit-cache"
    installed.clear()
    assert flashinfer_xqa.xqa_source() is None


Shapes = list[tuple[Any, ...]]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shapes:
    built: Shapes = []

    class Spec:
        def __init__(self, *shape: Any) -> None:
            self.shape, self.name = shape, f"xqa_{shape}"

        def get_library_path(self) -> Path:
            return tmp_path / self.name

        def build_and_load(self) -> None:
            if self.shape == ("bad",):
                raise RuntimeError("ninja: build stopped")
            built.append(self.shape)
            self.get_library_path().touch()

    module: Any = ModuleType("flashinfer.jit.xqa")
    module.gen_xqa_module = Spec
    for name in ("flashinfer", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.xqa", module)
    return built


def test_kernels_are_compiled_once(compiler: Shapes, caplog: pytest.LogCaptureFixture):
    flashinfer_xqa.compile_xqa([(1,), (4,), (4, True), (1,)])
    assert sorted(compiler) == [(1,), (4,), (4, True)]
    assert "compiled XQA kernel 3 of 3" in caplog.text
    flashinfer_xqa.compile_xqa([(4,), (5,)])
    assert len(compiler) == 4
    assert "compiling 1 XQA kernels" in caplog.text


def test_a_rank_says_that_it_waits_for_the_kernels_of_another(
    compiler: Shapes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = tmp_path / "server"
    folder.mkdir()
    for shape in ((1,), (1,), (4,)):
        (tmp_path / f"xqa_{shape}").unlink(missing_ok=True)  # no rank has finished before the next one asks
        rank = SimpleNamespace(is_first=SnapshotFile(folder).claim)
        monkeypatch.setattr(flashinfer_xqa, "publisher", rank)
        flashinfer_xqa.compile_xqa([shape])
    said = [line for line in caplog.messages if "1 of 1" not in line]
    compiling = "vllm-async-spec: compiling 1 XQA kernels, once for this machine"
    waiting = "vllm-async-spec: waiting for 1 XQA kernels, which another rank compiles"
    assert said == [compiling, waiting, compiling]


def test_kernels_are_loaded_on_the_device_of_their_rank(compiler: Shapes, monkeypatch: pytest.MonkeyPatch):
    """A start of two ranks hung: the second rank's kernels had been prepared for the first GPU."""
    current, loaded_on = threading.local(), []
    current.device = 1
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: getattr(current, "device", 0),
        set_device=lambda index: setattr(current, "device", index),
    )
    monkeypatch.setattr(flashinfer_xqa, "torch", SimpleNamespace(cuda=cuda))
    spec = sys.modules["flashinfer.jit.xqa"].gen_xqa_module
    monkeypatch.setattr(spec, "build_and_load", lambda self: loaded_on.append(cuda.current_device()))
    flashinfer_xqa.compile_xqa([(1,), (4,)])
    assert loaded_on == [1, 1]


def test_a_compiler_that_fails_says_so(compiler: Shapes):
    with pytest.raises(RuntimeError, match="ninja: build stopped"):
        flashinfer_xqa.compile_xqa([("bad",)])
