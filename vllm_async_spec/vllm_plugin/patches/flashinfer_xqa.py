"""Lets FlashInfer decode with XQA wherever nvcc or prebuilt kernels are installed.

vLLM uses XQA only if NVIDIA's artifact server answers. But flashinfer-python contains the XQA source, which nvcc
compiles, and flashinfer-jit-cache contains the kernels. Without XQA, SM90 and SM12x use wrappers that the host plans at
each step. The trtllm-gen kernels of SM100 do come from that server, or offline from the package flashinfer-cubin. For
these vLLM's own answer stands; if neither is at hand, a log line says how to get the kernels.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType

import torch

from vllm_async_spec.patching import Transaction
from vllm_async_spec.vllm_plugin.ledger import Implementation
from vllm_async_spec.vllm_plugin.log import inform, logger
from vllm_async_spec.vllm_plugin.patches.prometheus_registry import publisher

NO_CUBINS = (
    "vllm-async-spec: NVIDIA's artifact server does not answer and the package flashinfer-cubin is not installed, so "
    "FlashInfer's trtllm-gen kernels can't be had; install the package in FlashInfer's version (pip install "
    "flashinfer-cubin --extra-index-url https://flashinfer.ai/whl), or copy what `flashinfer download-cubin` fetches "
    "elsewhere and set FLASHINFER_CUBIN_DIR and VLLM_HAS_FLASHINFER_CUBIN=1, or use --attention-backend FLASH_ATTN"
)
"""How to get the kernels of SM100 and SM103 without network."""

_compiling = threading.Lock()


def no_flashinfer() -> str | None:
    """The reason why FlashInfer can't be used: it is not installed. None if it is."""
    return "FlashInfer is not installed" if find_spec("flashinfer") is None else None


def xqa_source() -> str | None:
    """Where this machine gets XQA kernels: a package or nvcc's path. None if it can't."""
    if no_flashinfer() is not None:
        return None
    if find_spec("flashinfer_jit_cache") is not None:
        return "the package flashinfer-jit-cache"
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(_cuda_home(), "bin"))


def _cuda_home() -> str:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"


def _apply(transaction: Transaction, module: ModuleType) -> None:
    original = module.supports_trtllm_attention
    transaction.set_function(module, "supports_trtllm_attention", _asking_the_machine(original, module))


_left_out: contextvars.ContextVar[bool] = contextvars.ContextVar("_left_out", default=False)


@contextlib.contextmanager
def without_xqa() -> Iterator[None]:
    """Within the block, vLLM finds neither XQA nor trtllm-gen, in this thread only: for shapes they don't support."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def _asking_the_machine(original: Callable[..., bool], module: ModuleType) -> Callable[..., bool]:
    @functools.wraps(original)
    def supports_trtllm_attention(is_prefill: bool = False) -> bool:
        return not _left_out.get() and supported(is_prefill)

    @functools.cache
    def supported(is_prefill: bool) -> bool:
        # vLLM decides which machines have XQA: its answer if the server replied.
        if module.current_platform.is_device_capability_family(100):
            answer = original(is_prefill)
            # vLLM always asks about decoding too, and one warning is enough.
            if not (answer or is_prefill) and _answer_with_artifacts(original, is_prefill):
                logger.warning(NO_CUBINS)
            return answer
        if not _answer_with_artifacts(original, is_prefill):
            return False  # whatever the server says, which vLLM's function asks first, for up to 5 s in each rank
        if is_prefill:
            return original(is_prefill)
        source = xqa_source()
        if source is None:
            logger.warning(
                "vllm-async-spec: this machine has neither nvcc nor flashinfer-jit-cache, so FlashInfer can't get its "
                "XQA kernels; install one of them, or use --attention-backend FLASH_ATTN"
            )
            return original(is_prefill)
        inform("vllm-async-spec: FlashInfer decodes with XQA, from %s; no artifact server is asked", source)
        return True

    # vLLM's function is cached, and callers may clear its cache.
    supports_trtllm_attention.cache_clear = supported.cache_clear  # type: ignore[attr-defined]
    return supports_trtllm_attention


def _answer_with_artifacts(original: Callable[..., bool], is_prefill: bool) -> bool:
    """The answer of vLLM as if the artifact server had replied.

    vLLM's function runs uncached, with globals of its own. Its module stays unchanged, because other threads read it.
    """
    asked: FunctionType = inspect.unwrap(original)
    names = asked.__globals__ | {"has_nvidia_artifactory": lambda: True}
    return bool(FunctionType(asked.__code__, names, asked.__name__, asked.__defaults__, asked.__closure__)(is_prefill))


def compile_xqa(shapes: Iterable[tuple[object, ...]]) -> None:
    """Compile and load XQA kernels now, one thread each, and log the progress. Kernels on disk are left alone.

    Each rank of a server calls this. FlashInfer has a file lock for each kernel, so one rank compiles and others wait.

    Args:
        shapes: arguments of `flashinfer.jit.xqa.gen_xqa_module`.

    Raises:
        RuntimeError: the compiler failed; FlashInfer's message.
    """
    from flashinfer.jit.xqa import gen_xqa_module

    with _compiling:
        specs = {spec.name: spec for spec in (gen_xqa_module(*shape) for shape in shapes)}
        missing = [spec for spec in specs.values() if not Path(spec.get_library_path()).exists()]
        if not missing:
            return
        begun = time.monotonic()
        if publisher.is_first(f"compiling {sorted(spec.name for spec in missing)}"):
            inform("vllm-async-spec: compiling %d XQA kernels, once for this machine", len(missing))
        else:
            inform("vllm-async-spec: waiting for %d XQA kernels, which another rank compiles", len(missing))
        # A kernel's library prepares the thread's current device when it is loaded. A new thread has the first device,
        # and the kernels of any other rank would then fail with cudaErrorInvalidValue while its peers wait for it.
        cuda = torch.cuda
        take_device = functools.partial(cuda.set_device, cuda.current_device()) if cuda.is_available() else None
        with ThreadPoolExecutor(len(missing), initializer=take_device) as pool:
            building = {pool.submit(spec.build_and_load): spec for spec in missing}
            for number, built in enumerate(as_completed(building), 1):
                built.result()
                inform(
                    "vllm-async-spec: compiled XQA kernel %d of %d after %.0f s",
                    number,
                    len(missing),
                    time.monotonic() - begun,
                )


IMPLEMENTATIONS = {"flashinfer-xqa": Implementation(_apply, unneeded_here=no_flashinfer)}
