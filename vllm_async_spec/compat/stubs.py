"""Stubs for parts of vLLM, of its machine and of flashinfer-python, to build metadata without them.

`STUBS` lists what `vllm_source.load_vllm` replaces, and why; no stub computes anything.

The flashinfer-python stub has what vLLM's backends need to build metadata; it records plans and can't attend. Its
`plan` reads on the host what the real one reads, and fills the same buffers. It does not compute the kernels' own plan,
so that plan is never compared.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from vllm_async_spec.compat.compare import Derived


@dataclass(frozen=True, slots=True)
class Stub:
    """One stub for a part of vLLM or of its machine.

    Attributes:
        name: The module, or the `module:attribute`, that is replaced.
        releases: The releases that unpacked use it, as a version range; of those in `fetch.TESTED` and newer ones. No
            release is in the range if only an installed CPU build uses it.
        why: What fails without it, and what stands there instead.
        to_build: Whether only some metadata builders or the server need it; otherwise importing and configuring the
            release does.
    """

    name: str
    releases: str
    why: str
    to_build: bool = False

    def is_for(self, release: str) -> bool:
        """Whether `release` uses it."""
        return SpecifierSet(self.releases).contains(release, prereleases=True)


_EVERY = ">=0.12.0"
_INSTALLED = "<0"
"""No unpacked release: only an installed CPU build."""


_COMPILED = "a compiled module, which vllm.platforms.cuda always imports; replaced by an empty module"

STUBS: tuple[Stub, ...] = (
    Stub("vllm._C", "<=0.22.1", _COMPILED),
    Stub("vllm._C_stable_libtorch", ">=0.22.1", _COMPILED),
    Stub(
        "vllm.vllm_flash_attn._vllm_fa3_C",
        _EVERY,
        "a compiled module, whose presence makes FA3 available; replaced by an empty module",
    ),
    Stub("gguf", "<=0.22.1", "imported by vllm.config until later releases dropped it; replaced by empty classes"),
    Stub(
        "diskcache",
        "<=0.18.1",
        "imported by the runner until later releases dropped it; replaced by empty classes",
    ),
    Stub("orjson", ">=0.33.0", "imported by the API server; replaced by empty classes", True),
    Stub(
        "vllm.platforms:builtin_platform_plugins",
        _EVERY,
        "finds no platform, because there is no NVML; always returns CUDA",
    ),
    Stub(
        "vllm.platforms.cuda:CudaPlatform",
        _EVERY,
        "asks NVML or the driver for the device; the release's own class, which reports one H200 without pinned memory",
    ),
    Stub(
        "vllm.model_executor.models.registry:_run_in_subprocess",
        _EVERY,
        "inspects a model class in a new process, which would import the installed vLLM; runs in this process",
    ),
    Stub(
        "torch.cuda:get_device_capability",
        "<=0.13.0",
        "0.12 and 0.13 ask PyTorch, not their platform, whether FA3 can run; returns (9, 0)",
    ),
    Stub(
        "torch.ops._C:cutlass_scaled_mm_supports_fp8",
        "<=0.28.0",
        "called when fused MoE is imported; returns that there is no such kernel",
    ),
    Stub("torch.ops._C:cutlass_scaled_mm_supports_block_fp8", _EVERY, "see cutlass_scaled_mm_supports_fp8"),
    Stub(
        "torch.ops._vllm_fa3_C:get_scheduler_metadata",
        _EVERY,
        "FA3's tile scheduler, which the FlashAttention builder calls; records its arguments and returns zeros",
    ),
    Stub(
        "vllm._flashmla_C",
        _EVERY,
        "a compiled module, whose presence makes FlashMLA available; replaced by an empty module",
        True,
    ),
    Stub("vllm._flashmla_extension_C", _EVERY, "see vllm._flashmla_C", True),
    Stub(
        "vllm.third_party.flashmla.flash_mla_interface",
        _INSTALLED,
        "FlashMLA's Python, which a build for CPUs lacks; replaced by an empty plan and by empty classes",
        True,
    ),
    Stub(
        "vllm.platforms:vllm_version_matches_substr",
        _INSTALLED,
        "says that the installed vLLM is a build for CPUs, which then leaves out Triton; says that it is not one",
    ),
    Stub(
        "torch.ops._flashmla_C:get_mla_decoding_metadata",
        "<=0.12.0",
        "FlashMLA's tile scheduler; records its arguments and returns zeros",
        True,
    ),
    Stub(
        "torch._C._cpu:_is_amx_tile_supported",
        "<=0.18.1",
        "the CPU backend asks for AMX by a name that newer PyTorch lacks; returns that there is no AMX",
        True,
    ),
    Stub(
        "vllm.v1.attention.backends.mla.indexer:get_paged_mqa_logits_metadata",
        _EVERY,
        "DeepGEMM's scheduler for the sparse indexer, which is not installed; records its arguments and returns zeros",
        True,
    ),
    Stub(
        "vllm._custom_ops:cpu_attn_get_scheduler_metadata",
        _EVERY,
        "the CPU backend's scheduler, which is compiled; records its arguments and returns zeros",
        True,
    ),
    Stub(
        "torch.cuda:get_device_properties",
        _EVERY,
        "some MLA builders size their tables by the device's number of multiprocessors; returns 132, an H200's",
        True,
    ),
    Stub(
        "triton.runtime.jit:JITFunction",
        _EVERY,
        "launching a Triton kernel needs a driver; while the suite watches, a launch only records its arguments",
    ),
    Stub(
        "os.environ:CUDA_VISIBLE_DEVICES",
        _EVERY,
        "without an active driver vLLM drops Triton, and 0.32's runner fails to import; if empty, as in a Ray actor"
        " without a device, vLLM keeps Triton",
    ),
)


class _FlashMlaPlan:
    """Stub of `FlashMLASchedMeta`: the plan that the first kernel of a step fills."""


CONTENTS: dict[str, dict[str, Any]] = {
    "vllm.third_party.flashmla.flash_mla_interface": {
        "FlashMLASchedMeta": _FlashMlaPlan,
        "get_mla_metadata": lambda *arguments, **keywords: (_FlashMlaPlan(), None),
    },
}
"""What stand-ins for modules contain; a module of `STUBS` without an entry is empty."""


_WORKSPACE_BYTES = 8 << 20
"""Size of the workspace that flashinfer-python gives each wrapper for its plan."""


class _Wrapper:
    """A paged-KV-cache wrapper: `plan` reads the page table's ends on the host and copies them to the device."""

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, **buffers: Any
    ) -> None:
        self._device = workspace.device
        self._float_workspace_buffer, self._kv_layout = workspace, kv_layout
        self._backend = "fa2"
        self.is_cuda_graph_enabled = use_cuda_graph
        # Decode wrappers name these arguments `..._buffer`, prefill wrappers `..._buf`.
        given = {name.removesuffix("fer"): buffer for name, buffer in buffers.items()}
        self._paged_kv_indptr_buf = given.get("paged_kv_indptr_buf")
        self._paged_kv_last_page_len_buf = given.get("paged_kv_last_page_len_buf")
        self._pin_memory_int_workspace_buffer = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8)
        self._int_workspace_buffer = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self.planned: dict[str, Any] = {}
        self._plan_info = [0] * 15  # a plan of FlashAttention 2 without split-KV, so without chunks to correct
        self._page_size = 1

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Record the plan, and fill the buffers."""
        indptr, last = _pages(args, kwargs)
        self.planned = _host_arguments(kwargs) | {"rows": len(last)}
        # Older releases give sizes by position: query heads, KV heads, head size, page size.
        sizes = [each for each in args if isinstance(each, int)]
        self._page_size = kwargs["page_size"] if "page_size" in kwargs else sizes[3]
        indptr.to("cpu"), last.to("cpu")
        if self.is_cuda_graph_enabled:
            for buffer, given in ((self._paged_kv_indptr_buf, indptr), (self._paged_kv_last_page_len_buf, last)):
                assert buffer is not None
                buffer[: len(given)].copy_(given, non_blocking=True)
        else:
            self._paged_kv_indptr_buf = indptr.to(self._device, non_blocking=True)
            self._paged_kv_last_page_len_buf = last.to(self._device, non_blocking=True)

    def compared(self) -> dict[str, Any]:
        """What the kernel would use: the plan, and the lengths by which it would mask."""
        if self._paged_kv_indptr_buf is None or self._paged_kv_last_page_len_buf is None:
            return {"planned": self.planned}
        rows = self.planned.get("rows", len(self._paged_kv_indptr_buf) - 1)
        ends, last = self._paged_kv_indptr_buf[: rows + 1], self._paged_kv_last_page_len_buf[:rows]
        pages = ends[1:] - ends[:-1]
        lengths = torch.where(pages == 0, 0, (pages - 1) * self._page_size + last)
        return {
            "planned": self.planned,
            "lengths": Derived(lengths, (ends, last)),
            "page ends": ends,
            "last page": last,
        }

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """There is no kernel."""
        raise NotImplementedError


class _Decode(_Wrapper):
    """Stub of `flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""


class _Prefill(_Wrapper):
    """Stub of `flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""


