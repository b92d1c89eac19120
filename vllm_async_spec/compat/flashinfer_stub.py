"""What vLLM's FlashInfer backends need of flashinfer-python to build metadata: plans are recorded, nothing attends.

A plan reads on the host what the real one reads, and puts into buffers what the real one puts there. What its own
planner would compute for the kernels is not computed, and so never compared.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from vllm_async_spec.compat.compare import Derived

__all__ = ["install"]

_WORKSPACE_BYTES = 8 << 20
"""As flashinfer-python gives each wrapper to plan in."""


class _Wrapper:
    """A wrapper with a paged KV cache: the page table's ends are copied to the device, and read on the host to plan."""

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, **buffers: Any
    ) -> None:
        self._device = workspace.device
        self._float_workspace_buffer, self._kv_layout = workspace, kv_layout
        self._backend = "fa2"
        self.is_cuda_graph_enabled = use_cuda_graph
        # Those of decodes are called buffer, those of prefills buf.
        given = {name.removesuffix("fer"): buffer for name, buffer in buffers.items()}
        self._paged_kv_indptr_buf = given.get("paged_kv_indptr_buf")
        self._paged_kv_last_page_len_buf = given.get("paged_kv_last_page_len_buf")
        self._pin_memory_int_workspace_buffer = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8)
        self._int_workspace_buffer = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self.planned: dict[str, Any] = {}
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
        """What the kernel would go by: the plan, and the lengths that it would mask by."""
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
    """As `flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""


class _Prefill(_Wrapper):
    """As `flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""


class _Ragged:
    """As `flashinfer.BatchPrefillWithRaggedKVCacheWrapper`: both of its offsets are read on the host to plan."""

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
        """What the kernel would go by."""
        return {"planned": self.planned}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """There is no kernel."""
        raise NotImplementedError


def _pages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the pages of each request begin, and the tokens in its last."""
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
    """Under a CUDA graph it leaves the buffers to the caller, and only plans."""
    rows = wrapper.planned.get("rows")
    wrapper.planned = _host_arguments(kwargs) | ({} if rows is None else {"rows": rows})


def _get_seq_lens(indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> torch.Tensor:
    return (indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last


class _XqaModule:
    """As what `flashinfer.jit.xqa.gen_xqa_module` gives; nothing is compiled."""

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
    """Kernels, of which there are none."""


_CONTENTS: dict[str, dict[str, Callable[..., Any]]] = {
    "flashinfer": {
        "BatchDecodeWithPagedKVCacheWrapper": _Decode,
        "BatchPrefillWithPagedKVCacheWrapper": _Prefill,
        "BatchPrefillWithRaggedKVCacheWrapper": _Ragged,
        "get_seq_lens": _get_seq_lens,
    },
    "flashinfer.decode": {"fast_decode_plan": _fast_decode_plan},
    "flashinfer.prefill": {"get_batch_prefill_module": _load},
    "flashinfer.utils": {},
    "flashinfer.mla": {},
    "flashinfer.jit": {},
    "flashinfer.jit.xqa": {"gen_xqa_module": _XqaModule},
}


def install() -> None:
    """Put it where `import flashinfer` finds it, unless there is one."""
    if "flashinfer" in sys.modules or importlib.util.find_spec("flashinfer") is not None:
        return
    # Without it vLLM asks a server on the network whether there are kernels.
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    # Nobody works in it, and each builder has its own.
    os.environ["VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"] = "4096"
    for name, contents in _CONTENTS.items():
        module = _Anything(name)
        vars(module).update(contents)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