class _Sink(_Prefill):
    """Stub of `flashinfer.BatchAttentionWithAttentionSinkWrapper`, a prefill wrapper whose kernel knows sinks."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", **given: Any) -> None:
        # Beside buffers it takes what its kernel is compiled for.
        super().__init__(workspace, kv_layout, **{name: value for name, value in given.items() if "_buf" in name})


class _Ragged:
    """Stub of `flashinfer.BatchPrefillWithRaggedKVCacheWrapper`; `plan` reads both offset tensors on the host."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto", **buffers: Any) -> None:
        self._backend = backend
        self.planned: dict[str, Any] = {}

    def plan(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Record the plan."""
        qo_indptr.to("cpu"), kv_indptr.to("cpu")
        if self._backend == "cutlass":
            (qo_indptr[1:] - qo_indptr[:-1]).max().item()
        self.planned = _host_arguments(kwargs) | {"queries": qo_indptr, "keys": kv_indptr}

    def compared(self) -> dict[str, Any]:
        """What the kernel would use."""
        return {"planned": self.planned}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """There is no kernel."""
        raise NotImplementedError


def _pages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """From `plan`'s arguments, the offsets of each request's pages and the tokens in its last page."""
    indptr = kwargs.get("paged_kv_indptr", kwargs.get("indptr"))
    last = kwargs.get("paged_kv_last_page_len", kwargs.get("last_page_len"))
    if indptr is None or last is None:
        # Decode: indptr, indices, last_page_len. Prefill has qo_indptr before them.
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        indptr, last = tensors[-3], tensors[-1]
    return indptr, last


def _host_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor) or name == "qo_indptr"}


def _fast_decode_plan(wrapper: _Wrapper, *args: Any, **kwargs: Any) -> None:
    """Stub of `fast_decode_plan` for CUDA graphs: only plan; the caller fills the buffers."""
    rows = wrapper.planned.get("rows")
    wrapper.planned = _host_arguments(kwargs) | ({} if rows is None else {"rows": rows})


def _get_seq_lens(indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> torch.Tensor:
    return (indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last


class _XqaModule:
    """Stub of what `flashinfer.jit.xqa.gen_xqa_module` returns; compiles nothing."""

    def __init__(self, *shape: Any) -> None:
        self.name = repr(shape)

    def get_library_path(self) -> str:
        return "/nonexistent"

    def build_and_load(self) -> None:
        pass


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _load(*shape: object) -> None:
    """Stub of a function that loads kernels; there are none."""


_CONTENTS: dict[str, dict[str, Callable[..., Any]]] = {
    "flashinfer": {
        "BatchDecodeWithPagedKVCacheWrapper": _Decode,
        "BatchPrefillWithPagedKVCacheWrapper": _Prefill,
        "BatchPrefillWithRaggedKVCacheWrapper": _Ragged,
        "BatchAttentionWithAttentionSinkWrapper": _Sink,
        "get_seq_lens": _get_seq_lens,
    },
    "flashinfer.decode": {"fast_decode_plan": _fast_decode_plan},
    "flashinfer.prefill": {"get_batch_prefill_module": _load},
    "flashinfer.utils": {},
    "flashinfer.mla": {},
    "flashinfer.jit": {},
    "flashinfer.jit.xqa": {"gen_xqa_module": _XqaModule},
}


def install_flashinfer() -> None:
    """Make `import flashinfer` find the stub, unless flashinfer-python is installed."""
    if "flashinfer" in sys.modules or importlib.util.find_spec("flashinfer") is not None:
        return
    # Otherwise vLLM asks a network server whether there are kernels.
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    # Each builder allocates one, and no kernel uses it.
    os.environ["VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"] = "4096"
    put_modules(_CONTENTS)


def put_modules(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Make imports of these modules find their contents, and stubs of all else in them; parents come first."""
    for name, members in contents.items():
        module = _Anything(name)
        vars(module).update(members)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
